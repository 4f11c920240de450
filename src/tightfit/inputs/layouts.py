"""Which GPUs work together, and on what: why a model, or so many GPUs, cannot be laid out as the levers say.

Each of these functions returns the obstacle, in a sentence that names what would do; None: there is none. How many GPUs
there are may not be known yet.
"""

from __future__ import annotations

from tightfit.messages import Listing, Message
from tightfit.types import (
    COMPRESSING,
    FSDP2,
    STREAM,
    Attention,
    ConfigError,
    Engine,
    Levers,
    Mlp,
    ModelShape,
    Moe,
    Tensor,
)

CUT_INTO_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_INTO_COLUMNS = ("o_proj", "down_proj")
"""The matrices that GPUs share, as the families call them for which transformers has a plan that cuts nothing else."""
PACKED = 8  # weights that DeepSpeed's quantizer takes at a time


def find_group_obstacle(levers: Levers, world: int | None = None) -> Message | None:
    """Why groups of GPUs cannot have a copy of the weights each; None: they can. Of how many GPUs may not be known."""
    size = levers.shard_within
    if not levers.shards_parameters:
        return Message("inputs.groups-need-sharding", size=size, engine=levers.engine)
    if levers.is_fsdp2 and levers.trainer != "tightfit":
        return Message("inputs.groups-are-ours", size=size)
    if levers.stage == 3 and (levers.offload_param != "none" or levers.method == "qlora"):
        return Message("inputs.no-second-copy", size=size)
    ranks = None if world is None else levers.stage_ranks(world)
    if ranks is not None and ranks % size:
        said = {"size": size, "world": ranks, "sizes": Listing(map(str, divisors(ranks)), "or") if ranks > 1 else None}
        return Message("inputs.groups-divide-stage" if ranks != world else "inputs.groups-divide", **said)
    return None


def find_sharing_obstacle(levers: Levers, shape: ModelShape, world: int | None = None) -> Message | None:
    """Why GPUs cannot share the tokens of a sequence; None: they can. Of how many GPUs may not be known."""
    size = levers.sequence_parallel
    if levers.trainer != "tightfit":
        return Message("inputs.sharing-is-ours", size=size)
    if shape.scans:
        return Message("inputs.sharing-scan", size=size, model=shape.name)
    mixers = [block.mixer for block in shape.blocks if isinstance(block.mixer, Attention)]
    if len(mixers) < len(shape.blocks):
        return Message("inputs.sharing-unknown", size=size, model=shape.name)
    # Each GPU gets as many heads; where heads of keys and values are fewer than GPUs, as many GPUs get a copy of each.
    may = [
        n
        for n in range(1, min(mixer.heads for mixer in mixers) + 1)
        if all(not mixer.heads % n and not (mixer.kv_heads % n and n % mixer.kv_heads) for mixer in mixers)
        and not _count_stage(levers, world) % n
    ]
    if size in may:
        return None
    heads = Listing(dict.fromkeys(str(mixer.heads) for mixer in mixers), "and")
    kv_heads = Listing(dict.fromkeys(str(mixer.kv_heads) for mixer in mixers), "and")
    said = {"size": size, "model": shape.name, "heads": heads, "kv_heads": kv_heads}
    sizes = Listing(map(str, may), "or")
    if world is None:
        return Message("inputs.sharing-heads", **said, sizes=sizes)
    return Message("inputs.sharing-gpus", **said, world=world, sizes=sizes)


def find_tensor_obstacle(levers: Levers, shape: ModelShape, world: int | None = None) -> Message | None:
    """Why GPUs cannot share layers."""
    size = levers.tensor_parallel
    if (obstacle := _find_owner_obstacle(levers, "--tensor-parallel", size, FSDP2)) is not None:
        return obstacle
    if levers.sequence_parallel > 1:
        return Message("inputs.layouts-apart", one=f"--tensor-parallel {size}", other="--sequence-parallel")
    if levers.method == "qlora":
        return Message("inputs.tensor-packed", size=size)
    if levers.lora is not None and levers.lora.dropout:  # GPUs that read the same tokens would drop others
        return Message("inputs.tensor-dropout", size=size)
    blocks = [block for block in shape.blocks if isinstance(block.mixer, Attention) and isinstance(block.mlp, Mlp)]
    if len(blocks) < len(shape.blocks):
        return Message("inputs.tensor-unknown", size=size, model=shape.name)
    if whole := next((tensor.name for block in blocks for tensor in block.tensors if not _can_be_shared(tensor)), None):
        return Message("inputs.tensor-whole", size=size, model=shape.name, name=whole)
    if any(isinstance(block.mixer, Attention) and block.mixer.qk_norm_whole for block in blocks):
        return Message("inputs.tensor-norms", size=size, model=shape.name)
    must = [
        number
        for block in blocks
        if isinstance(block.mixer, Attention) and isinstance(block.mlp, Mlp)
        for number in (block.mixer.heads, block.mixer.kv_heads, block.mlp.intermediate)
    ]
    gpus = [each for each in (levers.shard_within, _count_stage(levers, world)) if each]
    may = [n for n in range(2, min(must) + 1) if not any(each % n for each in (*must, *gpus))]
    if size in may:
        return None
    return _say_sizes("--tensor-parallel", size, Message("inputs.heads-divide"), may, world, levers.shard_within)


