"""accelerate's YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tightfit.formats.accelerate.check import DEEPSPEED_AT, KEYS, RULES, check_accelerate
from tightfit.formats.accelerate.write import accelerate_notes, accelerate_yaml
from tightfit.formats.dialect import Dialect, Launcher, PlanFile
from tightfit.formats.launch.environment import gpu_ids_of, launcher_of
from tightfit.formats.launch.script import or_stop
from tightfit.formats.rules import BESIDE_DEEPSPEED
from tightfit.formats.target import Target
from tightfit.formats.worker.write import WORKER, deepspeed_file_of, node_flag, require_way
from tightfit.job.known import KnownConfig, block_in, whole, word
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


def known(values: Mapping[str, Any]) -> KnownConfig:
    block = block_in(values, "deepspeed_config")
    precision = word(values.get("mixed_precision"))
    return KnownConfig(
        stage=whole(block.get("zero_stage")),
        offload_optimizer=word(block.get("offload_optimizer_device")),
        offload_param=word(block.get("offload_param_device")),
        accumulation=whole(block.get("gradient_accumulation_steps")),
        precision="fp32" if precision == "no" else precision,
        world=whole(values.get("num_processes")),
    )


FILE = "accelerate.yaml"


def write(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    if launcher_of(plan, target) != "accelerate":
        return None
    return accelerate_yaml(plan, target, deepspeed_file_of(plan))


def accelerate_command(plan: Plan, target: Target) -> Iterator[str]:
    way, ours = require_way(plan), plan.job.trainer == "tightfit"
    if not ours:
        yield f"(( $# > 0 )) {or_stop(text('launch.name-script'))}"
    yield "exec accelerate launch \\"
    yield "  --config_file accelerate.yaml \\"
    if way.hardware.gpu.vendor != "cpu" and target.gpu_ids is not None:
        yield f"  --gpu_ids {','.join(map(str, gpu_ids_of(plan, target)))} \\"
    if way.hardware.nodes > 1:
        yield f"  {node_flag('machine_rank', 'NODE_RANK')} {node_flag('main_process_ip', 'MASTER_ADDR')} \\"
        if not way.levers.is_fsdp2:
            yield "  --deepspeed_multinode_launcher standard \\"
    yield f'  --main_process_port "${{MASTER_PORT:-{target.port}}}" \\'
    yield f'  {WORKER} "$@"' if ours else '  "$@"'


DIALECT = Dialect(
    name="accelerate",
    title=Message("accelerate.title"),
    one=Message("accelerate.one"),
    keys=KEYS,
    telling=("distributed_type", "compute_environment", "deepspeed_config", "fsdp_config"),
    rules=BESIDE_DEEPSPEED | RULES,
    check=check_accelerate,
    known=known,
    deepspeed_at=DEEPSPEED_AT,
    files=(PlanFile(name=FILE, what=Message("accelerate.file"), write=write, notes=accelerate_notes),),
    launcher=Launcher(
        program="accelerate", reads=("worker.json", "deepspeed.json", FILE), needs=FILE, command=accelerate_command
    ),
)
