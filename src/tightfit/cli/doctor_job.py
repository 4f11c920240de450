"""`tightfit doctor JOB`: whether a job can be started on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tightfit.cli.train_pins import check_weights, with_a_scan_that_runs
from tightfit.cli.train_request import HOW_FAR, answer_of
from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan_files import startable_of, way_out
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import read_request
from tightfit.desk.stages import each_stage
from tightfit.hardware.doctor import Checkup
from tightfit.hardware.doctor.row import Light, Row, gib
from tightfit.inputs.surroundings import is_installed
from tightfit.messages import bare
from tightfit.planner.plan import Plan, Way
from tightfit.priced import strategy_name
from tightfit.types import ConfigError, UserError

_MOST_FILES = 2000
"""Of a data folder that are opened."""
_ADAM_BYTES = 8
"""Of Adam's two moments, a parameter; those that are kept in 8 bits are saved in fp32 as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheck:
    """A job that was read, and the plan for it; None: no plan could be made, for the reason given."""

    settled: PlanInput
    folder: Path
    plan: Plan | None
    problem: str | None
    is_llamafactory: bool

    def rows(self, found: Checkup) -> list[Row]:
        """What is to be said about it on this machine."""
        return [
            _plan_row(self),
            *_weights(self),
            _launcher(self, found),
            _data(self.settled),
            *_disk(self, found),
            *_room_now(self, found),
        ]


def read(path: str, output: str | None) -> JobCheck:
    """A job file or a LLaMA-Factory YAML; what is wrong in it is the user's to mend."""
    request = read_request({"file": path} | ({"output": output} if output is not None else {}))
    request = next(iter(each_stage(request)), request)  # of several, the one that comes first
    settled = resolve_request(request, for_others=True)
    settled = with_a_scan_that_runs(settled, on_gpu=settled.hardware.gpu.vendor != "cpu")
    folder = Path(output or settled.job.saving.folder).expanduser().absolute()
    plan: Plan | None = None
    problem: str | None = None
    try:
        startable = startable_of(settled.job, None, calibration_of(request, settled.job))
        plan = answer_of(request, settled, startable, every_gpu=False)
    except ConfigError as error:
        problem = str(error)
    is_llamafactory = request.file is not None and request.file.is_llamafactory
    return JobCheck(settled=settled, folder=folder, plan=plan, problem=problem, is_llamafactory=is_llamafactory)


def _row(name: str, light: Light, what: str, fix: str | None = None, *commands: str) -> Row:
    return Row(id=name, group="job", light=light, what=what, fix=fix, commands=commands)


def _plan_row(check: JobCheck) -> Row:
    hardware = check.settled.hardware
    gpus = check.settled.job.hardware.gpus
    elsewhere = gpus is not None and gpus.strip().lower() != "this"
    where = f"{hardware.world} × {hardware.gpu.name}" + (" (named by the job)" if elsewhere else "")
    if check.plan is None:
        return _row("plan", "red", f"no plan: {str(check.problem).rstrip('.')}", "change what it names in the job file")
    way = check.plan.chosen
    if way is None:
        return _row("plan", "red", f"nothing fits {where}", way_out(check.plan, HOW_FAR))
    need, have = way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes
    what = f"{check.settled.shape.name} fits {where} as {strategy_name(way.levers)}: {gib(need)} of {gib(have)} a GPU"
    return _row("plan", "green", what)


def _weights(check: JobCheck) -> list[Row]:
    try:
        said = check_weights(check.settled.job)
    except UserError as error:
        return [_row("weights", "red", str(error), "name a model that has weights")]
    return [_row("weights", "green", bare(sentence)) for sentence in said]


# --- what starts it -----------------------------------------------------------------------------


def _launcher(check: JobCheck, found: Checkup) -> Row:
    """What the ranks could not start without."""
    if check.is_llamafactory and not _on_path("llamafactory-cli"):
        fix = "install LLaMA-Factory, or train with `tightfit train`, which reads the same file"
        return _row("launcher", "yellow", "llamafactory-cli is not on PATH", fix, "pip install llamafactory")
    way = check.plan.chosen if check.plan is not None else None
    missing = [package for package in _needed(check, way) if not is_installed(package.replace("-", "_"))]
    if missing:
        extra = "qlora" if missing == ["bitsandbytes"] else "train"
        what = f"the job needs {', '.join(missing)}, not installed here"
        return _row("launcher", "red", what, "install what is missing", f"pip install 'tightfit[{extra}]'")
    there = [tool for tool in ("torchrun", "deepspeed", "accelerate") if _on_path(tool)]
    also = f"; {', '.join(there)} {'is' if len(there) == 1 else 'are'} there for other launches" if there else ""
    return _row(
        "launcher", "green", f"`tightfit train` starts the ranks itself, and what they import is installed{also}"
    )


