"""What starts a plan: `launch.sh`, and on several machines a hostfile and the same for SLURM."""

from __future__ import annotations

from collections.abc import Collection

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.launch.environment import gpu_ids_of
from tightfit.formats.launch.hostfile import hostfile_text, hosts_for
from tightfit.formats.launch.script import launch_sh
from tightfit.formats.launch.slurm import slurm_sbatch
from tightfit.formats.target import Target
from tightfit.formats.worker.write import chosen_way
from tightfit.planner.plan import Plan


def write_hostfile(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    if not _is_spread(plan):
        return None
    hosts = hosts_for(target.hostfile, chosen_way(plan).hardware.nodes, gpu_ids_of(plan, target))
    told = "" if target.hostfile is not None else "# Replace these names by those of your machines.\n"
    return told + hostfile_text(hosts)


def _is_spread(plan: Plan) -> bool:
    """Whether it runs on several machines, by a launcher of ours."""
    return chosen_way(plan).hardware.nodes > 1 and plan.job.trainer != "trainer"


DIALECT = Dialect(
    name="launch",
    files=(
        PlanFile(name="hostfile", what="the machines, for DeepSpeed's launcher", write=write_hostfile),
        PlanFile(name="launch.sh", what="starts the training", write=launch_sh),
        PlanFile(
            name="slurm.sbatch",
            what="the same under SLURM",
            write=lambda plan, target, _: slurm_sbatch(plan, target) if _is_spread(plan) else None,
        ),
    ),
)
