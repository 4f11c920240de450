"""Predicted beside published: what others measured, each row read as a model, levers and hardware of ours.

    python benchmarks/published.py            write docs/published.md
    python benchmarks/published.py --check    exit 1 if the page is stale
    python benchmarks/published.py --json     one JSON object a row, then one a group: what is predicted, and the error
    python benchmarks/published.py --quick    the same as text; both take --rows FILE

`data/published.jsonl` holds one measurement a line, as its publisher words it: free text in every field. Reading it is
the hard part. A rule looks for words (`FSDP`, `ZeRO-3`, `tensor_model_parallel_size=4`), never for a row. What a
project does by default and does not repeat in each row stands in `HABITS`, with the file that says so.

A row may say less than we need, or more than our levers can: it is then left out with the reason, which is counted. The
pace and the peak are judged apart: a compiled model has a peak that we can predict where every layer is recomputed, and
a pace that we cannot.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

from published_models import find_model
from rows import DATA

from tightfit.hardware.words import parse_hardware
from tightfit.memory import estimate
from tightfit.pace import pace
from tightfit.types import (
    Buckets,
    Checkpointing,
    Engine,
    Footprint,
    Hardware,
    HardwareError,
    Levers,
    Lora,
    Method,
    ModelShape,
    Offload,
    Optimizer,
    Pace,
    Trainer,
)

GIB = 2**30
ROWS = DATA / "published.jsonl"
GPUS_PER_NODE = 8
"""Of a cluster whose publisher does not say: what DGX, HGX and the clouds' machines of the A100 and the H100 have."""
APART = 1.15
WITHIN = 0.25

PeakKind = Literal["allocated", "reserved", "nvidia-smi"]


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One measurement as it was published; an empty text or None: not published."""

    place: int  # its line in the file
    source: str
    model: str
    hardware: str
    engine: str
    checkpointing: str
    precision: str
    other: str
    note: str
    gpus: int | None
    sequence: int | None
    micro_batch: int | None
    accumulation: int | None
    peak_gib: float | None
    tokens_per_s: float | None  # of one GPU
    mfu: float | None

    @cached_property
    def said(self) -> str:
        """What it says about the run, in lower case."""
        parts = (self.model, self.engine, self.checkpointing, self.precision, self.other)
        return "; ".join(parts).lower()

    @cached_property
    def project(self) -> str:
        """Who published it: the first words of the source, up to a path, a commit or a number."""
        return re.split(r"[\s#@]", self.source, maxsplit=1)[0]

    @property
    def ran_out(self) -> bool:
        return "out of memory" in self.said


def read_rows(path: Path = ROWS) -> list[PublishedRow]:
    """A row that says `as above` has the words of the row before it of the same source as well."""
    rows: list[PublishedRow] = []
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = _row(json.loads(line), place)
        if "as above" in row.other and rows and rows[-1].source == row.source:
            row = replace(row, other=f"{row.other}; above: {rows[-1].other}")
        rows.append(row)
    return rows


def _row(raw: Mapping[str, Any], place: int) -> PublishedRow:
    texts = ("source", "model", "hardware", "engine", "checkpointing", "precision", "other", "note")
    numbers = {
        "gpus": "gpus",
        "sequence": "seq",
        "micro_batch": "micro_batch",
        "accumulation": "accum",
        "peak_gib": "peak_gib",
        "tokens_per_s": "tokens_per_s_per_gpu",
        "mfu": "mfu",
    }
    return PublishedRow(
        place=place,
        **{name: str(raw.get(name) or "") for name in texts},
        **{name: _number(raw.get(key)) for name, key in numbers.items()},
    )


def _number(value: object) -> Any:
    """A number as it is, of a text its first one; None: there is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = re.search(r"\d[\d,]*(\.\d+)?", value) if isinstance(value, str) else None
    if found is None:
        return None
    number = float(found[0].replace(",", ""))
    return int(number) if number.is_integer() else number


# --- what cannot be expressed -------------------------------------------------------------------


class InexpressibleError(Exception):
    """Why our levers cannot express a row."""


