"""What `tightfit train` brings to its supervisor: how the training is started, and how else it could be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tightfit.cli.train_machine import Busy, check_free, reservations, wait_while_busy
from tightfit.cli.train_report import learn
from tightfit.cli.train_request import Ready, rendered, target_of_run
from tightfit.cli.train_written import read_written_plan
from tightfit.desk.calibration import Calibrations, calibration_of
from tightfit.desk.plan_files import startable_of
from tightfit.desk.request import Request
from tightfit.diagnose.verdict import Verdict
from tightfit.formats.plan_folder import write
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.catalogue import native_bf16
from tightfit.hardware.occupancy import occupancy
from tightfit.inputs.surroundings import cache_folder
from tightfit.messages import Listing, Message, Said, text
from tightfit.planner import plan_within
from tightfit.planner.calibration import Entry, phase_bytes
from tightfit.planner.lever_changes import lever_changes
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.step_down import NoWay, Shortfall, StepDown, Tried, locate, step_down
from tightfit.priced import strategy_name
from tightfit.runs.calibration import learn_from_failure
from tightfit.runs.cause import config_of_plan
from tightfit.runs.launch import Meeting, RankStart, Sight, launcher_start, rank_starts, worker_command
from tightfit.runs.own import Changed, Refused
from tightfit.runs.records import RunFolder, worker_file
from tightfit.runs.run import Outcome
from tightfit.types import UserError

WAITS_S = 60.0
"""For room on a GPU, where nobody said --wait-for-gpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What is the same for all attempts of a run."""

    options: tuple[str, ...]
    """Of the worker."""
    worker: tuple[str, ...]
    """What starts one rank."""
    meet: Callable[[Ready], Meeting]
    """Writes down what a plan takes of this machine, and says where its ranks meet."""
    patient: bool
    """Whether to wait for as long as others hold the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan that may be the next one, and what it steps down from."""

    plan: Plan
    tried: Tried | None = None
    bounds: Bounds
    """With what the failed attempt has measured."""
    entry: Entry | None = None
    """That measurement, for later plans."""


class TrainCourse:
    """How the training is computed at present: changes when the supervisor takes another plan."""

    def __init__(self, request: Request, ready: Ready, folder: RunFolder, manner: Manner) -> None:
        """`folder`: where this node keeps plan and logs."""
        self._request, self.ready, self._folder, self._manner = request, ready, folder, manner
        self._target = target_of_run(request, ready.nodes)
        self.bounds = Bounds()
        """What the next plan is searched within, with all that attempts have measured so far."""
        if ready.plan is not None:
            self._set_bounds(ready.plan)
        self._tried: list[Tried] = []
        self._found: FoundPlan | None = None

    def _set_bounds(self, plan: Plan) -> None:
        startable = startable_of(plan.job, self._target, calibration_of(self._request, plan.job))
        self.bounds = startable.bounds(every_gpu=self.ready.nodes.count > 1)

    def _last(self, otherwise: str) -> Plan | Refused:
        """What ran last. A plan that was written before is read back when it is needed; `otherwise`: what to type."""
        if self.ready.plan is not None:
            return self.ready.plan
        try:
            plan = read_written_plan(self._folder.plan)
        except UserError as error:
            return Refused(because=f"{error}: {otherwise}")
        self._set_bounds(plan)
        self.ready = replace(self.ready, plan=plan)
        return plan

    @property
    def words(self) -> str:
        known = config_of_plan(self._folder.plan)
        plan = self.ready.plan
        way = self.ready.worker.engine if plan is None or plan.chosen is None else strategy_name(plan.chosen.levers)
        return text(
            "cli.micro-batch-2",
            way=way,
            micro_batch=known.micro_batch,
            accumulation=known.accumulation,
            ranks=self.ranks,
        )

    @property
    def ranks(self) -> int:
        return self.ready.worker.ranks

    @property
    def effective_batch(self) -> int | None:
        known = config_of_plan(self._folder.plan)
        if known.micro_batch is None or known.accumulation is None:
            return None
        return known.micro_batch * known.accumulation * self.ranks

    @property
    def precision(self) -> str:
        return config_of_plan(self._folder.plan).precision or ""

    def starts(self, options: Sequence[str]) -> Sequence[RankStart]:
        meeting, every = self._manner.meet(self.ready), (*self._manner.options, *options)
        if self.ready.nodes.hostfile is not None:
            return [launcher_start(self._folder, meeting, every)]
        devices = self.ready.devices
        words = None if not devices else tuple(device.word for device in devices)
        taken = {key for entry in reservations().live() for key in entry.gpus} - {device.key for device in devices}
        sight = Sight(variable=self.ready.occupancy.variable, words=words, others=len(taken))
        command = worker_command(self._folder, every, self._manner.worker)
        return rank_starts(self.ready.worker, meeting, sight, self._folder, command)

    def learn(self, outcome: Outcome) -> None:
        self.bounds = learn(self.ready.plan, outcome.tally, self.bounds)

    # --- another plan ---------------------------------------------------------------------------

    def smaller(self, shortfall: Shortfall, verdict: Verdict) -> Changed | Refused:
        last = self._last(text("cli.plan-again-less"))
        if isinstance(last, Refused):
            return last
        assert last.chosen is not None, "what has no way was never started"
        shortfall = locate(shortfall, last.chosen)
        bounds, entry = self._learn(last, shortfall, verdict)
        found = step_down(last, shortfall, bounds=bounds, before=tuple(self._tried))
        if isinstance(found, NoWay) and shortfall.phase is not None:
            # Less at the highest peak leaves more in one piece, also for a phase that no lever makes smaller.
            whole = replace(shortfall, phase=None)
            elsewhere = step_down(last, whole, bounds=bounds, before=tuple(self._tried))
            found, shortfall = (found, shortfall) if isinstance(elsewhere, NoWay) else (elsewhere, whole)
        if isinstance(found, NoWay):
            return Refused(because=_together(found.because), puzzling=_puzzling(last.chosen, shortfall))
        tried = Tried(way=last.chosen, shortfall=shortfall)
        self._found = FoundPlan(plan=found.plan, tried=tried, bounds=bounds, entry=entry)
        return self._describe_change(last.chosen, found)

    def in_bf16(self) -> Changed | Refused:
        last = self._last(text("cli.plan-again-tightfit"))
        if isinstance(last, Refused):
            return last
        assert last.chosen is not None, "what has no way was never started"
        if native_bf16(last.hardware.gpu.arch) is False:
            return Refused(because=text("cli.bf16-own-use", name=last.hardware.gpu.name))
        job = replace(last.job, precision="bf16", effective_batch=last.effective_batch)
        found = plan_within(self.bounds, job, last.shape, last.hardware)
        if found.chosen is None:
            return Refused(because=text("cli.plan-bf16-fits"))
        self._found = FoundPlan(plan=found, bounds=self.bounds)
        changed = ("precision fp16 → bf16", *lever_changes(last.chosen, found.chosen))
        return Changed(because=text("cli.fp16-overflowed-bf16"), changed=changed, another_job=True)

    def take(self) -> None:
        found = self._found
        assert found is not None
        plan = found.plan
        files = rendered(plan, plan.job, self._target)
        worker = worker_file(files[WORKER_FILE], WORKER_FILE)
        write(files, self._folder.plan, force=True)
        devices = self.ready.devices[: worker.gpus_per_node]
        self.ready = replace(self.ready, plan=plan, files=files, worker=worker, devices=devices)
        self._tried += [] if found.tried is None else [found.tried]
        self.bounds = found.bounds
        if found.entry is not None:
            Calibrations(cache_folder()).add(found.entry)

    def _learn(self, last: Plan, shortfall: Shortfall, verdict: Verdict) -> tuple[Bounds, Entry | None]:
        """What was held and asked for when it failed was needed, at the least."""
        numbers, known = verdict.oom, self.bounds.calibration
        if known is None or numbers is None or numbers.allocated is None or numbers.asked is None:
            return self.bounds, None
        entry = learn_from_failure(last, shortfall, numbers.allocated + numbers.asked)
        return replace(self.bounds, calibration=known.after_failure(entry)), entry

    def _describe_change(self, before: Way, found: StepDown) -> Changed:
        after = found.plan.chosen
        assert after is not None
        another = after.changes != before.changes
        same_states = (before.levers.method, before.levers.lora, before.levers.optimizer, before.shape) == (
            after.levers.method, after.levers.lora, after.levers.optimizer, after.shape
        )  # fmt: skip
        because = _together([said for said in found.because if said.id != "plan.what-changes"])
        return Changed(because=because, changed=tuple(found.changed), another_job=another, carries=same_states)

    # --- others ---------------------------------------------------------------------------------

    def wait_for_room(self, say: Callable[[Said], None], give_up: Callable[[], bool]) -> Refused | None:
        """Nobody is asked to end anything: it is said who holds the memory."""
        began, patient = time.monotonic(), self._manner.patient
        if wait_while_busy(self._look, say, lambda: give_up() or (not patient and time.monotonic() - began > WAITS_S)):
            return None
        try:
            self._look()
        except Busy as error:
            return Refused(because=error.said)
        return None

    def _look(self) -> bool:
        """Whether the GPUs of this run have room for its plan; Busy: who has it."""
        ours = {device.key for device in self.ready.devices}
        for device in occupancy().devices if ours else ():
            if device.key in ours:
                check_free(device, self.ready.worker)
        return True


def _puzzling(way: Way, shortfall: Shortfall) -> bool:
    """Whether the plan was predicted to leave most of the card free where it failed."""
    held = phase_bytes(way.footprint, "gpu", shortfall.phase, way.hardware)
    return shortfall.where == "gpu" and held < way.gpu_limit_bytes // 2


def _together(said: Sequence[Message]) -> Message:
    return Message("runs.several", parts=Listing(said, "."))