def _needed(check: JobCheck, way: Way | None) -> list[str]:
    job = check.settled.job
    needed = ["torch", "transformers"]
    needed += ["deepspeed"] if way is None or not way.levers.is_fsdp2 else []
    needed += ["peft"] if job.method != "full" else []
    needed += ["bitsandbytes"] if job.method == "qlora" or "8bit" in job.optimizer else []
    return needed


def _on_path(tool: str) -> bool:
    return shutil.which(tool) is not None or (Path(sys.executable).parent / tool).is_file()


# --- what it reads and writes -------------------------------------------------------------------


def _data(settled: PlanInput) -> Row:
    from tightfit.formats.llamafactory.write import names_a_file

    path = settled.job.data.path
    if path is None:
        return _row("data", "green", "the job names no data: it trains on generated samples")
    if path.startswith("shipped:"):
        return _row("data", "green", f"the data is {path}, which comes with tightfit")
    info, colon, _ = path.partition(".json:")
    path = f"{info}.json" if colon else path
    if not names_a_file(path):
        return _row("data", "green", f"the data is {path}: a data set's name, which is looked for when it starts")
    place = Path(path).expanduser()
    try:
        files = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.is_file())[:_MOST_FILES]
        size = sum(each.stat().st_size for each in files)
        closed = next((each for each in files if not os.access(each, os.R_OK)), None)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return _row("data", "red", f"the data at {path} cannot be read: {why}", "see that data.path names it rightly")
    if closed is not None:
        return _row("data", "red", f"{closed} may not be read", "give yourself the right to", f"chmod u+r {closed}")
    if not size:
        return _row("data", "red", f"the data at {path} is empty", "see that data.path names it rightly")
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    return _row("data", "green", f"the data at {path}: {count}, {gib(size)}")


def checkpoint_bytes(settled: PlanInput, way: Way) -> int:
    """About what one checkpoint takes: weights as they train, fp32 copies and the optimizer's moments."""
    job, trained = settled.job, way.footprint.trainable_parameters
    width = 4 if way.levers.precision == "fp32" else 2
    weights = settled.shape.parameters * width if job.method == "full" else trained * width
    masters = trained * 4 if job.master_weights and width == 2 else 0
    return weights + masters + (trained * _ADAM_BYTES if "adam" in job.optimizer else 0)


def _disk(check: JobCheck, found: Checkup) -> list[Row]:
    """The newest one stays while the next is written."""
    way = check.plan.chosen if check.plan is not None else None
    free = found.free_disk_bytes
    saving = check.settled.job.saving
    if way is None or free is None or (saving.every_steps is None and saving.every_minutes is None):
        return []
    each = checkpoint_bytes(check.settled, way)
    wanted = each * (saving.keep_last + 1)
    what = (
        f"a checkpoint takes about {gib(each)}; {saving.keep_last} that stay and one in the making take {gib(wanted)} "
        f"of the {gib(free)} free at {check.folder}"
    )
    if wanted <= free:
        return [_row("checkpoints", "green", what)]
    if each * 2 <= free:
        fix = f"keep fewer with keep_last: {max(1, free // each - 1)}, or make room"
        return [_row("checkpoints", "yellow", what, fix)]
    return [_row("checkpoints", "red", what, "make room, or name a folder on a larger disk with saving.folder")]


def _room_now(check: JobCheck, found: Checkup) -> list[Row]:
    """Whether the plan fits beside what others hold at this moment."""
    way = check.plan.chosen if check.plan is not None else None
    gpus = check.settled.job.hardware.gpus
    if way is None or not found.cards.cards or (gpus is not None and gpus.strip().lower() != "this"):
        return []
    need = way.footprint.gpu.required_bytes
    free = [card for card in found.cards.cards if card.free_bytes is None or card.free_bytes >= need]
    wanted = way.hardware.gpus_per_node
    what = f"{len(free)} of {len(found.cards.cards)} GPUs have the {gib(need)} free that it needs on {wanted}"
    if len(free) >= wanted:
        return [_row("room-now", "green", what)]
    return [_row("room-now", "red", what, "wait for the others with `tightfit train --wait-for-gpu`")]