_MORE = r"[ =_]?(?:[2-9]|[1-9]\d)"
_REFUSED: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|nvfp4|mxfp|int8 mixed|e4m3", "matrix products in 8 or 4 bits"),
    (rf"\btp{_MORE}|tensor_model_parallel_size{_MORE}|tensor parallel{_MORE}", "tensor parallel"),
    (rf"\bpp{_MORE}|pipeline_model_parallel_size{_MORE}", "pipeline parallel"),
    (rf"\bcp{_MORE}|context parallel{_MORE}|sequence_parallel_size{_MORE}", "context or sequence parallel"),
    (rf"\bep{_MORE}|expert_model_parallel_size{_MORE}|expert parallel", "expert parallel"),
    (r"llm\.q|megatron|megatrain|transformer.?engine|graph_trainer|nemo", "an engine of its own"),
    (r"\b(dpo|kto|grpo|ppo|gkd|rm|cpo|orpo|simpo|rlhf_type|verl)\b", "preference or reinforcement training"),
    (r"rerank|embedding-|seq_cls", "another task than the next token"),
    (r"-vl\b|\bvl\b|omni|\bvit|ocr\b|internvl|minicpm-[vo]|emu3|diffusion|multimodal|vision", "images or sound"),
    (r"device_map|model parallel", "layers spread over GPUs without sharding (device_map)"),
    (r"\bmuon\b|lora-fa|galore|adamw4bit|\blisa\b", "an optimizer that is not ours"),
    (r"int8", "weights in 8 bits"),
)
"""Words of a row, and the reason that they are."""

_OTHER_ADAPTERS = re.compile(
    r"\b(adalora|adamss|adapter|adaption|beft|bone|c3a|deft|delora|dora|fourierft|frod|glora|gralora|hra|ia3|lily|llamapro"
    r"|ln_tuning|loha|lokr|miss|oft|boft|peanut|prefix|prompt|psoft|p_tuning|ptuning|pvera|randlora|road|shira|tinylora"
    r"|trainable_tokens|vblora|vera|waveft|xlora|bdlora|mica|lorafa|galore|qgalore|lisa|lora_llm)(\b|_)"
)


def refuse(row: PublishedRow) -> None:
    """Raise where no lever of ours means what the row says."""
    where = f"{row.said}; {row.source.lower()}"
    for pattern, reason in _REFUSED:
        if re.search(pattern, where):
            raise InexpressibleError(reason)
    if _OTHER_ADAPTERS.search(f"{row.engine}; {row.source}".lower().replace("adapter_dtype", "")):
        raise InexpressibleError("adapters of another kind than LoRA")
    if not row.model:
        raise InexpressibleError("the model is not stated")
    missing = [
        name
        for name, value in (("sequence", row.sequence), ("micro batch", row.micro_batch), ("number of GPUs", row.gpus))
        if not value
    ]
    if missing:
        raise InexpressibleError(f"not stated: {', '.join(missing)}")


# --- what a project does and does not repeat ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What holds for all runs of a project unless a row says otherwise."""

    peak: PeakKind = "nvidia-smi"
    lora: Lora = field(default_factory=Lora)
    trainer: Trainer = "tightfit"
    attention: Literal["sdpa", "flash"] = "sdpa"
    checkpointing: str = ""
    full_engine: Engine | None = None
    """Of training every weight, where a row names no engine."""
    automatic_buckets: bool = False
    """DeepSpeed's buckets at stage 3 are "auto": Hugging Face's Trainer sets them by the hidden size."""
    pure: bool = False
    """Weights and optimizer in bf16, without fp32 copies."""
    bounded: bool = False
    """Sequences end before the stated length, which is the most that they may have."""
    gpus_per_node: int | None = None


