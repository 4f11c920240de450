"""What a user's own config file says, as far as it decides which fixes are open: any trainer's, or a job file.

Nothing is checked here; `tightfit lint` does that. A value that cannot be read is one that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.diagnose.evidence import KnownConfig, completed
from tightfit.formats.document import Document, read_document
from tightfit.formats.kinds import kind_of
from tightfit.job.training import translate
from tightfit.types import UserError


def known_from_file(path: Path) -> KnownConfig:
    """The settings in a DeepSpeed, accelerate, LLaMA-Factory or Trainer config, or in a job file."""
    document = read_document(path)
    kind = kind_of(document)
    readers = {
        "deepspeed": _deepspeed,
        "accelerate": _accelerate,
        "llamafactory": _trainer,
        "huggingface": _trainer,
        "job": _job,
    }
    known = readers[kind](document.values)
    beside = _beside(document)
    if beside is not None:
        known = completed(known, beside)
    return replace(known, trainer=kind, file=document.shown_path)


def _deepspeed(values: Mapping[str, Any]) -> KnownConfig:
    zero = _block(values, "zero_optimization")
    optimizer, weights = _block(zero, "offload_optimizer"), _block(zero, "offload_param")
    pinned = [block["pin_memory"] for block in (optimizer, weights) if isinstance(block.get("pin_memory"), bool)]
    return KnownConfig(
        stage=_number(zero.get("stage")),
        offload_optimizer=_word(optimizer.get("device")) or ("none" if zero else None),
        offload_param=_word(weights.get("device")) or ("none" if zero else None),
        pin_memory=any(pinned) if pinned else None,
        micro_batch=_number(values.get("train_micro_batch_size_per_gpu")),
        accumulation=_number(values.get("gradient_accumulation_steps")),
        precision=_deepspeed_precision(values),
    )


def _deepspeed_precision(values: Mapping[str, Any]) -> str | None:
    for name in ("bf16", "bfloat16", "fp16"):
        if _block(values, name).get("enabled") is True:
            return "fp16" if name == "fp16" else "bf16"
    return None


def _accelerate(values: Mapping[str, Any]) -> KnownConfig:
    block = _block(values, "deepspeed_config")
    precision = _word(values.get("mixed_precision"))
    return KnownConfig(
        stage=_number(block.get("zero_stage")),
        offload_optimizer=_word(block.get("offload_optimizer_device")),
        offload_param=_word(block.get("offload_param_device")),
        accumulation=_number(block.get("gradient_accumulation_steps")),
        precision="fp32" if precision == "no" else precision,
        world=_number(values.get("num_processes")),
    )


def _trainer(values: Mapping[str, Any]) -> KnownConfig:
    """LLaMA-Factory's keys, or TrainingArguments; the first know more."""
    off = values.get("disable_gradient_checkpointing")
    on = values.get("gradient_checkpointing")
    if on is None and "finetuning_type" in values:
        on = off is not True  # LLaMA-Factory's default
    method = _word(values.get("finetuning_type"))
    if method is not None:
        method = "qlora" if method == "lora" and values.get("quantization_bit") else method
    liger = values.get("enable_liger_kernel", values.get("use_liger_kernel"))
    lengths = (values.get(name) for name in ("cutoff_len", "max_length", "max_seq_length"))
    return KnownConfig(
        micro_batch=_number(values.get("per_device_train_batch_size")),
        accumulation=_number(values.get("gradient_accumulation_steps")),
        sequence=next((number for value in lengths if (number := _number(value)) is not None), None),
        precision="bf16" if values.get("bf16") is True else "fp16" if values.get("fp16") is True else None,
        method=method if method in ("full", "lora", "qlora") else None,
        checkpointing=on if isinstance(on, bool) else None,
        attention=_word(values.get("flash_attn")),
        loss="fused" if liger is True else None,
    )


def _job(values: Mapping[str, Any]) -> KnownConfig:
    with suppress(UserError):  # what is wrong in it is the job's own reader's to say
        values = translate(values, "").tree
    levers = _block(values, "levers")
    engine = _word(levers.get("engine")) or ""
    recompute = levers.get("checkpointing")
    return KnownConfig(
        stage=int(engine[-1]) if engine[:-1] == "zero" and engine[-1].isdigit() else None,
        offload_optimizer=_word(levers.get("offload_optimizer")),
        offload_param=_word(levers.get("offload_param")),
        micro_batch=_number(levers.get("micro_batch")),
        accumulation=_number(levers.get("accum")),
        sequence=_number(values.get("sequence")),
        precision=_word(values.get("precision")),
        method=_word(values.get("method")),
        checkpointing=None if recompute is None else recompute != "none",
        attention=_word(levers.get("attention")),
        loss=_word(levers.get("loss")),
    )


def _beside(document: Document) -> KnownConfig | None:
    """Of the DeepSpeed file that a trainer's config names, or holds."""
    named = document.values.get("deepspeed")
    if named is None:
        named = _block(document.values, "deepspeed_config").get("deepspeed_config_file")
    if isinstance(named, dict):
        return _deepspeed(named)
    if not isinstance(named, str):
        return None
    for place in (Path(named), document.path.parent / named, document.path.parent / Path(named).name):
        try:
            return _deepspeed(read_document(place).values)
        except UserError:
            continue
    return None


def _block(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _word(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and value.lower() != "auto" else None
