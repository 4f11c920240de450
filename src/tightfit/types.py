"""The nouns of tightfit. Data only: nothing here reads, computes or prints.

What the user gives us is turned into these values once, in `inputs/`; every later room takes them
and returns them. Sizes are bytes, counts are elements, lengths are tokens. GiB appear only on screen.

The errors:

    TightfitError
    └── UserError          the input is wrong; the message names the fix; exit code 2
        ├── ModelError     no such model, or a config we cannot read
        ├── HardwareError  no such card, or more GPUs asked for than there are
        └── ConfigError    flags or files that contradict each other or are misspelt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

# --- errors -------------------------------------------------------------------------------------


class MessageLike(Protocol):
    """What `messages/` makes, of which nothing is imported here."""

    @property
    def id(self) -> str: ...


class TightfitError(Exception):
    """Anything tightfit raises on purpose."""


class UserError(TightfitError):
    """The input is wrong. The message is one sentence and names the fix."""

    def __init__(self, said: MessageLike | str, *, at: str = "") -> None:
        """`at`: the key of a file that is wrong, with the block that it stands in; empty: it is about no single one."""
        super().__init__(said)
        self.said: Any = said
        self.at = at


class ModelError(UserError):
    """A model that does not exist, or a config that lacks what we need."""


class HardwareError(UserError):
    """A card that we do not know, or more GPUs than there are."""


class ConfigError(UserError):
    """Flags or files that contradict each other, or are misspelt."""


# --- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter. `name` is Hugging Face's; inside a Block it is relative to the layer."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """A matrix of a linear layer: what LoRA adapts and NF4 quantises."""
        return len(self.shape) == 2 and self.name.endswith("weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention with its projections."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: bool = True
    rotary_dim: int | None = None  # width of the rotated part of each head; None: all of it
    rotary_fp32: bool = False  # the rotation is computed in fp32 (olmo2)
    qk_norm: bool = False  # norms over q and k (qwen3, gemma3, olmo2)
    qk_norm_kind: NormKind = "rms"
    qk_norm_whole: bool = False  # over the whole projection (olmo2) rather than over each head
    fused_qkv: bool = False  # one projection for q, k and v (gpt2, gpt_neox, phi3)
    softcap: bool = False  # logit soft-capping (gemma2): sdpa cannot do it, so Hugging Face falls back to eager
    sliding_window: int | None = None
    dropout: bool = False  # attention weights are dropped out while training (gpt2 by default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """The selective scan of Mamba and FalconMamba."""

    inner: int
    state: int
    conv: int
    dt_rank: int
    normed_bcdt: bool = False  # weightless RMS norms on B, C and dt (FalconMamba)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """The state-space duality mixer of Mamba-2."""

    inner: int
    state: int
    conv: int
    heads: int
    head_dim: int
    groups: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    intermediate: int
    activation: str  # Hugging Face's name: silu, gelu, gelu_new, gelu_pytorch_tanh, relu …
    gated: bool = True
    fused_gate_up: bool = False  # gate and up are one projection (phi3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    experts: int
    top_k: int
    intermediate: int
    activation: str
    shared_intermediate: int = 0  # width of the shared expert (qwen2_moe); 0: none
    scores_fp32: bool = False  # the router's weights stay fp32, and so do the experts' weighted outputs (mixtral)
    lora_on_experts: bool = False
    """PEFT's `all-linear` adapts experts and router too, by adding to their whole weights (mixtral, qwen3_moe)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A layer that we do not know by name: what a run on the meta device showed."""

    saved_bytes_per_token: int
    forward_bytes_per_token: int
    backward_bytes_per_token: int


NormKind = Literal["rms", "layer", "gemma", "olmo"]
"""rms: Llama's (upcast, normalise, downcast, scale); layer: torch's LayerNorm; gemma: scale by 1+w in fp32;
olmo: scale by w in fp32."""

