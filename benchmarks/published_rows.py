"""What others measured, each row read as a model, levers and hardware of ours.

`data/published.jsonl` holds one measurement a line, as its publisher words it: free text in every field. A rule looks
for words (`FSDP`, `ZeRO-3`, `tensor_model_parallel_size=4`), never for a row. What a project does by default and does
not repeat in each row stands in `HABITS`, with the file that says so.

A row may say less than we need, or more than our levers can: it is then left out with the reason. One whose layout we
have and that differs in something else (`DIFFERENT`) is read as the nearest that we have: it stands beside our
prediction, with what differs, and in no figure. The pace and the peak are judged apart: either may lack what the other
has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

sys.path.insert(0, str(Path(__file__).parent))

from published_litgpt import peak_bytes as litgpt_peak_bytes
from published_models import find_model
from rows import DATA, GIB

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.layouts import check_layout
from tightfit.memory import estimate
from tightfit.memory.overhead import beside
from tightfit.pace import pace
from tightfit.types import (
    AttentionKernel,
    Buckets,
    Checkpointing,
    Compile,
    ConfigError,
    Engine,
    Footprint,
    Hardware,
    HardwareError,
    Levers,
    Lora,
    Loss,
    Method,
    ModelShape,
    Offload,
    Optimizer,
    Pace,
    PhaseName,
    Taught,
    TaughtRate,
    Trainer,
)

ROWS = DATA / "published.jsonl"
GPUS_PER_NODE = 8
"""Of a cluster whose publisher does not say: what DGX, HGX and the clouds' machines of the A100 and the H100 have."""
PLAIN_LOGIT_BYTES = 12
IN_PLACE_LOGIT_BYTES = 2
"""Of a logit at the worst moment of the loss: of the plain cross entropy that is priced, with its copies in fp32, and
of flash-attn's, which llm-foundry takes: the gradient overwrites the logits."""
ACCUMULATION_UNKNOWN = "accumulation is not stated: taken as 1"
TRAINING: tuple[PhaseName, ...] = ("forward", "loss", "backward", "step")

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
        row = make_row(json.loads(line), place)
        if "as above" in row.other and rows and rows[-1].source == row.source:
            row = replace(row, other=f"{row.other}; above: {rows[-1].other}")
        rows.append(row)
    return rows


def make_row(raw: Mapping[str, Any], place: int) -> PublishedRow:
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


_REFUSED: tuple[tuple[str, str], ...] = (
    (r"\b(dpo|kto|grpo|ppo|gkd|rm|cpo|orpo|simpo|rlhf_type|verl)\b", "preference or reinforcement training"),
    (r"rerank|embedding-|seq_cls", "another task than the next token"),
    (r"-vl\b|\bvl\b|omni|\bvit|ocr\b|internvl|minicpm-[vo]|emu3|diffusion|multimodal|vision", "images or sound"),
    (r"\bhsdp\b|hybrid[ _-]?shard|\bmics\b|\bhpz\b", "sharded inside a node, copied across nodes"),
    (r"llm\.q|megatrain|transformer.?engine|graph_trainer|nemo\b|unsloth|colossal", "an engine of its own"),
    (r"device_map|model parallel", "layers spread over GPUs without sharding (device_map)"),
    (r"\bmuon\b|lora-fa|galore|adamw4bit|\blisa\b|\blion\b|\bshampoo\b|\bsoap\b", "an optimizer that is not ours"),
    (r"int8(?! mixed)", "weights in 8 bits"),
)
"""Words of a row, and the reason that they are."""

DIFFERENT: Mapping[str, str] = {
    r"fp8|float8|nvfp4|mxfp|int8 mixed|e4m3": "matrix products in 8 or 4 bits, priced in bf16: in no figure",
    r"megatron-(core|swift)": "Megatron's own engine, priced as FSDP2: in no figure",
}
"""Words of a row whose layout we have, and what of it we have not."""

