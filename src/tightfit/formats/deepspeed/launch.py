"""`deepspeed`, DeepSpeed's own launcher."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.formats.launch.environment import HIP, gpu_ids_of, obeys_visible
from tightfit.formats.launch.hostfile import hosts_for
from tightfit.formats.target import Target
from tightfit.formats.worker.launch import WORKER
from tightfit.formats.worker.write import require_way
from tightfit.messages import text
from tightfit.planner.plan import Plan


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
        yield from _slots(plan)
        where = '--include "localhost:$slots"'
    else:
        where = f'--include "localhost:{listed}"'
    yield f"# {text('launch.ends-at-once')}"
    yield "exec deepspeed \\"
    yield f"  {where} \\"
    yield f'  --master_port "${{MASTER_PORT:-{target.port}}}" --no_local_rank \\'
    yield f'  {WORKER} "$@"'


def _slots(plan: Plan) -> Iterator[str]:
    """The first of `gpus` as DeepSpeed's slots, in `slots`."""
    hardware = require_way(plan).hardware
    yield f"# {text('launch.handed-on')}"
    yield 'slots=""'
    yield f'for gpu in "${{gpus[@]:0:{hardware.gpus_per_node}}}"; do'
    yield '  [[ "$gpu" =~ ^[0-9]+$ && ",$slots," != *",$gpu,"* ]] ||'
    yield f'    {{ echo "launch.sh: {text("launch.numbers-only")}" >&2; exit 2; }}'
    yield '  slots="${slots:+$slots,}$gpu"'
    yield "done"
    if hardware.gpu.vendor in HIP:
        yield "unset HIP_VISIBLE_DEVICES"