Arrangement = Literal["pre", "post", "sandwich", "parallel", "single"]
"""pre: norm-mixer-add-norm-mlp-add; post: mixer-norm-add-mlp-norm-add (olmo2); sandwich: norms before and after
both (gemma2, gemma3); parallel: mixer and MLP read the same residual (gpt_neox); single: norm-mixer-add (Mamba)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One kind of layer. Its tensors stand in the order of `layer.named_parameters()`. Compared by identity, as is
    ModelShape: both are keys of caches that are asked thousands of times."""

    mixer: Attention | Mamba1 | Mamba2 | Traced
    mlp: Mlp | Moe | None
    norm: NormKind
    arrangement: Arrangement
    tensors: tuple[Tensor, ...]
    residual_fp32: bool = False  # the residual stream is kept in fp32 (Mamba's `residual_in_fp32`)
    residual_scaled: bool = False  # what is added to the residual stream is multiplied first (granite)
    dropout: bool = False  # what is added to the residual stream passes a dropout while training (gpt2 by default)

    @property
    def lora_on_experts(self) -> bool:
        """Adapters on every linear layer sit on its experts too."""
        return isinstance(self.mlp, Moe) and self.mlp.lora_on_experts


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Everything about a model that memory and time depend on; made from its config alone."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    blocks: tuple[Block, ...]  # the distinct kinds of layer
    pattern: tuple[int, ...]  # for each layer, bottom to top, the index of its kind in `blocks`
    layer_prefix: str  # `model.layers.{i}.` say: where layer i's tensors live
    before: tuple[Tensor, ...]  # embeddings: the tensors registered before the layers
    after: tuple[Tensor, ...]  # final norm and, unless tied, the head: the tensors registered after the layers
    tied: bool  # the head is the embedding; it is counted once
    final_norm: NormKind
    embedding_scale: bool = False  # the embedding is multiplied by sqrt(hidden) (gemma)
    final_softcap: bool = False  # tanh soft-capping of the logits (gemma2)
    max_positions: int | None = None
    receives: bool = False
    """A part of a model: hidden states come from the stage of a pipeline below, and their gradient goes back there."""
    hands_on: bool = False  # likewise they go to the stage above: there is neither a final norm nor a head
    notes: tuple[Any, ...] = ()  # sentences that belong on the screen: 'called 3B, really 0.9B'

    @property
    def n_layers(self) -> int:
        return len(self.pattern)

    @property
    def scans(self) -> bool:
        """Whether it has Mamba's layers."""
        return any(isinstance(block.mixer, Mamba1 | Mamba2) for block in self.blocks)

    @cached_property
    def parameters(self) -> int:
        """Distinct parameters, as `sum(p.numel() for p in model.parameters())` counts them."""
        per_kind = [sum(t.numel for t in block.tensors) for block in self.blocks]
        outside = sum(t.numel for t in self.before) + sum(t.numel for t in self.after)
        return outside + sum(per_kind[kind] for kind in self.pattern)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every parameter under its full name, in the order of `model.named_parameters()`."""
        layers = (
            Tensor(self.layer_prefix.format(i=i) + tensor.name, tensor.shape)
            for i, kind in enumerate(self.pattern)
            for tensor in self.blocks[kind].tensors
        )
        return (*self.before, *layers, *self.after)


# --- the hardware -------------------------------------------------------------------------------

Vendor = Literal["nvidia", "amd", "hygon", "unknown", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card. Rates are dense peaks as the maker states them; None: unknown."""

    name: str
    vendor: Vendor
    memory_bytes: int  # what the driver reports as total: less than the box says where ECC or firmware keep some
    arch: str | None = None  # sm_80, gfx942 …: decides kernels and cuBLAS workspace
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    memory_bytes_per_s: float | None = None
    link: Literal["nvlink", "xgmi", "pcie3", "pcie4", "pcie5"] | None = None
    link_bytes_per_s: float | None = None  # to another GPU of the node, one direction
    fp16: bool | None = None
    """Whether it computes fp16 itself, as every GPU does; None: of a CPU that says nothing of it, or a GPU."""
    triton: bool = True  # whether Triton is installed there

    @property
    def sm(self) -> int | None:
        """NVIDIA's number of the architecture: 90 of sm_90a; None: it is not known, or another maker's."""
        return _sm_of(self.arch)

    @property
    def runs_triton(self) -> bool:
        """Whether Triton's kernels, and so those of torch.compile, run on it: NVIDIA's cards before sm_70 and AMD's
        oldest have none."""
        too_old = self.arch in ("gfx900", "gfx906") or (self.sm is not None and self.sm < 70)
        return self.triton and self.vendor != "cpu" and not too_old


