"""What starts a plan: `launch.sh`, and on several machines, or where it is asked for, the same for SLURM."""

from __future__ import annotations

from collections.abc import Collection

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.launch.environment import gpu_ids_of
from tightfit.formats.launch.hostfile import hostfile_text, hosts_for
from tightfit.formats.launch.script import launch_sh, slurm_sbatch
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


def write_hostfile(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    if not _is_spread(plan):
        return None
    hosts = hosts_for(target.hostfile, require_way(plan).hardware.nodes, gpu_ids_of(plan, target))
    head = "" if target.hostfile is not None else f"# {text('launch.placeholders')}\n"
    return head + hostfile_text(hosts)


def write_slurm(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    return slurm_sbatch(plan, target) if target.cluster == "slurm" or _is_spread(plan) else None


def _is_spread(plan: Plan) -> bool:
    """Whether it runs on several machines, by a launcher of ours."""
    return require_way(plan).hardware.nodes > 1 and plan.job.trainer != "trainer"


DIALECT = Dialect(
    name="launch",
    files=(
        PlanFile(name="hostfile", what=Message("launch.hostfile"), write=write_hostfile),
        PlanFile(name="launch.sh", what=Message("launch.script"), write=launch_sh),
        PlanFile(
            name="slurm.sbatch",
            what=Message("launch.same-under-slurm"),
            write=write_slurm,
        ),
    ),
)