_MORE = r"[ =_]?([2-9]\b|[1-9]\d+)"
_LAYOUTS = {
    "tensor_parallel": rf"\btp{_MORE}|tensor_model_parallel_size{_MORE}|tensor parallel{_MORE}",
    "pipeline_parallel": rf"\bpp{_MORE}|pipeline_model_parallel_size{_MORE}",
    "sequence_parallel": rf"\b[cs]p{_MORE}|(?:context|sequence)[ _-]parallel(?:_size)?{_MORE}",
    "expert_parallel": rf"\bep{_MORE}|expert_model_parallel_size{_MORE}|expert parallel{_MORE}",
}
"""The levers that put GPUs together, and the words of a row that say how many."""

_REFUSED_SOURCES: tuple[tuple[str, str], ...] = (
    (r"device_map", "layers spread over GPUs without sharding (device_map)"),
    (r"multimodal|seq_cls|/vlm|qwen3_vl", "images or sound"),
    (r"/rlhf/|/grpo/", "preference or reinforcement training"),
    (r"galore|muon|lisa", "an optimizer that is not ours"),
    (r"transformerengine", "an engine of its own"),
)
"""Words of a path that says what its rows do not repeat."""

_OTHER_ADAPTERS = re.compile(
    r"\b(adalora|adamss|adapter|adaption|beft|bone|c3a|deft|delora|dora|fourierft|frod|glora|gralora|hra|ia3|lily|llamapro"
    r"|ln_tuning|loha|lokr|miss|oft|boft|peanut|prefix|prompt|psoft|p_tuning|ptuning|pvera|randlora|road|shira|tinylora"
    r"|trainable_tokens|vblora|vera|waveft|xlora|bdlora|mica|lorafa|galore|qgalore|lisa|lora_llm)(\b|_)"
)


def refuse(row: PublishedRow) -> None:
    """Raise where no lever of ours means what the row says."""
    for pattern, reason in _REFUSED:
        if re.search(pattern, row.said):
            raise InexpressibleError(reason)
    for pattern, reason in _REFUSED_SOURCES:
        if re.search(pattern, row.source.lower()):
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
    attention: AttentionKernel = "sdpa"
    checkpointing: str = ""
    loss: Loss = "plain"
    engines: Mapping[Method, Engine] = field(default_factory=dict)
    """By method, where a row names no engine."""
    stage2: Buckets = field(default_factory=Buckets)
    automatic_buckets: bool = False
    """DeepSpeed's buckets at stage 3 are "auto": Hugging Face's Trainer sets them by the hidden size."""
    pure: bool = False
    """Weights and optimizer in bf16, without fp32 copies."""
    foreach: bool = False
    """torch's AdamW without `fused`, which takes the roots of all second moments at once."""
    bounded: bool = False
    """Sequences end before the stated length, which is the most that they may have."""
    knobs_unknown: bool = False
    """A table of several recipes, whose settings it does not repeat."""
    whole_when_frozen: bool = False
    """FSDP1 whose peaks are as if gathered frozen weights stayed; its code does not say why."""
    loss_in_place: bool = False
    """The gradient of the logits overwrites them."""
    first_flash: bool = False
    """A flash kernel of the first generation."""
    litgpt: bool = False
    """Model classes of its own, priced in published_litgpt.py."""
    data_on_card: bool = False
    """The whole data set lies on the card, and its size is not stated."""


FIRST_FLASH = Taught(on="", rates=(TaughtRate(name="attention", factor=2.0, spread=0.2),))
"""The paper of FlashAttention-2: twice as fast as the first, and as the Triton kernel that llm-foundry took then."""