HABITS: tuple[tuple[str, Habits], ...] = (
    # finetune.py: rank 64 on every linear layer, dropout 0.05; finetune_ds.sh is the only script for all weights.
    (
        r"^QwenLM/",
        Habits(
            lora=Lora(rank=64, dropout=0.05),
            trainer="trainer",
            attention="flash",
            full_engine="zero3",
            automatic_buckets=True,
        ),
    ),
    (r"LLaMA-Factory|llamafactory", Habits(trainer="llamafactory", automatic_buckets=True)),
    # lora.py at the commit that the note names: rank 8 on query and value, weights in bf16 alone.
    (r"litgpt", Habits(peak="allocated", lora=Lora(targets=("q_proj", "v_proj")), pure=True, bounded=True)),
    # recipes/configs/*_lora_single_device.yaml: rank 8 on q, v, output and the MLP; `dtype: bf16` for all weights.
    (
        r"torchtune",
        Habits(
            peak="allocated",
            lora=Lora(targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
            checkpointing="full",
            pure=True,
        ),
    ),
    (r"torchao|pytorch/ao", Habits(peak="allocated", pure=True)),
    (r"torchtitan", Habits(peak="reserved")),
    (r"huggingface/peft method_comparison", Habits(peak="reserved", pure=True, bounded=True)),
    (r"huggingface/peft", Habits(trainer="trainer")),
    (
        r"ms-swift docs/source_en/LLM/Benchmark",
        Habits(trainer="trainer", pure=True, lora=Lora(targets=("q_proj", "k_proj", "v_proj")), automatic_buckets=True),
    ),
    (r"ms-swift", Habits(trainer="trainer", pure=True, bounded=True, automatic_buckets=True)),
    (r"DeepSpeedExamples", Habits(peak="allocated")),
    (r"llm-foundry", Habits(attention="flash")),
)
"""By words of the source or the engine; the first that is found holds."""


def habits_of(row: PublishedRow) -> Habits:
    where = f"{row.source}; {row.engine}"
    named = [habits for pattern, habits in HABITS if re.search(pattern, row.engine, re.IGNORECASE)]
    return next(iter(named), None) or next(
        (habits for pattern, habits in HABITS if re.search(pattern, where, re.IGNORECASE)), Habits()
    )


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A row as we understand it."""

    row: PublishedRow
    shape: ModelShape
    levers: Levers
    hardware: Hardware
    peak_kind: PeakKind
    remarks: tuple[str, ...] = ()
    pace_not: str = ""
    """Why its pace is not compared although its peak may be; empty: it is, where one was published."""
    peak_not: str = ""
    bounded: bool = False
    """The published run had shorter sequences at times: ours is the most that it may take."""

    @cached_property
    def pace(self) -> Pace:
        return pace(self.shape, self.levers, self.hardware)

    @cached_property
    def footprint(self) -> Footprint:
        return estimate(self.shape, self.levers, self.hardware.world, self.hardware)

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU, predicted."""
        return self.pace.tokens_per_s / self.hardware.world

    @property
    def has_pace(self) -> bool:
        return self.row.tokens_per_s is not None and not self.pace_not

    @property
    def has_peak(self) -> bool:
        return self.row.peak_gib is not None and not self.peak_not

    @property
    def pace_ratio(self) -> float:
        """Predicted over published tokens a second."""
        return self.tokens_per_s / (self.row.tokens_per_s or 1)

    @property
    def peak_ratio(self) -> float:
        return self.footprint.gpu.peak_bytes / GIB / (self.row.peak_gib or 1)


@dataclass(kw_only=True)
class _Draft:
    """What the rules have found so far."""

    row: PublishedRow
    habits: Habits
    remarks: list[str] = field(default_factory=list)
    pace_not: str = ""
    peak_not: str = ""


def read(row: PublishedRow) -> Reading:
    """The row in our terms; `InexpressibleError` where it has none."""
    refuse(row)
    draft = _Draft(row=row, habits=habits_of(row))
    known = find_model(row.model, row.sequence)
    if known is None:
        raise InexpressibleError("a model whose sizes we do not know, or of no family of ours")
    if known.remark:
        draft.remarks.append(known.remark)
    hardware = read_hardware(draft)
    levers = read_levers(draft, known.shape)
    reading = Reading(
        row=row,
        shape=known.shape,
        levers=levers,
        hardware=hardware,
        peak_kind=_peak_kind(draft),
        remarks=tuple(draft.remarks),
        pace_not=draft.pace_not,
        peak_not=draft.peak_not,
        bounded=draft.habits.bounded and "packing=true" not in row.said,
    )
    _check_trainable(reading)
    return reading


def _check_trainable(reading: Reading) -> None:
    """Adapters of another kind train another number of parameters than ours."""
    found = re.search(r"([\d,]+) trainable", reading.row.other)
    if found and int(found[1].replace(",", "")) != reading.footprint.trainable_parameters:
        raise InexpressibleError("adapters of another kind than LoRA")


def _peak_kind(draft: _Draft) -> PeakKind:
    said = f"{draft.row.note}; {draft.row.other}".lower()
    if "reserved" in said:
        return "reserved"
    return "allocated" if re.search("memory_allocated|memory active", said) else draft.habits.peak


# hardware


def read_hardware(draft: _Draft) -> Hardware:
    row = draft.row
    gpus = row.gpus or 1
    card = _read_card(draft)
    per_node = draft.habits.gpus_per_node or (2 if "multinode" in row.said else GPUS_PER_NODE)
    per_node = min(per_node, gpus)
    if gpus % per_node:
        raise InexpressibleError("nodes with different numbers of GPUs")
    return replace(
        card,
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        network_bytes_per_s=_network(f"{row.source}; {row.hardware}; {row.other}", per_node),
    )


def _network(text: str, gpus_per_node: int) -> float | None:
    """Of one node; None: not said."""
    found = re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)([^;)]*)", text)
    if not found:
        return None
    each = gpus_per_node if "per gpu" in found[2].lower() else 1
    return float(found[1]) * each * 1e9 / 8


