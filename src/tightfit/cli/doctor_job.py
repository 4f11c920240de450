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
from tightfit.messages import Said, bare, text
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


def _row(name: str, light: Light, what: Said, fix: Said | None = None, *commands: str) -> Row:
    return Row(id=name, group="job", light=light, what=what, fix=fix, commands=commands)


def _plan_row(check: JobCheck) -> Row:
    hardware = check.settled.hardware
    gpus = check.settled.job.hardware.gpus
    elsewhere = gpus is not None and gpus.strip().lower() != "this"
    where = f"{hardware.world} × {hardware.gpu.name}"
    where = text("cli.named-by-job", where=where) if elsewhere else where
    if check.plan is None:
        return _row(
            "plan", "red", text("cli.no-plan", value=str(check.problem).rstrip(".")), text("cli.change-what-names")
        )
    way = check.plan.chosen
    if way is None:
        return _row("plan", "red", text("cli.nothing-fits", where=where), way_out(check.plan, str(HOW_FAR)))
    need, have = way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes
    what = text(
        "cli.fits-gpu",
        name=check.settled.shape.name,
        where=where,
        levers=strategy_name(way.levers),
        need=gib(need),
        have=gib(have),
    )
    return _row("plan", "green", what)


def _weights(check: JobCheck) -> list[Row]:
    try:
        said = check_weights(check.settled.job)
    except UserError as error:
        return [_row("weights", "red", str(error), text("cli.name-model-weights"))]
    return [_row("weights", "green", bare(sentence)) for sentence in said]


# --- what starts it -----------------------------------------------------------------------------


def _launcher(check: JobCheck, found: Checkup) -> Row:
    """What the ranks could not start without."""
    if check.is_llamafactory and not _on_path("llamafactory-cli"):
        fix = text("cli.install-llama-factory-train")
        return _row("launcher", "yellow", text("cli.no-llamafactory"), fix, "pip install llamafactory")
    way = check.plan.chosen if check.plan is not None else None
    missing = [package for package in _list_packages(check, way) if not is_installed(package.replace("-", "_"))]
    if missing:
        extra = "qlora" if missing == ["bitsandbytes"] else "train"
        what = text("cli.job-needs-installed", missing=", ".join(missing))
        return _row("launcher", "red", what, text("cli.install-what-missing"), f"pip install 'tightfit[{extra}]'")
    there = [tool for tool in ("torchrun", "deepspeed", "accelerate") if _on_path(tool)]
    what = text("cli.ranks-start")
    if there:
        what = text("cli.ranks-start-and", what=what, tools=", ".join(there), n=len(there))
    return _row("launcher", "green", what)


def _list_packages(check: JobCheck, way: Way | None) -> list[str]:
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
        return _row("data", "green", text("cli.job-names-data"))
    if path.startswith("shipped:"):
        return _row("data", "green", text("cli.data-comes-tightfit", path=path))
    info, colon, _ = path.partition(".json:")
    path = f"{info}.json" if colon else path
    if not names_a_file(path):
        return _row("data", "green", text("cli.data-data-set", path=path))
    place = Path(path).expanduser()
    try:
        files = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.is_file())[:_MOST_FILES]
        size = sum(each.stat().st_size for each in files)
        closed = next((each for each in files if not os.access(each, os.R_OK)), None)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return _row("data", "red", text("cli.data-at-cannot", path=path, why=why), text("cli.see-data-path"))
    if closed is not None:
        return _row(
            "data", "red", text("cli.may-read", closed=closed), text("cli.give-yourself-right"), f"chmod u+r {closed}"
        )
    if not size:
        return _row("data", "red", text("cli.data-at-empty", path=path), text("cli.see-data-path"))
    return _row("data", "green", text("cli.data-at", path=path, count=len(files), size=gib(size)))


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
    what = text(
        "cli.checkpoint-takes-about",
        each=gib(each),
        keep_last=saving.keep_last,
        wanted=gib(wanted),
        free=gib(free),
        folder=check.folder,
    )
    if wanted <= free:
        return [_row("checkpoints", "green", what)]
    if each * 2 <= free:
        fix = text("cli.keep-fewer-keep", value=max(1, free // each - 1))
        return [_row("checkpoints", "yellow", what, fix)]
    return [_row("checkpoints", "red", what, text("cli.make-room-name"))]


def _room_now(check: JobCheck, found: Checkup) -> list[Row]:
    """Whether the plan fits beside what others hold at this moment."""
    way = check.plan.chosen if check.plan is not None else None
    gpus = check.settled.job.hardware.gpus
    if way is None or not found.cards.cards or (gpus is not None and gpus.strip().lower() != "this"):
        return []
    need = way.footprint.gpu.required_bytes
    free = [card for card in found.cards.cards if card.free_bytes is None or card.free_bytes >= need]
    wanted = way.hardware.gpus_per_node
    what = text("cli.gpus-free-needs", free=len(free), cards=len(found.cards.cards), need=gib(need), wanted=wanted)
    if len(free) >= wanted:
        return [_row("room-now", "green", what)]
    return [_row("room-now", "red", what, text("cli.wait-others-tightfit"))]