def _count_stage(levers: Levers, world: int | None) -> int:
    """The GPUs that have the same layers, of all if a pipeline does not divide them; 0: it is not known."""
    stages = levers.pipeline_parallel
    return 0 if world is None else world // stages if world % stages == 0 else world


def _find_owner_obstacle(
    levers: Levers, flag: str, size: int | str, engine: Engine, *, ours: bool = True
) -> Message | None:
    """`ours`: it is our own worker that can do it, and no other trainer."""
    if ours and levers.trainer != "tightfit":
        return Message("inputs.layout-is-ours", flag=flag, size=size)
    return (
        None if levers.engine == engine else Message("inputs.layout-needs-engine", flag=flag, size=size, engine=engine)
    )


def _can_be_shared(tensor: Tensor) -> bool:
    """Of a layer: what is cut, or what no GPU needs more of than it has. A bias behind sums of which each GPU has a
    share would be added by each."""
    is_bias_of_sums = len(tensor.shape) == 1 and tensor.name.split(".")[-2] in CUT_INTO_COLUMNS
    return cut_dimension(tensor) is not None or (len(tensor.shape) == 1 and not is_bias_of_sums)


def cut_dimension(tensor: Tensor) -> int | None:
    """Along which GPUs that share a layer cut this parameter of it; None: each uses all of it, as of norms."""
    *_, module, kind = ("", *tensor.name.split("."))
    if module in CUT_INTO_ROWS:
        return 0
    return 1 if module in CUT_INTO_COLUMNS and kind == "weight" else None


def find_pipeline_obstacle(levers: Levers, shape: ModelShape, world: int | None = None) -> Message | None:
    """Why GPUs cannot have some of the layers each."""
    size = levers.pipeline_parallel
    if (obstacle := _find_owner_obstacle(levers, "--pipeline-parallel", size, FSDP2)) is not None:
        return obstacle
    apart = {
        # Every stage has something that trains.
        "--frozen-layers": levers.frozen_layers > 0,
        "--trains embeddings": levers.trains == "embeddings",
        # What goes to the host comes back in the order of one micro batch's layers.
        "--compile layers --checkpointing full+offload": levers.compile != "off" and levers.checkpointing.offload,
    }
    for other in (flag for flag, is_set in apart.items() if is_set):
        return Message("inputs.layouts-apart", one=f"--pipeline-parallel {size}", other=other)
    most = shape.n_layers // levers.stages_per_gpu
    may = [n for n in range(2, most + 1) if not (world or 0) % (n * levers.row_parts)]
    if size not in may:
        return _say_sizes("--pipeline-parallel", size, Message("inputs.layers-suffice"), may, world)
    counts, stages = levers.layer_counts, size * levers.stages_per_gpu
    if counts and (len(counts) != stages or 0 in counts or sum(counts) != shape.n_layers):
        said = {"said": levers.stage_layers, "stages": stages, "layers": shape.n_layers, "model": shape.name}
        return Message("inputs.stage-layers", **said)
    return None


def find_expert_obstacle(levers: Levers, shape: ModelShape, world: int | None = None) -> Message | None:
    """Why GPUs cannot have some of the experts each."""
    size = levers.expert_parallel
    if (obstacle := _find_owner_obstacle(levers, "--expert-parallel", size, FSDP2)) is not None:
        return obstacle
    if levers.tensor_parallel > 1:
        return Message("inputs.layouts-apart", one=f"--expert-parallel {size}", other="--tensor-parallel")
    if levers.lora is not None and levers.lora.targets is None and any(b.lora_on_experts for b in shape.blocks):
        return Message("inputs.experts-adapted", size=size, model=shape.name)
    experts = [block.mlp.experts for block in shape.blocks if isinstance(block.mlp, Moe)]
    if not experts:
        return Message("inputs.no-experts", size=size, model=shape.name)
    ranks = None if world is None else levers.shards(world)
    may = [n for n in range(2, min(experts) + 1) if not any(each % n for each in experts) and not (ranks or 0) % n]
    if size in may:
        return None
    return _say_sizes("--expert-parallel", size, Message("inputs.experts-divide"), may, world, levers.shard_within)


def _say_sizes(flag: str, size: int, must: Message, may: list[int], world: int | None, within: int = 0) -> Message:
    """`must`: what of the model limits the size; `may`: those that would do; `within`: the size of groups, if any."""
    sizes = Listing(map(str, may), "or") if may else None
    said = {"flag": flag, "size": size, "must": must, "within": within or None, "gpus": world, "sizes": sizes}
    return Message("inputs.layout-sizes", **said)