def _read_card(draft: _Draft) -> Hardware:
    """One card by its name: as it is written, then without what stands behind it, then with another size."""
    text = re.sub(r"\(.*?\)|\bdgx-?|\bclass\b|\bgpus?\b", " ", draft.row.hardware, flags=re.IGNORECASE).split(",")[0]
    if "/" in text and (found := re.match(r"(\w+)/\w+(.*)", text.strip())):  # A100/A800 80GB
        text = found[1] + found[2]
    words = text.split()
    for length in range(len(words), 0, -1):
        word = " ".join(words[:length])
        try:
            return parse_hardware(word)
        except HardwareError:
            pass
        if (larger := _without_size(word)) is not None:
            return _resized(larger, word, draft)
    raise InexpressibleError("a card that we do not know")


def _without_size(word: str) -> Hardware | None:
    """A family of several sizes where none is said, or where the one that is said is not sold."""
    family = re.sub(r"[\s-]*\d+(\.\d+)?\s*Gi?B\b", "", word, flags=re.IGNORECASE)
    for size in ("80GB", "96GB", "141GB", "40GB", "180GB"):
        try:
            return parse_hardware(f"{family} {size}")
        except HardwareError:
            continue
    return None


def _resized(found: Hardware, word: str, draft: _Draft) -> Hardware:
    if said := re.search(r"(\d+)\s*Gi?B\b", word, re.IGNORECASE):
        draft.remarks.append(
            f"a card of {said[1]} GB that is not in our list, priced as {found.gpu.name} with its memory"
        )
        return replace(found, gpu=replace(found.gpu, memory_bytes=int(said[1]) * GIB))
    draft.remarks.append(f"its size is not stated: taken as {found.gpu.memory_bytes / GIB:.0f} GiB")
    return found


# levers


