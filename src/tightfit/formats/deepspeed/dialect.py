"""DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tightfit.formats.deepspeed.check import RULES, check_deepspeed
from tightfit.formats.deepspeed.keys import KEYS, REMOVED
from tightfit.formats.deepspeed.write import deepspeed_json, deepspeed_notes
from tightfit.formats.dialect import Dialect, Launcher, PlanFile
from tightfit.formats.launch.environment import HIP, gpu_ids_of, obeys_visible
from tightfit.formats.launch.hostfile import hosts_for
from tightfit.formats.target import Target
from tightfit.formats.worker.write import DEEPSPEED_FILE, WORKER, deepspeed_file_of, require_way
from tightfit.job.known import KnownConfig, block_in, whole, word
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


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


def deepspeed_command(plan: Plan, target: Target) -> Iterator[str]:
    hardware, ids = require_way(plan).hardware, gpu_ids_of(plan, target)
    listed = ",".join(map(str, ids))
    hosts = hosts_for(target.hostfile, hardware.nodes, ids) if hardware.nodes > 1 else ()
    if hosts and target.gpu_ids is None:
        where = f"--hostfile hostfile --num_nodes {hardware.nodes} --num_gpus {hardware.gpus_per_node}"
    elif hosts:
        if target.hostfile is None:
            yield f"# {text('launch.replace-both')}"
        include = "@".join(f"{name}:{listed}" for name, _ in hosts)
        where = f'--hostfile hostfile --include "{include}"'
    elif obeys_visible(plan, target, "deepspeed"):
        # the first of `gpus` as DeepSpeed's slots, in `slots`
        yield f"# {text('launch.handed-on')}"
        yield 'slots=""'
        yield f'for gpu in "${{gpus[@]:0:{hardware.gpus_per_node}}}"; do'
        yield '  [[ "$gpu" =~ ^[0-9]+$ && ",$slots," != *",$gpu,"* ]] ||'
        yield f'    {{ echo "launch.sh: {text("launch.numbers-only")}" >&2; exit 2; }}'
        yield '  slots="${slots:+$slots,}$gpu"'
        yield "done"
        if hardware.gpu.vendor in HIP:
            yield "unset HIP_VISIBLE_DEVICES"
        where = '--include "localhost:$slots"'
    else:
        where = f'--include "localhost:{listed}"'
    yield f"# {text('launch.ends-at-once')}"
    yield "exec deepspeed \\"
    yield f"  {where} \\"
    yield f'  --master_port "${{MASTER_PORT:-{target.port}}}" --no_local_rank \\'
    yield f'  {WORKER} "$@"'


DIALECT = Dialect(
    name="deepspeed",
    title=Message("deepspeed.title"),
    one=Message("deepspeed.one"),
    keys=KEYS[""] | REMOVED,
    telling=("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    rules=RULES,
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