_TRAINER = Habits(trainer="trainer", automatic_buckets=True, foreach=True)
"""Hugging Face's Trainer before transformers 5, whose default optimizer is `adamw_torch`."""
_LITGPT = Habits(
    peak="allocated",
    lora=Lora(targets=("q_proj", "v_proj"), dropout=0.05),
    pure=True,
    foreach=True,
    whole_when_frozen=True,
    litgpt=True,
)
_TORCHTUNE = Habits(
    peak="allocated",
    lora=Lora(targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    checkpointing="full",
    pure=True,
)

HABITS: tuple[tuple[str, Habits], ...] = (
    # TransformerConfig: `recompute_granularity` is None unless it is set.
    (r"megatron-(core|swift)", Habits(attention="flash", engines={"full": "fsdp2", "lora": "fsdp2"})),
    # finetune.py: rank 64 on every linear layer, dropout 0.05. finetune_ds.sh is the only script for all weights, and
    # finetune_qlora_single_gpu.sh runs under ds_config_zero2.json.
    (
        r"^QwenLM/",
        replace(
            _TRAINER,
            lora=Lora(rank=64, dropout=0.05),
            attention="flash",
            engines={"full": "zero3", "qlora": "zero2"},
            stage2=Buckets(reduce_bucket=200_000_000, allgather_bucket=200_000_000, overlap_comm=True),
        ),
    ),
    # The DeepSpeed files beside the YAMLs.
    (
        r"LLaMA-Factory|llamafactory",
        replace(_TRAINER, trainer="llamafactory", stage2=Buckets(overlap_comm=True)),
    ),
    # finetune/lora.py at 8641822: rank 8 on query and value, dropout 0.05, bf16 alone.
    (r"litgpt", _LITGPT),
    # recipes/configs/*_lora_single_device.yaml: rank 8 on q, v, output and the MLP; `dtype: bf16` for all weights.
    (r'torchtune README.* "', _TORCHTUNE),
    # The table of models came with 30b8519, whose configs cannot have made it: of the 16.2 GiB of Llama 3.1 8B with
    # LoRA, weights take 15.0, the inputs of recomputed layers 1.0 and the logits, all of which its chunked loss is
    # given, 1.0 more. On another card the same row has 30.3.
    (r"torchtune README", replace(_TORCHTUNE, knobs_unknown=True)),
    (r"torchtune", _TORCHTUNE),
    # benchmarks/quantized_training/pretrain_llama2.py at 9acc9a4: `data = get_tinystories().cuda()`.
    (r"pytorch/ao .*quantized_training", Habits(peak="allocated", pure=True, data_on_card=True)),
    (r"torchao|pytorch/ao", Habits(peak="allocated", pure=True)),
    (r"torchtitan", Habits(peak="reserved")),
    (r"huggingface/peft method_comparison", Habits(peak="reserved", pure=True, foreach=True)),
    (r"huggingface/peft", _TRAINER),
    # train.py: rank 64 on all but the output projection, dropout 0.1, bf16 alone, checkpointing unless told otherwise.
    (
        r"fsdp_qlora",
        Habits(
            peak="reserved",
            lora=Lora(
                rank=64, targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"), dropout=0.1
            ),
            checkpointing="full",
            pure=True,
        ),
    ),
    (
        r"ms-swift docs/source_en/LLM/Benchmark",
        replace(_TRAINER, pure=True, lora=Lora(targets=("q_proj", "k_proj", "v_proj")), bounded=True),
    ),
    (r"ms-swift", replace(_TRAINER, pure=True, bounded=True)),
    (r"DeepSpeedExamples", Habits(peak="allocated")),
    (r"axolotl|\btrl\b|SFTTrainer|transformers|accelerate|xtuner|HF Trainer", _TRAINER),
    (r"llm-foundry", Habits(attention="flash", loss_in_place=True, first_flash=True)),
)
"""By words of the source or the engine; the first that is found holds."""


def habits_of(row: PublishedRow) -> Habits:
    where = f"{row.source}; {row.engine}"
    return next((habits for pattern, habits in HABITS if re.search(pattern, where, re.IGNORECASE)), Habits())


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A row as we understand it."""

    row: PublishedRow
    shape: ModelShape
    levers: Levers
    hardware: Hardware
    habits: Habits
    peak_kind: PeakKind
    remarks: tuple[str, ...] = ()
    pace_not: str = ""
    """Why its pace is not compared although its peak may be; empty: it is, where one was published."""
    peak_not: str = ""
    differs: bool = False
    """In something that we have not: it is compared with our nearest, and counted nowhere."""

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
        return bool(self.row.tokens_per_s) and not self.pace_not

    @property
    def has_peak(self) -> bool:
        return bool(self.row.peak_gib) and not self.peak_not

    @property
    def pace_ratio(self) -> float:
        """Predicted over published tokens a second."""
        return self.tokens_per_s / (self.row.tokens_per_s or 1)

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted, comparable with `max_memory_allocated` over the training steps: ours, with what the project's own
        optimizer and loss take instead."""
        levers, phases = self.levers, self.footprint.gpu.phases
        if self.habits.litgpt and levers.engine == "zero0" and levers.lora and levers.checkpointing.layers == 0:
            return litgpt_peak_bytes(
                self.shape,
                levers,
                double_quantised="-dq" in self.row.precision,
                workspaces=phases["loss"].components["temporaries"],
            )
        totals = {name: phases[name].total_bytes for name in TRAINING}
        if self.habits.foreach and levers.engine == "zero0" and levers.optimizer == "adamw":
            totals["step"] += (4 if levers.master_weights else 2) * self.footprint.trainable_parameters
        if self.habits.loss_in_place and levers.loss == "plain":
            logits = levers.micro_batch * levers.sequence * self.shape.vocab_size
            totals["loss"] -= (PLAIN_LOGIT_BYTES - IN_PLACE_LOGIT_BYTES) * logits
        return max(totals.values())

    @property
    def required_bytes(self) -> int:
        """What the card has to have, the start included where DeepSpeed makes it."""
        start = self.footprint.gpu.init_peak_bytes if self.levers.stage else 0
        largest = max(self.peak_bytes, start)
        return largest + sum(beside(largest, self.hardware.world, self.hardware.gpu).values())

    @property
    def peak_gib(self) -> float:
        """Published; of training steps alone where the note has that as well."""
        found = re.search(r"training-step reserved.*?99th pct ([\d.]+) GiB", self.row.note)
        return float(found[1]) if found else float(self.row.peak_gib or 0)

    @property
    def in_range(self) -> bool:
        """Whether the published pace lies in the range of ours."""
        return self.pace.low_s <= self.pace_ratio * self.pace.step_s <= self.pace.high_s

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / GIB / self.peak_gib

    @property
    def bounded(self) -> bool:
        """The published run had shorter sequences at times: ours is the most that it may take."""
        return self.habits.bounded and "packing=true" not in self.row.said


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
    differences = [said for pattern, said in DIFFERENT.items() if re.search(pattern, row.said)]
    draft = _Draft(row=row, habits=habits_of(row), remarks=list(differences))
    if draft.habits.knobs_unknown:
        raise InexpressibleError("a table without the settings of its rows")
    known = find_model(row.model, row.sequence)
    if known is None:
        raise InexpressibleError("a model whose sizes we do not know, or of no family of ours")
    if known.remark:
        draft.remarks.append(known.remark)
    hardware = read_hardware(draft)
    levers = _cut_batch(draft, read_levers(draft, known.shape), hardware.world)
    try:  # as far as our own worker could run it, whoever did
        check_layout(replace(levers, trainer="tightfit"), known.shape, hardware.world)
    except ConfigError as refused:
        raise InexpressibleError(str(refused)) from refused
    reading = Reading(
        row=row,
        shape=known.shape,
        levers=levers,
        hardware=hardware,
        habits=draft.habits,
        peak_kind=_peak_kind(draft),
        remarks=tuple(draft.remarks),
        pace_not=draft.pace_not,
        peak_not=draft.peak_not,
        differs=bool(differences),
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
    per_node = min(2 if "multinode" in row.said else GPUS_PER_NODE, gpus)
    if gpus % per_node:
        raise InexpressibleError("nodes with different numbers of GPUs")
    taught = None
    if draft.habits.first_flash:
        draft.remarks.append("a flash kernel of the first generation, at half the rate of the second")
        taught = FIRST_FLASH
    return replace(
        card,
        taught=taught,
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        network_bytes_per_s=_network(f"{row.source}; {row.hardware}; {row.other}", per_node),
    )


def _network(text: str, gpus_per_node: int) -> float | None:
    """Of one node; None: not said."""
    found = re.search(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*([GT])b(?:ps|/s|it/s)([^;)]*)", text)
    if not found:
        return None
    links = gpus_per_node if "per gpu" in found[4].lower() else int(found[1] or 1)
    return float(found[2]) * links * {"G": 1e9, "T": 1e12}[found[3]] / 8


_AMPLE = parse_hardware("1024GB")


def _read_card(draft: _Draft) -> Hardware:
    """One card by its name: as it is written, then without what stands behind it, then with another size."""
    text = re.sub(r"\(.*?\)|\bdgx-?|\bclass\b|\bgpus?\b", " ", draft.row.hardware, flags=re.IGNORECASE).split(",")[0]
    if "/" in text and (found := re.match(r"(\w+)/\w+(.*)", text.strip())):  # A100/A800 80GB
        text = found[1] + found[2]
    words = [] if "not named" in draft.row.hardware else text.split()
    for length in range(len(words), 0, -1):
        word = " ".join(words[:length])
        try:
            found = parse_hardware(word)
        except HardwareError:
            pass
        else:
            if found.gpu.bf16_flops is None:
                draft.pace_not = "a card whose rates we do not know"
            return found
        if (larger := _without_size(word)) is not None:
            return _resized(larger, word, draft)
    if re.search(r"not named|^ *$", draft.row.hardware):
        draft.pace_not = "the card is not stated"
        return _AMPLE
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
    optimizer_at, params_at = _offload(draft, engine)
    deepspeed = engine in ("zero1", "zero2", "zero3")
    lora = _lora(draft, shape) if method != "full" else None
    if "emb)" in row.engine:
        draft.remarks.append("embedding and head train as well, which is not priced")
        draft.peak_not = draft.peak_not or "adapters beside a trained embedding and head"
    if row.accumulation is None:
        draft.remarks.append(ACCUMULATION_UNKNOWN)
    if engine == "fsdp2" and draft.habits.whole_when_frozen and method != "full":
        draft.peak_not = draft.peak_not or "FSDP1 that seems to hold the whole model beside its share"
    if found := re.search("gptq|awq|hqq", row.said):
        draft.remarks.append(f"4-bit weights of {found[0].upper()}, priced as NF4")
    if draft.habits.data_on_card:
        draft.peak_not = draft.peak_not or "a data set of unknown size lies on the card as well"
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
        compile=_compile(draft),
        loss=_loss(draft),
        attention=_attention(draft),
        optimizer=_optimizer(draft),
        master_weights=_master_weights(draft, method, deepspeed=deepspeed),
        lora=lora,
        buckets=_buckets(draft, engine, shape),
        packed="packing=true" in row.said or ("torchtune" in row.source and bool(re.search(r"\bpacked\b", row.said))),
        trainer=draft.habits.trainer,
        **_layout(draft),
    )


def _cut_batch(draft: _Draft, levers: Levers, world: int) -> Levers:
    """Into the micro batches that a pipeline works on. torchtitan's recipes of 2024 take the batch of a GPU for one, of
    which there are as many as stages in the row (`n_microbatches`, parallelisms/pipelining_utils.py). Megatron states
    the batch of all GPUs."""
    row, readers = draft.row, levers.data_ranks(world)
    found = re.search(r"global_batch_size=(\d+)|\bGBS (\d+)", row.other)
    if row.accumulation is None and found and "megatron" in row.engine.lower():
        share = int(found[1] or found[2]) // (readers * levers.micro_batch)
        draft.remarks = [each for each in draft.remarks if each != ACCUMULATION_UNKNOWN]
        return replace(levers, accumulation=max(1, share))
    size = levers.pipeline_parallel
    if size > 1 and "torchtitan" in row.source and row.accumulation == 1 and levers.micro_batch % size == 0:
        draft.remarks.append("the batch of a pipeline is cut into as many micro batches as it has GPUs")
        return replace(levers, micro_batch=levers.micro_batch // size, accumulation=size)
    return levers


def _layout(draft: _Draft) -> dict[str, int]:
    """How many GPUs share what, as far as the row says so."""
    said, sizes = draft.row.said, dict[str, int]()
    for lever, pattern in _LAYOUTS.items():
        if found := re.search(pattern, said):
            sizes[lever] = int(next(number for number in found.groups() if number))
    if "sequence_parallel" in sizes and not re.search("sequence[ _-]parallel|ulysses", said):
        draft.remarks.append("context parallel, priced as Ulysses")
    if "pipeline_parallel" in sizes and "interleaved" in said:
        sizes["stages_per_gpu"] = 2
    if re.search("async tp", said):
        draft.remarks.append("what GPUs of a layer send goes beside its products, and beside nothing in ours")
    return sizes


def _loss(draft: _Draft) -> Loss:
    if "not using use_liger_kernel" in draft.row.note.lower():
        return "plain"
    return (
        "fused"
        if re.search(r"liger(?!_kernel=false)|chunked c|fused.{0,8} cross", draft.row.said)
        else draft.habits.loss
    )


def _method(row: PublishedRow) -> Method:
    said = f"{row.engine}; {row.precision}; {row.other}".lower()
    if re.search(r"q-?lora|nf4|quant_method=bnb|int4|4-?bit (base|weights)|hqq", said):
        return "qlora"
    return "lora" if re.search(r"lora\b", row.engine.lower()) else "full"


def _engine(draft: _Draft, method: Method) -> Engine:
    said = draft.row.engine.lower()
    if found := re.search(r"zero-?\s?([0-3])", said):
        return cast(Engine, f"zero{found[1]}")
    if "fsdp" in said and "megatron" not in said:
        if "fsdp1" in said or "shard_" in said or "fsdp2" not in said:
            draft.remarks.append("FSDP1, priced as FSDP2")
        if "shard_grad_op" in said:
            draft.remarks.append("weights stay whole after the forward pass, which ours gathers once more")
        return "fsdp2"
    return draft.habits.engines.get(method, "zero0")


def _offload(draft: _Draft, engine: Engine) -> tuple[Offload, Offload]:
    said = draft.row.engine.lower()
    if "optimizer_cpu_offload=true" in draft.row.said and engine == "fsdp2":
        draft.remarks.append("the optimizer's states on the host, priced with the weights there too")
        return "cpu", "cpu"
    place: Offload = "nvme" if "nvme" in said else "cpu"
    everything = re.search(r"optimizer ?\+ ?params?|zero3_offload|params? (and optimizer )?offload|infinity", said)
    if everything or (engine == "fsdp2" and re.search("(?<!no )(cpu )offload", said)):
        return place, place
    moved = re.search(r"optimizer (cpu|offload|nvme)|zero2_offload|offload.{0,5} optimizer|zero-?offload", said)
    return (place if moved else "none"), "none"


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
    if "fp32" in row.precision:
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


def _compile(draft: _Draft) -> Compile:
    if not re.search(r"compile", f"{draft.row.said}"):
        return "off"
    if re.search(r"optimizer[- ]in[- ]b", draft.row.said):
        draft.peak_not = "the optimizer's step inside the backward pass"
    return "layers"


def _checkpointing(draft: _Draft, shape: ModelShape) -> Checkpointing:
    said = (draft.row.checkpointing or draft.habits.checkpointing).lower()
    if said.startswith("none"):
        return Checkpointing(layers=0)
    if "recompute_granularity=selective" in draft.row.other:
        draft.remarks.append("attention is recomputed, as flash attention does anyway: priced as nothing recomputed")
        return Checkpointing(layers=0)
    if not said and re.search("megatron-core", draft.row.said):
        draft.remarks.append("recomputation is not stated: none, as Megatron does by default")
        return Checkpointing(layers=0)
    if said.startswith("full") or re.search("gc true|recompute_granularity=full", draft.row.note + draft.row.other):
        return Checkpointing(layers=None, offload="offload" in said)
    if found := re.search(r"(\d)/(\d)", said):  # every third layer: 1/3
        return Checkpointing(layers=shape.n_layers * int(found[1]) // max(int(found[2]), 1))
    if re.search("selective layer|every (other|2nd|second) layer", said):
        return Checkpointing(layers=shape.n_layers // 2)
    if said.startswith("selective"):
        draft.remarks.append("every second product is recomputed: priced as every second layer")
        draft.peak_not = draft.peak_not or "single operations recomputed"
        return Checkpointing(layers=shape.n_layers // 2)
    raise InexpressibleError("whether layers are recomputed is not stated")


def _attention(draft: _Draft) -> AttentionKernel:
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
    if engine in ("zero1", "zero2"):
        return draft.habits.stage2
    if engine != "zero3" or not draft.habits.automatic_buckets:
        return Buckets()
    hidden = shape.hidden_size
    return Buckets(reduce_bucket=hidden**2, prefetch_bucket=int(0.9 * hidden**2), persistence_threshold=10 * hidden)