def read_levers(draft: _Draft, shape: ModelShape) -> Levers:
    row = draft.row
    method = _method(row)
    engine = _engine(draft, method)
    optimizer_at, params_at = _offload(row, engine)
    deepspeed = engine in ("zero1", "zero2", "zero3")
    lora = _lora(draft, shape) if method != "full" else None
    if "emb)" in row.engine:
        draft.remarks.append("embedding and head train as well, which is not priced")
        draft.peak_not = draft.peak_not or "adapters beside a trained embedding and head"
    if row.accumulation is None:
        draft.remarks.append("accumulation is not stated: taken as 1")
    _note_compiled(draft)
    return Levers(
        method=method,
        engine=engine,
        sequence=int(row.sequence or 1),
        micro_batch=int(row.micro_batch or 1),
        accumulation=int(row.accumulation or 1),
        precision="fp16" if re.search(r"(?<!b)\bfp16", row.precision) and "bf16" not in row.precision else "bf16",
        offload_optimizer=optimizer_at,
        offload_param=params_at,
        checkpointing=_checkpointing(draft, shape),
        loss="fused"
        if re.search(r"liger(?!_kernel=false)|chunked c", row.said) and not _without_liger(row)
        else "plain",
        attention=_attention(draft),
        optimizer=_optimizer(draft),
        master_weights=_master_weights(draft, method, deepspeed=deepspeed),
        lora=lora,
        buckets=_buckets(draft, engine, shape),
        packed="packing=true" in row.said,
        trainer=draft.habits.trainer,
    )


def _without_liger(row: PublishedRow) -> bool:
    return "not using use_liger_kernel" in row.note.lower()


def _method(row: PublishedRow) -> Method:
    said = f"{row.engine}; {row.precision}; {row.other}".lower()
    if re.search(r"q-?lora|nf4|quant_method=bnb|int4", said):
        return "qlora"
    return "lora" if re.search(r"lora\b", row.engine.lower()) else "full"


def _engine(draft: _Draft, method: Method) -> Engine:
    said = draft.row.engine.lower()
    if found := re.search(r"zero-?\s?([0-3])", said):
        return f"zero{found[1]}"  # type: ignore[return-value]
    if "fsdp" in said:
        if "fsdp1" in said or "shard_" in said or "fsdp2" not in said:
            draft.remarks.append("FSDP1, priced as FSDP2")
        if "shard_grad_op" in said:
            draft.remarks.append("weights stay whole after the forward pass, which ours gathers once more")
        return "fsdp2"
    if method == "full" and draft.habits.full_engine:
        return draft.habits.full_engine
    return "zero0"


def _offload(row: PublishedRow, engine: Engine) -> tuple[Offload, Offload]:
    said = row.engine.lower()
    everything = re.search(r"optimizer ?\+ ?params?|zero3_offload|params offload", said)
    if everything or (engine == "fsdp2" and "cpu offload" in said and "no offload" not in said):
        return "cpu", "cpu"
    return ("cpu" if re.search(r"optimizer (cpu|offload)|zero2_offload", said) else "none"), "none"


def _lora(draft: _Draft, shape: ModelShape) -> Lora:
    row, lora = draft.row, draft.habits.lora
    said = f"{row.other}; {row.note}"
    if found := re.search(r"\br=(\d+)|lora_rank=(\d+)|rank (\d+)|LoRA r (\d+)", said):
        lora = replace(lora, rank=int(next(filter(None, found.groups()))))
    if found := re.search(r"dropout ([\d.]+\d)", said):
        lora = replace(lora, dropout=float(found[1]))
    if re.search(r"all[-_ ]linear|targets ALL", said):
        lora = replace(lora, targets=None)
    elif found := re.search(r"targets=\[(.*?)\]", said):
        lora = replace(lora, targets=tuple(re.findall(r"\w+", found[1])))
    if re.search("fp32", row.precision) or draft.habits.trainer == "trainer":
        lora = replace(lora, dtype="fp32")
    return _named_as_in(shape, lora)


def _named_as_in(shape: ModelShape, lora: Lora) -> Lora:
    """A model with one projection for q, k and v has no q_proj: the whole one is adapted."""
    if lora.targets is None:
        return lora
    there = {tensor.name.rpartition(".")[0].rpartition(".")[2] for block in shape.blocks for tensor in block.tensors}
    if set(lora.targets) <= there:
        return lora
    fused = tuple(sorted(name for name in there if name in ("query_key_value", "qkv_proj", "c_attn")))
    return replace(lora, targets=fused or None)


def _note_compiled(draft: _Draft) -> None:
    if not re.search(r"compile", f"{draft.row.said}"):
        return
    draft.pace_not = "compiled layers"
    if not re.match("full", draft.row.checkpointing or draft.habits.checkpointing):
        draft.peak_not = "compiled layers that are not recomputed"
    if re.search(r"optimizer[- ]in[- ]b", draft.row.said):
        draft.peak_not = "the optimizer's step inside the backward pass"


