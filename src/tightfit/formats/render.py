"""A plan becomes files that other programs read. `render` makes the texts; `write.py` puts them on disk.

A file that cannot say what the plan says is left out, and PLAN.md says why; unless it is the one that the
launcher starts from, or DeepSpeed's own, without which there is nothing to start: then it is an error.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.formats.accelerate.write import accelerate_yaml
from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.huggingface.write import training_args_json
from tightfit.formats.launch.environment import gpu_ids_of, launcher_of
from tightfit.formats.launch.hostfile import hostfile_text, hosts_for
from tightfit.formats.launch.script import NEEDS, launch_sh
from tightfit.formats.launch.slurm import slurm_sbatch
from tightfit.formats.llamafactory.write import dataset_info_json, llamafactory_yaml, names_its_data
from tightfit.formats.plan_md import plan_md
from tightfit.formats.target import Target
from tightfit.formats.under import check_fits_under
from tightfit.formats.worker.write import DEEPSPEED_FILE, chosen_way, worker_json
from tightfit.planner.plan import Plan
from tightfit.types import ConfigError


def render(plan: Plan, target: Target) -> dict[str, str]:
    """Every file of a plan, by name."""
    way = chosen_way(plan)
    files: dict[str, str] = {}
    left_out: dict[str, str] = {}
    needed = {NEEDS[launcher_of(plan, target)], *(("training_args.json",) if plan.job.trainer == "trainer" else ())}

    def add(name: str, text: Callable[[], str]) -> None:
        try:
            files[name] = text()
        except ConfigError as error:
            if name in needed:
                raise
            left_out[name] = str(error)

    def training_args() -> str:
        check_fits_under("trainer", plan, target)
        return training_args_json(plan, target, deepspeed_file)

    def llamafactory() -> str:
        text = llamafactory_yaml(plan, target, deepspeed_file)
        check_fits_under("llamafactory", plan, target)
        return text

    deepspeed_file, trainer = None, plan.job.trainer
    if not way.levers.is_fsdp2:
        deepspeed_file = DEEPSPEED_FILE
        files[deepspeed_file] = deepspeed_json(plan, target)
    if trainer != "llamafactory":
        add("accelerate.yaml", lambda: accelerate_yaml(plan, target, deepspeed_file))
        add("training_args.json", training_args)
    if trainer != "trainer":
        add("llamafactory.yaml", llamafactory)
    if "llamafactory.yaml" in files and not names_its_data(plan, target):
        files["dataset_info.json"] = dataset_info_json(plan)
    if trainer == "tightfit":
        files["worker.json"] = worker_json(plan)
    if way.hardware.nodes > 1 and trainer != "trainer":
        files["hostfile"] = _hostfile(plan, target)
        files["slurm.sbatch"] = slurm_sbatch(plan, target)
    files["launch.sh"] = launch_sh(plan, target, files)
    files["PLAN.md"] = plan_md(plan, target, files, left_out)
    return files


def _hostfile(plan: Plan, target: Target) -> str:
    hosts = hosts_for(target.hostfile, chosen_way(plan).hardware.nodes, gpu_ids_of(plan, target))
    told = "" if target.hostfile is not None else "# Replace these names by those of your machines.\n"
    return told + hostfile_text(hosts)
