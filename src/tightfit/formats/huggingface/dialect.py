"""transformers' TrainingArguments, in a JSON or a YAML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.huggingface.check import DEEPSPEED_AT, IN_ANY_TRAINER, RULES, check_training_arguments, is_trls
from tightfit.formats.huggingface.write import training_args_json, training_args_notes, transformers_wanted
from tightfit.formats.rules import BESIDE_DEEPSPEED
from tightfit.formats.target import Target
from tightfit.formats.worker.write import deepspeed_file_of
from tightfit.job.known import KnownConfig, whole
from tightfit.job.training import OLDER_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from tightfit.messages import Message
from tightfit.planner.plan import Plan


def known(values: Mapping[str, Any]) -> KnownConfig:
    on = values.get("gradient_checkpointing")
    lengths = (values.get(name) for name in ("cutoff_len", "max_length", "max_seq_length"))
    return KnownConfig(
        micro_batch=whole(values.get("per_device_train_batch_size")),
        accumulation=whole(values.get("gradient_accumulation_steps")),
        sequence=next((number for value in lengths if (number := whole(value)) is not None), None),
        precision="bf16" if values.get("bf16") is True else "fp16" if values.get("fp16") is True else None,
        checkpointing=on if isinstance(on, bool) else None,
        loss="fused" if values.get("use_liger_kernel") is True else None,
    )


def write(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    return training_args_json(plan, target, deepspeed_file_of(plan))


DIALECT = Dialect(
    name="huggingface",
    trainer="trainer",
    title=Message("huggingface.title"),
    one=Message("huggingface.one"),
    keys=TRAINING_ARGUMENTS | OLDER_TRAINING_ARGUMENTS,
    telling=("output_dir", "per_device_train_batch_size"),
    claims=is_trls,
    is_mixed=True,
    rules=BESIDE_DEEPSPEED | RULES | IN_ANY_TRAINER,
    check=check_training_arguments,
    known=known,
    deepspeed_at=DEEPSPEED_AT,
    files=(
        PlanFile(
            name="training_args.json",
            what=Message("huggingface.file"),
            write=write,
            notes=training_args_notes,
            version=transformers_wanted,
        ),
    ),
)