def _checkpointing(draft: _Draft, shape: ModelShape) -> Checkpointing:
    said = (draft.row.checkpointing or draft.habits.checkpointing).lower()
    if said.startswith("none"):
        return Checkpointing(layers=0)
    if said.startswith("full") or re.search("gc true|recompute_granularity=full", draft.row.note + draft.row.other):
        return Checkpointing(layers=None, offload="offload" in said)
    if said.startswith("selective layer"):
        return Checkpointing(layers=shape.n_layers // 2)
    if said.startswith("selective"):
        draft.remarks.append("every second product is recomputed: priced as every second layer")
        draft.peak_not = draft.peak_not or "single operations recomputed"
        return Checkpointing(layers=shape.n_layers // 2)
    raise InexpressibleError("whether layers are recomputed is not stated")


def _attention(draft: _Draft) -> Literal["sdpa", "flash", "eager"]:
    said = draft.row.said
    if "attn_impl=eager" in said:
        return "eager"
    if re.search(r"flash-attn off", said):
        return "sdpa"
    return "flash" if re.search(r"flash[-_ ]?att|flash_attn|fa2|flash/triton", said) else draft.habits.attention


def _optimizer(draft: _Draft) -> Optimizer:
    said = draft.row.other.lower()
    if re.search(r"8-?bit", said):
        return "paged_adamw8bit" if "paged" in said else "adamw8bit"
    return "adafactor" if "adafactor" in said else "sgd" if re.search(r"\bsgd\b", said) else "adamw"


def _master_weights(draft: _Draft, method: Method, *, deepspeed: bool) -> bool:
    said = f"{draft.row.said}; {draft.row.note}".lower()
    if re.search(r"pure[ _]bf16|bf16-true|bf16_master_weights_and_grads: true|without fp32 masters", said):
        return False
    if draft.habits.pure and not deepspeed:
        return False
    return method == "full" or deepspeed


def _buckets(draft: _Draft, engine: Engine, shape: ModelShape) -> Buckets:
    if engine != "zero3" or not draft.habits.automatic_buckets:
        return Buckets()
    hidden = shape.hidden_size
    return Buckets(reduce_bucket=hidden**2, prefetch_bucket=int(0.9 * hidden**2), persistence_threshold=10 * hidden)


# --- everything ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every row, read or left out."""

    readings: tuple[Reading, ...]
    left_out: tuple[tuple[PublishedRow, str], ...]

    @cached_property
    def paces(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.has_pace]

    @cached_property
    def peaks(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.has_peak]


def compare(rows: Iterable[PublishedRow]) -> Comparison:
    readings, left_out = [], []
    for row in rows:
        try:
            readings.append(read(row))
        except InexpressibleError as reason:
            left_out.append((row, str(reason)))
    return Comparison(readings=tuple(readings), left_out=tuple(left_out))


def grid_of(reading: Reading) -> tuple[str, str]:
    """Same source, same hardware."""
    return reading.row.source, reading.row.hardware


def group_of(reading: Reading) -> tuple[str, str, str, str]:
    """Source, hardware, engine and method: what shares its causes."""
    levers, row = reading.levers, reading.row
    offload = "+".join(
        name
        for name, at in (("optimizer", levers.offload_optimizer), ("weights", levers.offload_param))
        if at != "none"
    )
    engine = levers.engine + (f" {offload} on the host" if offload else "")
    nodes = "one GPU" if reading.hardware.world == 1 else "one node" if reading.hardware.nodes == 1 else "several nodes"
    return row.project, f"{reading.hardware.gpu.name}, {nodes}", engine, levers.method


def grouped(readings: Iterable[Reading], key: Callable[[Reading], Any]) -> dict[Any, list[Reading]]:
    found: dict[Any, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    return found


def ordered_pairs(group: Sequence[Reading]) -> tuple[int, int]:
    """Pairs that are apart as published, and how many of them we put in the right order."""
    right = apart = 0
    for one, other in combinations(group, 2):
        faster, slower = sorted((one, other), key=lambda each: -(each.row.tokens_per_s or 0))
        if (faster.row.tokens_per_s or 0) > APART * (slower.row.tokens_per_s or 0):
            apart += 1
            right += faster.tokens_per_s > slower.tokens_per_s
    return apart, right


# --- for the model's makers ---------------------------------------------------------------------


def facts(reading: Reading) -> dict[str, Any]:
    row, levers, step = reading.row, reading.levers, reading.pace
    return {
        "place": row.place,
        "source": row.project,
        "model": row.model.split(" (")[0],
        "gpus": f"{reading.hardware.nodes}x{reading.hardware.gpus_per_node}x{reading.hardware.gpu.name}",
        "method": levers.method,
        "engine": levers.engine,
        "offload": [levers.offload_optimizer, levers.offload_param],
        "seq": levers.sequence,
        "micro": levers.micro_batch,
        "accum": levers.accumulation,
        "recomputed": levers.checkpointing.layers,
        "published": row.tokens_per_s,
        "predicted": round(reading.tokens_per_s, 1),
        "ratio": round(reading.pace_ratio, 3),
        "step_s": round(step.step_s, 4),
        "causes": {cause: round(seconds / step.step_s, 3) for cause, seconds in step.causes.items()},
        "remarks": list(reading.remarks),
    }


def group_facts(name: Sequence[str], group: Sequence[Reading]) -> dict[str, Any]:
    ratios = [reading.pace_ratio for reading in group]
    return {
        "group": " | ".join(name),
        "rows": len(group),
        "median_error": round(median(abs(ratio - 1) for ratio in ratios), 3),
        "median_ratio": round(median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "within": sum(abs(ratio - 1) <= WITHIN for ratio in ratios),
    }


def print_quick(comparison: Comparison) -> None:
    for name, group in grouped(comparison.paces, group_of).items():
        print(f"\n{' | '.join(name)}")
        for reading in group:
            known = facts(reading)
            causes = ", ".join(
                f"{cause} {100 * share:.0f}" for cause, share in known["causes"].items() if share >= 0.05
            )
            recomputed = "all" if known["recomputed"] is None else known["recomputed"]
            print(
                f"  {known['place']:>4} {known['model']:<14} {known['gpus']:<16} seq {known['seq']:>6}"
                f" micro {known['micro']:>3} accum {known['accum']:>3} again {recomputed:>3}"
                f" published {known['published']:>8.0f} predicted {known['predicted']:>8.0f}"
                f" ratio {known['ratio']:.2f} | {causes}"
            )
    print()
    for name, group in grouped(comparison.paces, group_of).items():
        known = group_facts(name, group)
        print(
            f"{known['rows']:>4} rows  median ratio {known['median_ratio']:.2f}"
            f" ({known['lowest']:.2f}–{known['highest']:.2f})"
            f"  median error {100 * known['median_error']:.0f} %  within {known['within']}  {known['group']}"
        )
    ratios = [reading.pace_ratio for reading in comparison.paces]
    errors = [abs(ratio - 1) for ratio in ratios]
    pairs = [ordered_pairs(group) for group in grouped(comparison.paces, grid_of).values()]
    apart, right = (sum(counts) for counts in zip(*pairs, strict=True))
    print(
        f"\nall: {len(errors)} rows, median error {100 * median(errors):.1f} %,"
        f" within 25 %: {sum(error <= WITHIN for error in errors) / len(errors):.1%},"
        f" pairs in order {right}/{apart} = {right / max(apart, 1):.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print every row and every group as JSON lines")
    parser.add_argument("--quick", action="store_true", help="print every row and every group as text")
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of the same form")
    args = parser.parse_args(argv)
    comparison = compare(read_rows(args.rows))
    if args.json:
        for reading in comparison.paces:
            print(json.dumps(facts(reading), ensure_ascii=False))
        for name, group in grouped(comparison.paces, group_of).items():
            print(json.dumps(group_facts(name, group), ensure_ascii=False))
        return 0
    print_quick(comparison)
    return 0


if __name__ == "__main__":
    sys.exit(main())
