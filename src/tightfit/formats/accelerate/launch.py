"""`accelerate launch`."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.formats.launch.environment import gpu_ids_of
from tightfit.formats.launch.script import or_stop
from tightfit.formats.target import Target
from tightfit.formats.worker.launch import WORKER, node_flag
from tightfit.formats.worker.write import require_way
from tightfit.messages import text
from tightfit.planner.plan import Plan


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