@lru_cache(maxsize=64)
def _sm_of(arch: str | None) -> int | None:
    number = (arch or "").removeprefix("sm_").rstrip("a")
    return int(number) if number.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `tightfit measure` found on a machine."""

    on: str  # the day: 2026-11-16
    machine: str  # its fingerprint
    rates: Mapping[str, float] = field(hash=False)  # by name, see docs/measure.md; what is missing was not measured
    marked: frozenset[str] = frozenset()  # rates that were measured while something else kept the machine busy


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRate:
    """One rate as finished runs have shown it, against what was known of it without them."""

    name: str  # as `Pace.rates` has it
    factor: float  # what hangs on it takes so many times as long: a speed is divided by it, seconds are multiplied
    spread: float  # it may still be off by this share of itself, either way


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What the step times of finished runs have taught about a machine."""

    on: str  # the day of the newest of them: 2026-11-16
    rates: tuple[TaughtRate, ...]  # those that are not listed are as they were


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine or machines to train on. All GPUs are alike."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 1
    host_ram_bytes: int | None = None  # a node's RAM; None: unknown
    nvme_bytes: int | None = None
    network_bytes_per_s: float | None = None  # of one node to the others, one direction; None: nobody has said
    link_given: bool = False  # the user said what joins the GPUs: `gpu.link` is not the catalogue's
    measured: Measured | None = None
    taught: Taught | None = None  # applied to the rates after all else that is known of them
    because: tuple[Any, ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node


# --- the levers ---------------------------------------------------------------------------------

Method = Literal["full", "lora", "qlora"]
Trains = Literal["all", "embeddings", "layers"]
Engine = Literal["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "stream"]
DDP: Engine = "ddp"
ZERO3: Engine = "zero3"
FSDP2: Engine = "fsdp2"
STREAM: Engine = "stream"
STAGES: Mapping[Engine, int] = {"zero0": 0, "zero1": 1, "zero2": 2, ZERO3: 3}
"""The engines that are DeepSpeed's, and the stage of ZeRO that each is."""
READ_TOGETHER = ("sequence_parallel", "tensor_parallel", "pipeline_parallel")
"""The levers that put ranks together which read the same samples."""
STRATEGY = ("engine", "offload_optimizer", "offload_param")
"""The levers that decide what lives where; `strategy_name` has words for them together."""
Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["bf16", "fp16", "fp32"]
Optimizer = Literal["adamw", "adamw8bit", "paged_adamw8bit", "adafactor", "sgd"]
AttentionKernel = Literal["sdpa", "flash", "eager"]
Loss = Literal["plain", "fused"]
Scan = Literal["official", "tightfit", "torch"]
Compile = Literal["off", "layers"]
Kernels = Literal["plain", "fused"]
MlpRun = Literal["plain", "tiled"]
Compress = Literal["none", "zeropp", "onebit", "powersgd"]
States = Literal["fp32", "bf16", "8bit"]
Update = Literal["waits", "ahead"]
COMPRESSING: Mapping[Compress, Engine] = {"zeropp": ZERO3, "onebit": DDP, "powersgd": DDP}
"""The engine that each is for."""
PARTS = ("elementwise", "qkv", "mixer", "out", "mlp")
"""What of a layer can be chosen to be computed again: norms, rotary embedding, activations, gates and additions, which
cost least and go along with any other; the projections that attention or a scan reads; attention or the scan itself;
its output projection; the MLP's first projections. Nothing needs the last one's output."""
Trainer = Literal["tightfit", "llamafactory", "trainer"]
"""Who runs the training: our own worker, LLaMA-Factory, or a script around Hugging Face's Trainer."""
Cluster = Literal["slurm", "kubernetes", "ray"]  # what hands out machines and starts a training on them

Group = Literal["the training", "adapters", "what saves memory", "DeepSpeed's buffers", "the host"]
"""The headings under which the help lists the levers, in its order."""

DEEPSPEED_VERSION = "0.19.8"  # the DeepSpeed whose behaviour is priced where nobody names another

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What a lever is to a user. It stands on the lever's field, and everything else is made from it: the flag and its
    help, the checks, the `levers` of a job file and of `--json`, the worker's orders, the page's form.

    What it takes follows from the field's type: words from a Literal, a whole number from int, a share below 1 from
    float, on and off from `bool | None`, a switch from bool.
    """

    help: str
    """What it means and, in brackets, its default."""
    group: Group
    flag: str = ""
    """Its name on the command line, in JSON and in `levers:` of a job; empty: the field's own."""
    free: bool = True
    """It changes no result: the planner chooses it, and a job may pin it. Otherwise it is a field of `Job` too."""
    kept: bool = False
    """What is installed decides it, or the user alone: the next plan of the same training has it as well."""
    least: int | None = None
    most: int | None = None
    """The largest that anybody can mean: no model reads longer texts, none is wider. More would only keep the search
    busy, which tries what divides a batch, and its answer would be of no use."""
    auto: bool = False
    """Of a number: `auto` may be said in its place, and leaves it to us as if nothing were said."""
    form: tuple[str, str, str] | None = None
    """Of text: its metavar, the pattern it must match, and the id of what is said of that."""
    also: tuple[str, ...] = ()
    """What other programs call a value of the same meaning: understood as a flag, and named when misplaced."""
    deepspeed: str = ""
    """Its key in the `zero_optimization` of DeepSpeed's config."""
    name: str = ""
    """Of its field; this and what follows are filled in where the levers are listed (`inputs/flags.py`)."""
    block: str = ""
    """The field of `Levers` that it stands inside; empty: it is one itself."""
    default: object = None
    type: Any = None

    @property
    def path(self) -> str:
        """Where it stands in `Levers` and, if it is not free, in `Job`: sequence, lora.rank, buckets.reduce_bucket."""
        return f"{self.block}.{self.name}" if self.block else self.name


def lever(default: Value, help: str, group: Group, **more: Any) -> Value:  # noqa: A002
    """A dataclass field that is a lever; `more`: see `Lever`."""
    made: Value = field(default=default, metadata={"lever": Lever(help=help, group=group, **more)})
    return made


def buffer(default: Value, key: str, least: int, most: int | None = None) -> Value:
    """A lever that is a number of DeepSpeed's, by its key there."""
    about = f"DeepSpeed's {key}, in elements"
    return lever(default, about, "DeepSpeed's buffers", least=least, most=most, deepspeed=key)


def degree(default: int, help: str, most: int = 65_536) -> int:  # noqa: A002
    """A lever that is a number of GPUs which work together, or of what each of them has."""
    return lever(default, help, "what saves memory", least=default, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Activation checkpointing: which layers recompute in the backward pass."""

    layers: int | None = 0
    """How many layers recompute; None: all."""
    offload: bool = False
    """What these layers keep waits in host memory: their inputs, and where parts are selected, what the others made."""
    select: tuple[str, ...] = ()
    """What of these layers recomputes, of `PARTS` and in their order; empty: all of it. `auto` alone: the plan is yet
    to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    rank: int = lever(
        8, "rank of the adapters (8)", "adapters", flag="lora_rank", free=False, least=1, most=65_536, also=("lora_r",)
    )
    targets: tuple[str, ...] | None = lever(
        None,
        "layers that get an adapter (all linear layers but the head)",
        "adapters",
        flag="lora_targets",
        free=False,
        also=("lora_target", "lora_target_modules"),
    )
    """Module names such as q_proj; None: every linear layer but the head."""
    dtype: Literal["fp32", "bf16"] = lever(
        "bf16", "number format of the adapters (bf16)", "adapters", flag="adapter_dtype", free=False
    )
    dropout: float = lever(
        0.0, "share of the adapters' inputs that is dropped (0)", "adapters", flag="lora_dropout", free=False
    )
    """Share of each adapter's input that is dropped: every adapter then keeps an input of its own, and a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """DeepSpeed's buffers and thresholds, in elements, with DeepSpeed's own defaults."""

    reduce_bucket: int = buffer(500_000_000, "reduce_bucket_size", 1, 100_000_000_000)
    allgather_bucket: int = buffer(500_000_000, "allgather_bucket_size", 1, 100_000_000_000)
    prefetch_bucket: int = buffer(50_000_000, "stage3_prefetch_bucket_size", 0, 100_000_000_000)
    persistence_threshold: int = buffer(100_000, "stage3_param_persistence_threshold", 0)
    max_live_parameters: int = buffer(1_000_000_000, "stage3_max_live_parameters", 0)
    max_reuse_distance: int = buffer(1_000_000_000, "stage3_max_reuse_distance", 0)
    overlap_comm: bool | None = lever(
        None,
        "reduce gradients beside the backward pass, with a second bucket (on at stage 3 only)",
        "DeepSpeed's buffers",
        deepspeed="overlap_comm",
    )
    """None: DeepSpeed's choice, on at stage 3 only."""
    sub_group_size: int = 1_000_000_000
    contiguous_gradients: bool = True
    pin_memory: bool = True
    param_buffer_count: int = 5
    """offload_param.buffer_count: NVMe staging buffers."""
    param_buffer_size: int | None = None
    """offload_param.buffer_size; None: the largest part that a rank swaps."""
    optimizer_buffer_count: int = 4
    """offload_optimizer.buffer_count: NVMe staging buffers. Of layers that stream: how many units' states RAM has room
    for; those of the lowest stay there, and the others take turns in the last two of these places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """One way to compute one training. The defaults are those of the measured rows. A field without `lever` is nobody's
    to say: it follows from the job, or from what is installed."""

    method: Method = lever(
        "full", "train every weight, adapters, or adapters on a 4-bit model (full)", "the training", free=False
    )
    engine: Engine = lever(
        "zero0",
        "how the training is spread over the GPUs; ddp: torch alone, nothing is cut up; stream: layers rest in host "
        "memory and come to the GPU in turn (zero0: nothing is cut up, by DeepSpeed)",
        "what saves memory",
    )
    sequence: int = lever(
        2048,
        "tokens in a sequence (2048)",
        "the training",
        flag="seq",
        free=False,
        least=1,
        most=16_777_216,
        also=("max_seq_length", "cutoff_len", "max_length"),
    )
    micro_batch: int = lever(
        1,
        "sequences in one forward pass on one GPU (1)",
        "the training",
        least=1,
        most=65_536,
        also=("per_device_train_batch_size",),
    )
    accumulation: int = lever(
        1,
        "forward passes before a step (1)",
        "the training",
        flag="accum",
        least=1,
        most=1_000_000,
        also=("gradient_accumulation_steps",),
    )
    precision: Precision = lever(
        "bf16", "the number format of the computation (bf16; fp16 on cards without it)", "the training", free=False
    )
    offload_optimizer: Offload = lever(
        "none", "where the optimizer's states live, if not on the GPU (none)", "what saves memory"
    )
    offload_param: Offload = lever(
        "none", "where the weights live between uses, if not on the GPU (none)", "what saves memory"
    )
    resident: int = lever(
        0,
        "layers that always stay on the GPU under --engine stream (auto: as many as fit; 0 where no GPU is named)",
        "what saves memory",
        least=0,
        most=65_536,
        auto=True,
    )
    shard_within: int = degree(
        0,
        "GPUs that share one copy of the weights, such as those of a node, so that the network between nodes carries "
        "gradients: FSDP2's hybrid sharding, and for the backward pass ZeRO-3's hpZ (0: all of them)",
    )
    sequence_parallel: int = degree(1, "GPUs that share each sequence, each a part of its tokens (1)")
    """Ulysses: all heads of some tokens become some heads of all tokens for attention, and back."""
    tensor_parallel: int = degree(1, "GPUs that share each layer, each with a part of its heads and of its MLP (1)")
    pipeline_parallel: int = degree(
        1, "GPUs in a row, each with some of the layers, that hand micro batches on to each other (1)"
    )
    stages_per_gpu: int = degree(
        1,
        "stages of a pipeline on each of its GPUs; several are interleaved, which shortens its idle time (1)",
        most=1_024,
    )
    stage_layers: str = lever(
        "",
        "layers of each stage of a pipeline, from the bottom of the model (as much arithmetic for each)",
        "what saves memory",
        form=("N,N,…", r"\d{1,5}(,\d{1,5})*", "inputs.layer-counts"),
    )
    expert_parallel: int = degree(1, "GPUs that share the experts of each layer, each with some of them (1)")
    compress: Compress = lever(
        "none",
        "send less between GPUs, and change the training a little: ZeRO++'s 8-bit weights and 4-bit gradients, 1-bit "
        "Adam, or PowerSGD (none)",
        "the training",
        free=False,
    )
    states: States = lever(
        "fp32",
        "the number format of the optimizer's moments on the host under --engine stream; less than fp32 changes the "
        "training a little (fp32)",
        "the training",
        free=False,
    )
    update: Update = lever(
        "waits",
        "when the host updates weights under --engine stream; ahead: during the backward pass, before the norm of all "
        "gradients is known, into a second set of states that counts if nothing had to be clipped (waits)",
        "what saves memory",
    )
    checkpointing: Checkpointing = lever(
        Checkpointing(layers=None),
        "which layers, or which parts of them, keep no activations and compute them again (full)",
        "what saves memory",
    )
    loss: Loss = lever("plain", "fused: the logits are never whole in memory (plain)", "what saves memory")
    mlp: MlpRun = lever(
        "plain",
        "tiled: the MLP computes some tokens after the others, and makes again in the backward pass what it needs "
        "(plain)",
        "what saves memory",
    )
    attention: AttentionKernel = lever("sdpa", "the attention kernel (sdpa)", "what saves memory", kept=True)
    optimizer: Optimizer = lever("adamw", "the optimizer (adamw, with fp32 states)", "the training", free=False)
    scan: Scan = lever("official", "the selective scan of Mamba models (official)", "what saves memory", kept=True)
    compile: Compile = lever(
        "off", "layers: every layer runs as code that torch.compile makes of it (off)", "what saves memory"
    )
    kernels: Kernels = lever(
        "plain", "fused: Liger's kernels compute norms, rotary embedding and gates (plain)", "what saves memory"
    )
    frozen_layers: int = lever(
        0, "the lowest N layers and the embedding do not train (0)", "the training", free=False, least=0
    )
    """The lowest N layers and the embedding do not train."""
    trains: Trains = lever(
        "all",
        "what trains: everything, the embeddings alone, or all but the embeddings (all)",
        "the training",
        free=False,
    )
    """embeddings: every layer, the norms and a head of its own are frozen; a tied head is the embedding. layers: the
    other way round, everything but the embeddings trains."""
    master_weights: bool = lever(
        True, "pure 16-bit training, without fp32 copies of the weights", "the training", free=False
    )
    """False: pure 16-bit training, the optimizer works on the 16-bit weights themselves."""
    lora: Lora | None = None
    """Set for lora and qlora."""
    buckets: Buckets = Buckets()
    deepspeed_version: str = lever(
        DEEPSPEED_VERSION,
        "the DeepSpeed whose behaviour is priced",
        "DeepSpeed's buffers",
        kept=True,
        form=("V", r"\d+\.\d+(\.\d+)?([.+]?\w+)*", "inputs.a-version"),
    )
    dataloader_workers: int = lever(
        0,
        "data loading processes of each rank (0)",
        "the host",
        kept=True,
        least=0,
        most=1_024,
        also=("dataloader_num_workers",),
    )
    packed: bool = False
    """A sequence holds several documents, which attention keeps apart: by a mask, unless the kernel is flash."""
    padded: bool = False
    """Rows are padded to one length, and attention is handed a mask for it. Our own worker pads without one."""
    gradient_clipping: bool = True
    trainer: Trainer = "tightfit"
    """Whose behaviour is priced: what it loads, casts and recomputes."""

    def change(self, **changes: object) -> Levers:
        """As `dataclasses.replace`, in a fifth of the time: a search does it some ten thousand times."""
        made = Levers.__new__(Levers)
        for write, value in zip(_WRITERS.values(), _read_levers(self), strict=True):
            write(made, value)
        for name, value in changes.items():
            _WRITERS[name](made, value)
        return made

    @property
    def stage(self) -> int | None:
        """DeepSpeed's stage of ZeRO; None: another engine runs it."""
        return STAGES.get(self.engine)

    @property
    def uses_deepspeed(self) -> bool:
        return self.engine in STAGES

    @property
    def is_fsdp2(self) -> bool:
        return self.engine == FSDP2

    @property
    def streams(self) -> bool:
        """Whether weights rest on the host, and come to the GPU layer by layer."""
        return self.engine == STREAM

    @property
    def steps_on_host(self) -> bool:
        """Whether the processor's cores update weights."""
        return self.offload_optimizer != "none" or (self.streams and self.method == "full")

    @property
    def shards_nothing(self) -> bool:
        """Whether every GPU has all of everything."""
        return self.engine in (DDP, "zero0")

    @property
    def shards_parameters(self) -> bool:
        """Whether a GPU holds a part of the weights alone between uses."""
        return self.engine in (ZERO3, FSDP2)

    def shards(self, world: int) -> int:
        """How many of these ranks share what an engine cuts up: states, gradients, and the weights of FSDP2. Ranks that
        share layers, or have other layers, have their own parts of the model to cut up."""
        whole = self.shard_within if self.is_fsdp2 and self.shard_within else self.stage_ranks(world)
        return max(1, whole // self.tensor_parallel)

    def stage_ranks(self, world: int) -> int:
        """How many of these ranks have the same stages of a pipeline, or their parts of them."""
        return max(1, world // self.pipeline_parallel)

    def data_ranks(self, world: int) -> int:
        """How many of these ranks read samples of their own: those that share sequences or layers, or hand micro
        batches on to each other, read the same, and count as one."""
        return max(1, world // self.ranks_per_sample)

    @property
    def ranks_per_sample(self) -> int:
        return prod(getattr(self, name) for name in READ_TOGETHER)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Those of `stage_layers`; none: they follow from the model."""
        return tuple(map(int, self.stage_layers.split(","))) if self.stage_layers else ()

    @property
    def row_parts(self) -> int:
        """Ranks that have a part of the tokens of each row each, outside of attention at least."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def groups(self) -> int:
        """Groups of ranks among which each exchanges tensors. Where some share layers or experts, those that have
        the same of them are another."""
        shared = self.sequence_parallel, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel
        alike = (self.tensor_parallel > 1) + (self.expert_parallel > 1)
        return 1 + (self.shard_within > 0) + sum(size > 1 for size in shared) + alike

    @property
    def trains_base(self) -> bool:
        """Whether the layers' own weights train, from the lowest that is not frozen."""
        return self.method == "full" and self.trains != "embeddings"

    @property
    def trains_embedding(self) -> bool:
        return self.method == "full" and self.trains != "layers" and self.frozen_layers == 0


# --- the footprint ------------------------------------------------------------------------------

_WRITERS: dict[str, Callable[[Levers, object], None]] = {
    each.name: getattr(Levers, each.name).__set__ for each in fields(Levers)
}
_read_levers: Callable[[Levers], tuple[object, ...]] = attrgetter(*_WRITERS)

PhaseName = Literal["init", "forward", "loss", "backward", "step", "eval", "save"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held at the worst moment of one phase."""

    name: PhaseName
    components: Mapping[str, int]  # bytes by component; keys are sorted as they should be drawn

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFootprint:
    phases: Mapping[PhaseName, Phase]
    peak_phase: PhaseName  # the largest phase of a training step
    peak_bytes: int  # over the training steps; comparable with `torch.cuda.max_memory_allocated`
    init_peak_bytes: int  # likewise while the model is built and the engine initialised
    required_bytes: int  # comparable with the card's size: the largest peak, allocator slack, context, communicator
    overhead: Mapping[str, int]  # what `required_bytes` adds to the peak, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFootprint:
    phases: Mapping[PhaseName, Phase]  # of one rank
    peak_bytes_per_rank: int
    peak_bytes_per_node: int
    nvme_bytes_per_node: int = 0  # files that offloading to NVMe keeps on a node's disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    gpu: GpuFootprint
    host: HostFootprint
    trainable_parameters: int
    pipeline_gpu: int | None = None  # of a pipeline the GPU that this is of, which needs most; the first is 0
    because: tuple[Any, ...] = ()


# --- the pace -----------------------------------------------------------------------------------

Cause = Literal[
    "arithmetic",
    "memory traffic",
    "recomputation",
    "dequantisation",
    "optimizer",
    "communication",
    "host link",
    "host optimizer",
    "launch overhead",
    "pipeline bubble",
]


RateSource = Literal["data sheet", "published", "given", "assumed", "measured", "run"]
"""Where a rate comes from: what the maker states and a share of it that was measured elsewhere; what others published;
what the user said; nobody knows; `tightfit measure`; a run of this job on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateUsed:
    """One rate of a machine as a pace used it."""

    value: float  # in its unit: FLOP/s, bytes/s, parameters/s, seconds
    source: RateSource
    spread: float  # it may be off by this share of itself, either way
    open_s: float  # what that leaves open of a step, in seconds
    on: str = ""  # the day it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a step takes, and why."""

    step_s: float  # one optimizer step, all its micro batches included
    tokens_per_s: float  # of all GPUs together
    causes: Mapping[Cause, float]
    """Seconds of a step by cause. What overlaps is counted once, so they add up to `step_s`."""
    low_s: float = 0.0
    high_s: float = 0.0
    """What a step takes if the rates that it hangs on are as good, or as bad, as they may be."""
    rates: Mapping[str, RateUsed] = field(default_factory=dict)
    """The rates that it hangs on, the one that leaves most open first."""
    because: tuple[Any, ...] = ()  # what had to be assumed
    warm_up_s: float = 0.0  # before the first step, once: compiling, where no earlier run has left its code