def find_compression_obstacle(levers: Levers, shape: ModelShape, world: int | None = None) -> Message | None:
    """Why what GPUs send each other cannot be compressed so. Of how many GPUs may not be known."""
    how, flag = levers.compress, f"--compress {levers.compress}"
    apart = {
        "--tensor-parallel": levers.tensor_parallel > 1,
        "--pipeline-parallel": levers.pipeline_parallel > 1,
        "--expert-parallel": levers.expert_parallel > 1,
        "--method lora": how != "zeropp" and levers.method == "lora",
        "--method qlora": levers.method == "qlora",
        f"--optimizer {levers.optimizer}": how == "onebit" and levers.optimizer != "adamw",
        "--master-weights off": not levers.master_weights and levers.precision != "fp32",
    }
    if (
        obstacle := _find_owner_obstacle(levers, "--compress", how, COMPRESSING[how], ours=how != "zeropp")
    ) is not None:
        return obstacle
    for other, is_so in apart.items():
        if is_so:
            return Message("inputs.layouts-apart", one=flag, other=other)
    if world == 1:
        return Message("inputs.nothing-to-compress", how=how)
    if how == "zeropp" and world is not None:
        cut = [tensor.numel for tensor in shape.tensors if tensor.numel > levers.buckets.persistence_threshold]
        may = [ranks for ranks in range(2, world + 1) if not any(-(-each // ranks) % PACKED for each in cut)]
        if world not in may:
            sizes = Listing(map(str, may[-3:]), "or") if may else None
            return Message("inputs.weights-packed", count=PACKED, model=shape.name, world=world, sizes=sizes)
    return None


def find_stream_obstacle(levers: Levers, nodes: int = 1) -> Message | None:
    """Why layers cannot come to the GPU in turn, or nothing else may be said of where they rest."""
    flag = f"--engine {levers.engine}"
    if not levers.streams:
        asked = {"--resident": levers.resident, "--states": levers.states, "--update": levers.update}
        said = next((name for name, value in asked.items() if value not in (0, "fp32", "waits")), None)
        return Message("inputs.layout-needs-engine", flag=said, size=asked[said], engine=STREAM) if said else None
    if levers.trainer != "tightfit":
        return Message("inputs.layout-is-ours", flag="--engine", size=levers.engine)
    if nodes > 1:
        return Message("inputs.stream-one-node", nodes=nodes)
    trained = levers.method == "full"  # what adapters have lies on the GPU, as under ddp
    apart = {
        "--sequence-parallel": levers.sequence_parallel > 1,
        f"--offload-optimizer {levers.offload_optimizer}": levers.offload_optimizer != "none"
        and not (trained and levers.offload_optimizer == "nvme"),
        f"--offload-param {levers.offload_param}": levers.offload_param != "none",
        f"--optimizer {levers.optimizer}": levers.optimizer == "adafactor" or (trained and levers.optimizer != "adamw"),
        "--no-master-weights --precision fp16": levers.precision == "fp16" and not levers.master_weights,
    }
    for other in (other for other, is_said in apart.items() if is_said):
        return Message("inputs.layouts-apart", one=flag, other=other)
    if levers.update == "ahead" and (not trained or levers.offload_optimizer != "none"):
        other = f"--offload-optimizer {levers.offload_optimizer}" if trained else f"--method {levers.method}"
        return Message("inputs.layouts-apart", one="--update ahead", other=other)
    if levers.states != "fp32" and not trained:
        return Message("inputs.states-of-adapters", states=levers.states, method=levers.method)
    return None


def check_layout(levers: Levers, shape: ModelShape, world: int | None = None) -> None:
    """Raise where the GPUs cannot work together as the levers say."""
    obstacles = (
        find_stream_obstacle(levers),
        find_group_obstacle(levers, world) if levers.shard_within else None,
        find_sharing_obstacle(levers, shape, world) if levers.sequence_parallel > 1 else None,
        find_tensor_obstacle(levers, shape, world) if levers.tensor_parallel > 1 else None,
        find_pipeline_obstacle(levers, shape, world) if levers.pipeline_parallel > 1 else None,
        find_expert_obstacle(levers, shape, world) if levers.expert_parallel > 1 else None,
        find_compression_obstacle(levers, shape, world) if levers.compress != "none" else None,
    )
    for obstacle in obstacles:
        if obstacle is not None:
            raise ConfigError(obstacle)
    if levers.stages_per_gpu > 1 and levers.pipeline_parallel == 1:
        raise ConfigError(Message("inputs.stages-without-pipeline", flag=f"--stages-per-gpu {levers.stages_per_gpu}"))
    if levers.stage_layers and levers.pipeline_parallel == 1:
        raise ConfigError(Message("inputs.stages-without-pipeline", flag=f"--stage-layers {levers.stage_layers}"))
    if world is not None and world % levers.ranks_per_sample:
        said = {"product": levers.ranks_per_sample, "world": world}
        raise ConfigError(Message("inputs.layout-product", **said))


def divisors(number: int) -> list[int]:
    """Those that make groups of more than one."""
    return [size for size in range(2, number + 1) if number % size == 0]
