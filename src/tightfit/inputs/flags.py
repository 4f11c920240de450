"""The door for levers: words and numbers from a command line become `Levers`, or one clear sentence.

All that is known of a lever stands on its field in `types.py`; here it is read. What a user said is a mapping of
flag → value, and what is not in it was not said: an explicit `--lora-rank 64` beside `--method full` is a mistake, the
usual rank is not. What a file said comes in as `base` and an explicit flag wins over it. The rules about which levers
go together live in `check_levers`, apart from the words, so that whoever makes Levers in another way can ask the same
question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tightfit.inputs.layouts import check_layout
from tightfit.inputs.spelling import nearest
from tightfit.messages import Choice, Listing, Message
from tightfit.types import (
    DDP,
    PARTS,
    STREAM,
    ZERO3,
    Buckets,
    Checkpointing,
    ConfigError,
    Lever,
    Levers,
    Lora,
    Mamba1,
    Mlp,
    ModelShape,
    Moe,
    Traced,
)

MOST_BATCH = 1_000_000  # sequences a step, over all GPUs
MOST_TOKENS = 2**30  # in one forward pass on one GPU

CHECKPOINTING = ("none", "full", "full+offload", "layers:K", "select:NAME,…", "select:auto")
"""How a `Checkpointing` is said."""
AUTO = ("auto",)
BARE = Checkpointing(layers=0)


def _levers_in(record: type, block: str) -> Iterator[Lever]:
    hints = get_type_hints(record)
    for each in fields(record):
        if "lever" in each.metadata:
            about: Lever = each.metadata["lever"]
            yield replace(
                about,
                flag=about.flag or each.name,
                name=each.name,
                block=block,
                default=each.default,
                type=hints[each.name],
            )
            continue
        inside = next((part for part in (hints[each.name], *get_args(hints[each.name])) if is_dataclass(part)), None)
        if isinstance(inside, type):
            yield from _levers_in(inside, each.name)


LEVERS: Mapping[str, Lever] = {lever.flag: lever for lever in _levers_in(Levers, "")}
"""Every lever that can be said, by the name of its flag, in the order of the fields."""

TRAINING = tuple(dict.fromkeys(lever.block or lever.name for lever in LEVERS.values() if not lever.free))
"""The fields of `Levers` that change the result."""


def words_of(lever: Lever) -> tuple[str, ...]:
    """The few words that it takes; empty: it takes something else."""
    if lever.type is Checkpointing:
        return CHECKPOINTING
    if is_on_or_off(lever):
        return ("on", "off")
    return get_args(lever.type) if get_origin(lever.type) is Literal else ()


def is_on_or_off(lever: Lever) -> bool:
    """Whether it is left to the engine where it is not said."""
    return get_args(lever.type) == (bool, type(None))


def is_auto(lever: Lever, said: object) -> bool:
    """Whether this leaves a number to us."""
    return lever.auto and str(said).lower() == "auto"


def _is_names(lever: Lever) -> bool:
    return any(get_origin(part) is tuple for part in get_args(lever.type))


def levers_from_flags(
    said: Mapping[str, Any], shape: ModelShape, base: Levers | None = None, *, world: int | None = None
) -> Levers:
    """The levers that these flags mean for this model, on top of what a file said. None: not said. `world`: how many
    GPUs there are; None: that is not known yet."""
    base = base or Levers()
    given: dict[str, dict[str, Any]] = {}
    for flag, value in said.items():
        lever = LEVERS[flag]
        if value is not None and not is_auto(lever, value):
            given.setdefault(lever.block, {})[lever.name] = read_lever(lever, value)
    changes, adapters, buckets = (given.get(block, {}) for block in ("", "lora", "buckets"))
    if changes.get("method", base.method) != "full":
        changes["lora"] = replace(base.lora or Lora(), **adapters)
    else:
        changes["lora"] = None
        unusual = {name for name, value in adapters.items() if value != getattr(Lora(), name)}
        for lever in LEVERS.values():
            if lever.block == "lora" and lever.name in unusual:
                raise ConfigError(Message("inputs.no-adapters", flag=spelt(lever.flag)))
    levers = replace(base, **changes, buckets=replace(base.buckets, **buckets))
    if shape.scans and levers.compile == "layers" and "scan" not in changes and base.scan == Levers().scan:
        levers = replace(levers, scan="tightfit")  # the only one that can be traced
    if "max_reuse_distance" not in buckets:  # nobody said how far ahead a weight is kept for its next use
        levers = released_at_once(levers)
    if levers.is_fsdp2 and levers.offload_param == "cpu" and levers.offload_optimizer == "none":
        # FSDP2 has one offload policy, for parameters, gradients and optimizer together.
        levers = replace(levers, offload_optimizer="cpu")
    check_levers(levers, shape, world)
    return levers


def read_lever(lever: Lever, said: Any) -> Any:
    """The value of its field, from a word in any spelling or from a number in its range."""
    flag, words = spelt(lever.flag), words_of(lever)
    if lever.type is Checkpointing:
        return checkpointing_from_word(str(said))
    if words:
        word = str(said).lower()
        if word not in words:
            raise ConfigError(Message("inputs.unknown-value", flag=flag, word=said, hint=meant(str(said), words)))
        return word == "on" if is_on_or_off(lever) else word
    if lever.least is not None and said < lever.least:
        least = Message("inputs.at-least", least=lever.least)
        raise ConfigError(Message("inputs.flag-must-be", flag=flag, must=least, value=said))
    if lever.type is float and not 0 <= said < 1:
        share = Message("inputs.from-to-below", least=0, below=1)
        raise ConfigError(Message("inputs.flag-must-be", flag=flag, must=share, value=f"{said:g}"))
    if lever.form is not None and not re.fullmatch(lever.form[1], said):
        raise ConfigError(
            Message("inputs.flag-takes", flag=flag, form=Message(lever.form[2], version=lever.default), word=said)
        )
    if _is_names(lever):
        names = tuple(name.strip() for name in said.split(",") if name.strip())
        if not names:
            raise ConfigError(Message("inputs.flag-takes-names", flag=flag))
        return None if names == ("all",) else names
    return said


def check_levers(levers: Levers, shape: ModelShape, world: int | None = None) -> None:
    """Raise the first contradiction among the levers, or between them and the model."""
    for lever in _BOUNDED:
        value = lever_value(levers, lever)
        if value is not None and value > lever.most:
            most = Message("inputs.at-most", most=lever.most)
            raise ConfigError(Message("inputs.flag-must-be", flag=spelt(lever.flag), must=most, value=value))
    engine, optimizer, param = levers.engine, levers.offload_optimizer, levers.offload_param
    reading = {"--offload-optimizer": (optimizer, (ZERO3, STREAM)), "--offload-param": (param, (ZERO3,))}
    for flag, (place, engines) in reading.items():
        if place == "nvme" and engine not in engines:
            raise ConfigError(
                Message("inputs.nvme-needs-engine", flag=flag, engine=engine, engines=Listing(engines, "or"))
            )
    if param != "none" and not (levers.shards_parameters or levers.streams):
        raise ConfigError(Message("inputs.param-needs-sharding", place=param, engine=engine))
    if optimizer != "none" and levers.shards_nothing:
        raise ConfigError(Message("inputs.optimizer-needs-zero", place=optimizer, engine=engine))
    if optimizer != "none" and levers.is_fsdp2 and param == "none":
        raise ConfigError(Message("inputs.fsdp2-offloads-both"))
    if param == "nvme":  # what DeepSpeed does wrong there: it has few buffers, all of the model's own dtype
        if levers.buckets.max_reuse_distance:
            raise ConfigError(Message("inputs.reuse-on-nvme", distance=levers.buckets.max_reuse_distance))
        if levers.method == "qlora":
            raise ConfigError(Message("inputs.qlora-on-nvme"))
        if levers.lora is not None and levers.lora.dtype == "fp32" and levers.precision != "fp32":
            raise ConfigError(Message("inputs.fp32-on-nvme"))
    check_layout(levers, shape, world)
    micro, depth = levers.micro_batch, shape.n_layers
    if micro * levers.sequence > MOST_TOKENS:
        raise ConfigError(Message("inputs.too-many-tokens", micro=micro, sequence=levers.sequence, most=MOST_TOKENS))
    if micro * levers.accumulation > MOST_BATCH:
        raise ConfigError(Message("inputs.too-many-sequences", micro=micro, accum=levers.accumulation, most=MOST_BATCH))
    recomputed, frozen, resident = levers.checkpointing.layers, levers.frozen_layers, levers.resident
    if resident > depth:
        raise ConfigError(Message("inputs.keeps-too-many", layers=resident, depth=depth, model=shape.name))
    if recomputed is not None and recomputed > depth:
        raise ConfigError(Message("inputs.recomputes-too-many", layers=recomputed, depth=depth, model=shape.name))
    if frozen > depth:
        raise ConfigError(Message("inputs.freezes-too-many", layers=frozen, depth=depth, model=shape.name))
    if frozen and levers.method != "full":
        raise ConfigError(Message("inputs.frozen-already", method=levers.method))
    if levers.trains != "all" and levers.method != "full":
        raise ConfigError(Message("inputs.trains-adapters", trains=levers.trains, method=levers.method))
    if levers.trains != "all" and frozen:
        raise ConfigError(Message("inputs.trains-and-frozen", trains=levers.trains))
    if levers.engine == DDP and (obstacle := find_ddp_obstacle(levers)) is not None:
        raise ConfigError(obstacle)
    again = levers.checkpointing
    if levers.kernels == "fused" and levers.trainer == "tightfit" and (levers.compile == "layers" or again.select):
        where = "inputs.among-compiled" if levers.compile == "layers" else "inputs.among-selected"
        raise ConfigError(Message("inputs.kernels-unused", where=Message(where)))
    if again.select and again.offload and levers.compile == "off":
        raise ConfigError(Message("inputs.offload-needs-compiling", word=checkpointing_word(again)))
    if levers.compile == "layers" and (obstacle := find_compile_obstacle(levers, shape)) is not None:
        raise ConfigError(obstacle)
    if levers.mlp == "tiled" and (obstacle := find_tiling_obstacle(levers, shape)) is not None:
        raise ConfigError(obstacle)
    if levers.lora is not None and levers.lora.targets is not None:
        # a name must end some linear layer's path, as PEFT matches it
        inside = [tensor for block in shape.blocks for tensor in block.tensors]
        paths = [t.name.rpartition(".")[0] for t in (*inside, *shape.before, *shape.after) if t.is_linear]
        head = [tensor.name.rpartition(".")[0] for tensor in shape.after if tensor.is_linear]
        for target in levers.lora.targets:
            if levers.loss == "fused" and levers.trainer == "tightfit" and target in head:
                raise ConfigError(Message("inputs.fused-adapted-head", target=target))
            if not any(path == target or path.endswith("." + target) for path in paths):
                hint = meant(target, sorted({path.rpartition(".")[2] for path in paths}))
                raise ConfigError(Message("inputs.no-such-layer", model=shape.name, target=target, hint=hint))
    elif levers.lora is not None and levers.lora.dropout and any(block.lora_on_experts for block in shape.blocks):
        raise ConfigError(Message("inputs.dropout-on-experts", model=shape.name))


def find_ddp_obstacle(levers: Levers) -> Message | None:
    """Why torch alone cannot train like this on one GPU or on copies; None: it can."""
    if levers.optimizer == "adafactor":  # its states have no shape of the parameter's own
        return Message("inputs.ddp-adafactor")
    if levers.precision == "fp16" and not levers.master_weights:  # torch scales no losses of fp16 gradients
        return Message("inputs.ddp-pure-fp16")
    return None


def find_compile_obstacle(levers: Levers, shape: ModelShape) -> Message | None:
    """Why layers that compute like this cannot be compiled; None: they can. The planner chooses by it and the worker
    compiles by it."""
    # Its hooks fetch each parameter when its module is called, which no graph of a layer survives.
    if levers.stage == 3:
        return Message("inputs.compile-zero3")
    if levers.sequence_parallel > 1:  # attention exchanges heads for tokens in the middle of a layer
        return Message("inputs.compile-sharing", size=levers.sequence_parallel)
    if levers.mlp == "tiled":  # which an autograd function of ours computes
        return Message("inputs.tiles-apart", other="--compile layers")
    if levers.expert_parallel > 1:
        return Message("inputs.compile-shared-experts", size=levers.expert_parallel)
    if levers.tensor_parallel > 1:  # tokens are gathered and sums reduced in the middle of a layer
        return Message("inputs.compile-shared-layers", size=levers.tensor_parallel)
    if any(isinstance(block.mixer, Traced) for block in shape.blocks):  # neither its graph nor its price is known
        return Message("inputs.compile-unknown", model=shape.name)
    if any(isinstance(block.mixer, Mamba1) for block in shape.blocks) and levers.scan != "tightfit":
        return Message("inputs.compile-scan", scan=levers.scan)
    # In other formats transformers computes them one by one, by numbers that only the device knows.
    if any(isinstance(block.mlp, Moe) for block in shape.blocks) and levers.precision != "bf16":
        return Message("inputs.compile-experts", precision=levers.precision)
    on_all = levers.lora is not None and levers.lora.targets is None
    if on_all and any(block.lora_on_experts for block in shape.blocks):  # PEFT puts another weight there for each call
        return Message("inputs.compile-adapted-experts", model=shape.name)
    return None


def find_tiling_obstacle(levers: Levers, shape: ModelShape) -> Message | None:
    """Why an MLP cannot be computed tile by tile; None: it can."""
    if levers.trainer != "tightfit":
        return Message("inputs.tiles-are-ours")
    if not all(isinstance(block.mlp, Mlp) for block in shape.blocks):
        return Message("inputs.tiles-need-mlp", model=shape.name)
    if levers.compile == "layers" and (obstacle := find_compile_obstacle(levers, shape)) is not None:
        return obstacle
    if levers.checkpointing.select:  # all of an MLP's tiles run again, whatever was selected
        return Message("inputs.tiles-apart", other=f"--checkpointing {checkpointing_word(levers.checkpointing)}")
    if levers.offload_param == "nvme":  # all weights of an MLP would wait in DeepSpeed's few buffers
        return Message("inputs.tiles-apart", other="--offload-param nvme")
    if levers.tensor_parallel > 1:
        return Message("inputs.tiles-apart", other=f"--tensor-parallel {levers.tensor_parallel}")
    if levers.pipeline_parallel > 1:
        return Message("inputs.tiles-apart", other=f"--pipeline-parallel {levers.pipeline_parallel}")
    return None


def checkpointing_from_word(word: str) -> Checkpointing:
    """`none`, `full`, `full+offload`, `layers:K`, `select:auto`, or the parts that recompute: `select:qkv,mlp`, in all
    layers or in some: `select:mlp+layers:12`; what the others made waits on the host: `select:mlp+offload`."""
    plain = {
        "none": BARE,
        "full": Checkpointing(layers=None),
        "full+offload": Checkpointing(layers=None, offload=True),
        "select:auto": Checkpointing(layers=None, select=AUTO),
    }
    word = word.lower()
    if word in plain:
        return plain[word]
    if found := re.fullmatch(r"layers:(\d{1,9})", word):
        return Checkpointing(layers=int(found[1]))
    if found := re.fullmatch(r"select:([^+]*)(\+offload)?(?:\+layers:(\d{1,9}))?", word):
        parts, layers = _read_parts(found[1]), None if found[3] is None else int(found[3])
        return BARE if layers == 0 else Checkpointing(layers=layers, select=parts, offload=found[2] is not None)
    hint = meant(word, CHECKPOINTING)
    raise ConfigError(Message("inputs.unknown-value", flag="--checkpointing", word=word, hint=hint))


def _read_parts(text: str) -> tuple[str, ...]:
    names = {name.strip() for name in text.split(",")}
    if not names.isdisjoint(AUTO):
        raise ConfigError(Message("inputs.auto-alone"))
    for name in sorted(names - set(PARTS)):
        word = f"select:{name}"
        raise ConfigError(
            Message("inputs.unknown-value", flag="--checkpointing", word=word, hint=meant(name, (*PARTS, *AUTO)))
        )
    return tuple(part for part in PARTS if part in names or part == "elementwise")


def checkpointing_word(checkpointing: Checkpointing) -> str:
    """The word that gives this value."""
    layers, parts = checkpointing.layers, checkpointing.select
    if layers == 0:
        return "none"
    if parts:
        named = ",".join(part for part in parts if part != "elementwise") or "elementwise"
        place = "+offload" if checkpointing.offload else ""
        return f"select:{named}{place}" + ("" if layers is None else f"+layers:{layers}")
    if layers is None:
        return "full+offload" if checkpointing.offload else "full"
    return f"layers:{layers}"


def meant(word: str, known: Iterable[str]) -> Message:
    """The tail of a sentence about a wrong word: what would have been right."""
    words = list(known)
    close = nearest(word, words)
    return Message("inputs.meant", close=close) if close else Message("inputs.takes", words=Choice(words))


def spelt(flag: str) -> str:
    """The flag as it is typed."""
    return "--" + flag.replace("_", "-")


def released_at_once(levers: Levers) -> Levers:
    """Weights on NVMe: each that waits for its next use keeps one of a few buffers, and DeepSpeed runs out of them."""
    if levers.offload_param != "nvme":
        return levers
    return replace(levers, buckets=replace(levers.buckets, max_reuse_distance=0))


def flags_from_levers(levers: Levers) -> dict[str, Any]:
    """The levers in the words of the command line, for a reader of JSON; what is left to the engine is not there."""
    plain: dict[str, Any] = {}
    for flag, lever in LEVERS.items():
        if lever.block and getattr(levers, lever.block) is None:
            continue
        value = lever_value(levers, lever)
        if lever.type is Checkpointing:
            value = checkpointing_word(value)
        elif _is_names(lever):
            value = ",".join(value) if value else "all"
        elif is_on_or_off(lever) and value is not None:
            value = "on" if value else "off"
        if value is not None and value != "" and not (lever.type is float and value == 0):
            plain[flag] = value
    return plain


def lever_value(levers: Levers, lever: Lever) -> Any:
    """What its field holds; None also where there is no block for it."""
    block = getattr(levers, lever.block) if lever.block else levers
    return None if block is None else getattr(block, lever.name)


_BOUNDED = tuple(lever for lever in LEVERS.values() if lever.most is not None)
"""What a file or a flag can have made larger than anybody means."""


def levers_as_written(tree: Mapping[str, Any]) -> Levers:
    """The levers of a plan's `worker.json`, whose sense was checked when it was written. What an older version did not
    know has its default."""
    words, lora, adapters = tree["levers"], tree["lora"], None
    if lora is not None:
        named = {each.name: lora[each.name] for each in fields(Lora) if each.name in lora}
        adapters = Lora(**named | {"targets": None if lora["targets"] == "all" else tuple(lora["targets"])})
    own = {
        lever.name: read_lever(lever, words[flag])
        for flag, lever in LEVERS.items()
        if not lever.block and flag in words
    }
    own |= {"packed": tree["data"]["packing"], "gradient_clipping": tree["training"]["clip"] > 0}
    return Levers(**own, lora=adapters, buckets=Buckets(**tree["buckets"]))
