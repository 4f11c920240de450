"""What the user wants trained: the fields of a job file, each documented here and nowhere else.

A job file, the command line's flags and the configs of other trainers all become a `Job`. The help, the
docs' table of fields and the schema that `tightfit schema` prints are made from the sentences under the
fields. Everything is as the user means it: sizes are words (`256GB`), a model is a name or a block of shape
fields. Nothing here reads or computes; `job/file.py` is the door.

What is named here changes the result of the training, and is the user's. How it is computed (engine, offload,
checkpointing …) is the planner's to choose; `levers` pins what the user wants to choose alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from tightfit.types import Compress, Method, Optimizer, Precision, States, Trainer, Trains

Allowance = Literal[
    "precision",
    "8bit-optimizer",
    "states",
    "compress",
    "lora-rank",
    "quantize",
    "lora-targets",
    "shorter-seq",
    "lora",
    "skip-data",
    "pure-16bit",
    "smaller-model",
]
"""The costly changes that a user can allow, in the order in which they are tried: first what does least to the result.
`planner/costly.py` says of each what it does. `compress` saves seconds, and no memory."""

Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup"]
DataFormat = Literal["auto", "alpaca", "sharegpt", "messages", "text"]

Tier = Literal[
    "auto",
    "all",
    "deepspeed",
    "stage2_offload",
    "stage3",
    "minimal",
    "standard",
    "fp16_safe",
    "extreme",
    "optimized",
    "quantized",
    "limit",
]
"""Named corners of the levers. `auto`: the one for the card's size, or the next smaller one that fits; `all`: every
one, side by side."""

Wanted = Literal["seq", "micro-batch", "model"]
"""What can be asked for the most of."""

Count = Annotated[int, Ge(1)]
Number = Annotated[int, Ge(0)]
Steps = Annotated[int, Ge(1), Le(1_000_000_000)]
Samples = Annotated[int, Ge(1), Le(1_000_000_000_000)]
Share = Annotated[float, Ge(0), Lt(1)]
"""Ranges, which the door checks and the schema shows. What is larger than any training was a slip of the finger, and
an answer to it would be one nobody can use. Levers have theirs on their own fields."""

_STRICT: dict[str, Any] = {"extra": "forbid"}
"""For pydantic, which validates job files against these classes: an unknown field is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA's own settings; they matter to `method: lora` and `qlora` alone."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    rank: Count = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Gt(0), Le(1_000_000)] | None = None
    """Scaling numerator; left out: twice the rank."""
    dropout: Share = 0.0
    """Share of the adapters' inputs that is dropped out while training."""
    targets: Annotated[tuple[str, ...], MinLen(1)] | Literal["all"] = "all"
    """Names of the linear layers that get an adapter (`q_proj`, `v_proj` …), or `all`: every one but the head."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Number format of the adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is trained on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    path: str | None = None
    """A JSON, JSONL or text file, a folder of them, `dataset_info.json:NAME`, `shipped:text`, or a data set's name;
    left out: generated samples."""
    format: DataFormat = "auto"
    """How a sample is laid out; `auto`: recognised by its keys."""
    template: str | None = None
    """Chat template by name (`chatml`, `llama3` …) or a Jinja file; left out: the tokenizer's own."""
    packing: bool = False
    """Fill every sequence with several samples."""
    samples: Samples | None = None
    """How many samples there are, where the file is not at hand: hours to finish need it."""
    tokenizer: str | None = None
    """A folder or a Hugging Face id; left out: the model's own, or a byte-level one for a model made from scratch."""
    recipe: str | None = None
    """A YAML recipe that says which fields of an example make up its prompt; `shipped:persona` is an example."""
    ablation: str | None = None
    """A setting of the recipe's fields, by its name there, or fields joined: `profile_and_history`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How the training is judged on the way."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    split: Share = 0.0
    """Share of the samples that is held back and never trained on."""
    every_steps: Steps | None = None
    """Steps between two evaluations; left out: at the end alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where the run is kept, and how often a checkpoint is written."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    folder: str = "output"
    """The run's folder."""
    every_steps: Steps | None = 500
    """Steps between two checkpoints; null: steps do not decide. `every: 500`, `10m`, `1h` or `none` says this and
    `every_minutes` in one."""
    every_minutes: Annotated[float, Gt(0), Le(1_000_000)] | None = None
    """Minutes between two checkpoints; beside `every_steps`, whichever comes first."""
    keep_last: Annotated[int, Ge(1), Le(1_000_000)] = 2
    """How many checkpoints stay on disk, the newest ones; `save_total_limit` is the same."""
    keep_every: Steps | None = None
    """A checkpoint at a multiple of so many steps stays for ever."""
    async_save: bool = True
    """Write checkpoints while the training goes on, where the host's memory allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What to train on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    gpus: str | None = None
    """`6x32GB`, `4xRTX4090`, `2x8xA100-80GB` (nodes × GPUs × card), or the file that `tightfit measure --out FILE`
    wrote on a machine; left out, or `this`: this machine."""
    host_ram: str | None = None
    """RAM of one node: `256GB`, `1TB`."""
    nvme: str | None = None
    """Free NVMe space of one node; without it nothing is offloaded to NVMe."""
    nvme_path: str | None = None
    """A folder on that NVMe."""
    network: str | None = None
    """What joins the nodes, NICs of a node × what each carries: `400Gb`, `8x400Gb`; left out: what is usual there."""
    link: str | None = None
    """What joins the GPUs of a node: `nvlink`, `pcie3`, `pcie4`, `pcie5`, or its rate in one direction, `50GB/s`."""
    gpu_ids: Annotated[tuple[Number, ...], MinLen(1)] | None = None
    """The GPUs of a node to use, by number; left out: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the plan must stay within, and what it may change when nothing fits."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    margin: Annotated[float, Ge(0), Lt(0.9)] = 0.04
    """Share of each card that stays free."""
    gpu_memory: str | None = None
    """The most that may be used of each card, `20GB` say, where others use it too."""
    host_ram: str | None = None
    """The most that may be used of a node's RAM."""
    allow: tuple[Allowance, ...] = ()
    """Costly changes that the plan may make when nothing else fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training, as the user means it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    model: str | Mapping[str, Any]
    """A preset, a Hugging Face id, a folder, a config.json, or a block of shape fields (`d_model: 4864` …)."""
    method: Method = "full"
    """Train every weight, adapters, or adapters on a 4-bit model."""
    lora: Adapters = field(default_factory=Adapters)
    """The adapters of `lora` and `qlora`."""
    sequence: Count = 2048
    """Tokens in a sequence."""
    effective_batch: Count | None = None
    """Sequences per step over all GPUs; left out: four per GPU."""
    precision: Precision = "bf16"
    """The number format of the computation."""
    optimizer: Optimizer = "adamw"
    """The optimizer; `adamw` has fp32 states."""
    master_weights: bool = True
    """false: pure 16-bit training, without fp32 copies of the weights."""
    frozen_layers: Number = 0
    """The lowest N layers and the embedding do not train."""
    compress: Compress = "none"
    """Send less between GPUs, and change the training a little: `zeropp`: ZeRO++'s 8-bit weights and 4-bit gradients;
    `onebit`: 1-bit Adam; `powersgd`: low ranks of the gradients."""
    states: States = "fp32"
    """Number format of the optimizer's moments on the host under `engine: stream`. `bf16` and `8bit` change the
    training a little."""
    trains: Trains = "all"
    """`embeddings`: only these train, and everything else is frozen; `layers`: everything but these. A head that is
    tied to them is the same tensor."""
    data: Data = field(default_factory=Data)
    """What is trained on."""
    max_samples: Samples | None = None
    """Use at most this many samples."""
    learning_rate: Annotated[float, Gt(0), Le(10)] | None = None
    """Peak learning rate; left out: 1e-5 for full training, 1e-4 for adapters."""
    schedule: Schedule = "cosine"
    """How the learning rate falls."""
    warmup: Annotated[float, Ge(0), Le(1_000_000_000)] = 0.03
    """Steps over which the learning rate rises: a count, or below 1 a share of all steps."""
    epochs: Annotated[float, Gt(0), Le(100_000)] | None = None
    """Passes over the data; left out, and without `max_steps`: one."""
    max_steps: Steps | None = None
    """Optimizer steps; wins over `epochs`."""
    weight_decay: Annotated[float, Ge(0), Le(10)] = 0.0
    """AdamW's weight decay."""
    clip: Annotated[float, Ge(0), Le(1_000_000)] = 1.0
    """Gradient norm above which gradients are scaled down; 0: never."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 42
    """Seed of data order, dropout and adapters."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """How the training is judged on the way."""
    saving: Saving = field(default_factory=Saving)
    """Where the run is kept."""
    logging_steps: Steps | None = None
    """Steps between two lines of the log, and two points of TensorBoard and wandb; left out: a line every ten seconds
    and a point at every step. `events.jsonl` has every step."""
    timeout: str | None = None
    """How long the run may take, `12h` or `90m`; then it saves and stops."""
    hardware: Machine = field(default_factory=Machine)
    """What to train on."""
    limits: Limits = field(default_factory=Limits)
    """What the plan must stay within."""
    levers: Mapping[str, Any] = field(default_factory=dict)
    """Free levers to pin, under the names of the `estimate` flags: `engine: zero2`, `micro_batch: 1` …"""
    stages: tuple[Mapping[str, Any], ...] = ()
    """Trainings one after another, each from the model that the one before it left: blocks of these fields
    (`trains: embeddings`, `max_steps: 200` …), which win over those outside."""
    tier: Tier | None = None
    """A named corner of the levers: `stage2_offload`, `minimal` …"""
    trainer: Trainer = "tightfit"
    """Who will run it, which is what the plan is for: tightfit's own worker, `llamafactory`, or a script around Hugging
    Face's `trainer`."""
    trust_remote_code: bool = False
    """Run code that a model's repository brings."""
