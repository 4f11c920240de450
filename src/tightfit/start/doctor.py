"""`tightfit doctor JOB`: whether a job can be started on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan import bounds_of, way_out
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import each_stage, read_request
from tightfit.formats.llamafactory.write import names_a_file
from tightfit.hardware.doctor import Checkup
from tightfit.hardware.doctor.row import Check, Light, gib
from tightfit.hardware.named import is_this
from tightfit.inputs.surroundings import is_installed
from tightfit.messages import Said, bare, say_why, text
from tightfit.planner.plan import Plan, Way
from tightfit.planner.saving import checkpoint_bytes
from tightfit.priced import strategy_name
from tightfit.start.train import HOW_FAR, answer_of, check_weights, packages_for, with_a_scan_that_runs
from tightfit.types import ConfigError, UserError

MOST_FILES = 2000  # of a data folder that are opened


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheck:
    """A job that was read, and the plan for it, or why none could be made."""

    settled: PlanInput
    folder: Path
    plan: Plan | str
    is_llamafactory: bool

    @property
    def way(self) -> Way | None:
        return None if isinstance(self.plan, str) else self.plan.chosen

    @property
    def is_for_here(self) -> bool:
        """Whether the job names no other cards than this machine's."""
        return is_this(self.settled.job.hardware.gpus)

    def rows(self, found: Checkup) -> list[Check]:
        """What is to be said about it on this machine."""
        rows = [_check_plan(self)]
        try:
            said = check_weights(self.settled.job)
            rows += [_row("weights", "green", bare(sentence)) for sentence in said]
        except UserError as error:
            rows.append(_row("weights", "red", str(error), text("cli.name-model-weights")))
        rows += [_check_launcher(self), _check_data(self.settled.job.data.path)]
        return [*rows, *_check_disk(self, found), *_check_room(self, found)]


def read(path: str, output: str | None) -> JobCheck:
    """A job file or a LLaMA-Factory YAML; what is wrong in it is the user's to mend."""
    request = read_request({"file": path} | ({"output": output} if output is not None else {}))
    request = next(iter(each_stage(request)), request)  # of several, the one that comes first
    settled = with_a_scan_that_runs(resolve_request(request, for_others=True))
    plan: Plan | str
    try:
        plan = answer_of(request, settled, bounds_of(settled.job, None, calibration_of(request, settled.job)))
    except ConfigError as error:
        plan = str(error)
    folder = Path(output or settled.job.saving.folder).expanduser().absolute()
    is_llamafactory = request.file is not None and request.file.is_llamafactory
    return JobCheck(settled=settled, folder=folder, plan=plan, is_llamafactory=is_llamafactory)


def _row(name: str, light: Light, what: Said, fix: Said | None = None, *commands: str) -> Check:
    return Check(id=name, group="job", light=light, what=what, fix=fix, commands=commands)


def _check_plan(check: JobCheck) -> Check:
    hardware, way = check.settled.hardware, check.way
    where = f"{hardware.world} × {hardware.gpu.name}"
    where = where if check.is_for_here else text("cli.named-by-job", where=where)
    if isinstance(check.plan, str):
        problem = text("cli.no-plan", value=check.plan.rstrip("."))
        return _row("plan", "red", problem, text("cli.change-what-names"))
    if way is None:
        return _row("plan", "red", text("cli.nothing-fits", where=where), way_out(check.plan, str(HOW_FAR)))
    sizes = {"need": gib(way.footprint.gpu.required_bytes), "have": gib(way.hardware.gpu.memory_bytes)}
    about = {"name": check.settled.shape.name, "where": where, "levers": strategy_name(way.levers)}
    return _row("plan", "green", text("cli.fits-gpu", **about, **sizes))


def _check_launcher(check: JobCheck) -> Check:
    """What the ranks could not start without."""

    def on_path(tool: str) -> bool:
        return shutil.which(tool) is not None or (Path(sys.executable).parent / tool).is_file()

    if check.is_llamafactory and not on_path("llamafactory-cli"):
        fix = text("cli.install-llama-factory-train")
        return _row("launcher", "yellow", text("cli.no-llamafactory"), fix, "pip install llamafactory")
    job, engine = check.settled.job, check.way.levers.engine if check.way else None
    missing = [name for name in packages_for(engine, job.method, job.optimizer) if not is_installed(name)]
    if missing:
        extra = "qlora" if missing == ["bitsandbytes"] else "train"
        what = text("cli.job-needs-installed", missing=", ".join(missing))
        return _row("launcher", "red", what, text("cli.install-what-missing"), f"pip install 'tightfit[{extra}]'")
    there = [tool for tool in ("torchrun", "deepspeed", "accelerate") if on_path(tool)]
    what = text("cli.ranks-start")
    if there:
        what = text("cli.ranks-start-and", what=what, tools=", ".join(there), n=len(there))
    return _row("launcher", "green", what)


def _check_data(path: str | None) -> Check:
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
        files = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.is_file())[:MOST_FILES]
        size = sum(each.stat().st_size for each in files)
        closed = next((each for each in files if not os.access(each, os.R_OK)), None)
    except OSError as error:
        return _row("data", "red", text("cli.data-at-cannot", path=path, why=say_why(error)), text("cli.see-data-path"))
    if closed is not None:
        fix = text("cli.give-yourself-right")
        return _row("data", "red", text("cli.may-read", closed=closed), fix, f"chmod u+r {closed}")
    if not size:
        return _row("data", "red", text("cli.data-at-empty", path=path), text("cli.see-data-path"))
    return _row("data", "green", text("cli.data-at", path=path, count=len(files), size=gib(size)))


def _check_disk(check: JobCheck, found: Checkup) -> list[Check]:
    """The newest one stays while the next is written."""
    way, free, saving = check.way, found.free_disk_bytes, check.settled.job.saving
    if way is None or free is None or (saving.every_steps is None and saving.every_minutes is None):
        return []
    each = checkpoint_bytes(check.settled.job, way)
    wanted = each * (saving.keep_last + 1)
    sizes = {"each": gib(each), "wanted": gib(wanted), "free": gib(free)}
    what = text("cli.checkpoint-takes-about", keep_last=saving.keep_last, folder=check.folder, **sizes)
    if wanted <= free:
        return [_row("checkpoints", "green", what)]
    if each * 2 <= free:
        return [_row("checkpoints", "yellow", what, text("cli.keep-fewer-keep", value=max(1, free // each - 1)))]
    return [_row("checkpoints", "red", what, text("cli.make-room-name"))]


def _check_room(check: JobCheck, found: Checkup) -> list[Check]:
    """Whether the plan fits beside what others hold at this moment."""
    way, cards = check.way, found.cards.cards
    if way is None or not cards or not check.is_for_here:
        return []
    need, wanted = way.footprint.gpu.required_bytes, way.hardware.gpus_per_node
    free = sum(card.free_bytes is None or card.free_bytes >= need for card in cards)
    what = text("cli.gpus-free-needs", free=free, cards=len(cards), need=gib(need), wanted=wanted)
    if free >= wanted:
        return [_row("room-now", "green", what)]
    return [_row("room-now", "red", what, text("cli.wait-others-tightfit"))]
