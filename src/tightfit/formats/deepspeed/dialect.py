"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.formats.deepspeed.check import check_deepspeed
from tightfit.formats.deepspeed.keys import KEYS, REMOVED
from tightfit.formats.deepspeed.launch import deepspeed_command
from tightfit.formats.deepspeed.rules import CHECKED
from tightfit.formats.deepspeed.write import deepspeed_json, deepspeed_notes
from tightfit.formats.dialect import Dialect, Launcher, PlanFile
from tightfit.formats.worker.write import DEEPSPEED_FILE, deepspeed_file_of
from tightfit.job.known import KnownConfig, block_in, whole, word
from tightfit.messages import Message


def known(values: Mapping[str, Any]) -> KnownConfig:
    zero = block_in(values, "zero_optimization")
    optimizer, weights = block_in(zero, "offload_optimizer"), block_in(zero, "offload_param")
    pinned = [block["pin_memory"] for block in (optimizer, weights) if isinstance(block.get("pin_memory"), bool)]
    enabled = [name for name in ("bf16", "bfloat16", "fp16") if block_in(values, name).get("enabled") is True]
    return KnownConfig(
        stage=whole(zero.get("stage")),
        offload_optimizer=word(optimizer.get("device")) or ("none" if zero else None),
        offload_param=word(weights.get("device")) or ("none" if zero else None),
        pin_memory=any(pinned) if pinned else None,
        micro_batch=whole(values.get("train_micro_batch_size_per_gpu")),
        accumulation=whole(values.get("gradient_accumulation_steps")),
        precision=None if not enabled else "fp16" if enabled[0] == "fp16" else "bf16",
    )


DIALECT = Dialect(
    name="deepspeed",
    title=Message("deepspeed.title"),
    one=Message("deepspeed.one"),
    keys=KEYS[""] | REMOVED,
    telling=("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    rules=CHECKED,
    check=check_deepspeed,
    known=known,
    files=(
        PlanFile(
            name=DEEPSPEED_FILE,
            what=Message("deepspeed.file"),
            write=lambda plan, target, _: deepspeed_json(plan, target) if deepspeed_file_of(plan) else None,
            notes=deepspeed_notes,
            version=lambda plan, target: f"DeepSpeed {target.deepspeed_version}",
        ),
    ),
    launcher=Launcher(
        program="deepspeed", reads=("worker.json", DEEPSPEED_FILE, "hostfile"), command=deepspeed_command
    ),
)
