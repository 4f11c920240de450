"""What `tightfit train` brings to its supervisor: how the training is started, and how else it could be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tightfit.desk.calibration import Calibrations, calibration_of
from tightfit.desk.plan import bounds_of, render_plan
from tightfit.desk.request import Request
from tightfit.diagnose.verdict import Verdict
from tightfit.formats.plan_folder import write
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.catalogue import native_bf16
from tightfit.hardware.machine import occupancy
from tightfit.inputs.surroundings import cache_folder
from tightfit.messages import Listing, Message, Said, text
from tightfit.planner import plan_within
from tightfit.planner.calibration import Entry, phase_bytes
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.reasons import lever_changes
from tightfit.planner.step_down import NoWay, Shortfall, Tried, locate, room_above, step_down
from tightfit.priced import strategy_name
from tightfit.runs.calibration import learn_from_failure, learned
from tightfit.runs.cause import config_of_plan
from tightfit.runs.events import Tally
from tightfit.runs.launch import Meeting, RankStart, Sight, launcher_start, rank_starts, worker_command
from tightfit.runs.own import Changed, Refused
from tightfit.runs.records import RunFolder, worker_file
from tightfit.runs.run import Outcome
from tightfit.start.machine import Busy, check_free, reservations, taken_gpus, wait_while_busy
from tightfit.start.train import Ready, read_written_plan, target_of_run
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
        bounds = bounds_of(plan.job, self._target, calibration_of(self._request, plan.job))
        self.bounds = replace(bounds, every_gpu=self.ready.nodes.count > 1)

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
        batch = {"micro_batch": known.micro_batch, "accumulation": known.accumulation}
        return text("cli.micro-batch-2", way=way, **batch, ranks=self.ranks)

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
        others = taken_gpus(reservations().live()).keys() - {device.key for device in devices}
        sight = Sight(variable=self.ready.occupancy.variable, words=words, others=len(others))
        command = worker_command(self._folder, every, self._manner.worker)
        return rank_starts(self.ready.worker, meeting, sight, self._folder, command)

    def learn(self, outcome: Outcome) -> None:
        self.bounds = learn(self.ready.plan, outcome.tally, self.bounds)

    # --- another plan ---------------------------------------------------------------------------

    def smaller(self, shortfall: Shortfall, verdict: Verdict) -> Changed | Refused:
        last = self._last(text("cli.plan-again-less"))
        if isinstance(last, Refused):
            return last
        before = last.chosen
        assert before is not None, "what has no way was never started"
        shortfall = locate(shortfall, before)
        bounds, entry, numbers, known = self.bounds, None, verdict.oom, self.bounds.calibration
        if known is not None and numbers is not None and numbers.allocated is not None and numbers.asked is not None:
            # What was held and asked for when it failed was needed, at the least.
            entry = learn_from_failure(last, shortfall, numbers.allocated + numbers.asked)
            bounds = replace(bounds, calibration=known.after_failure(entry))
        found = step_down(last, shortfall, bounds=bounds, before=tuple(self._tried))
        if isinstance(found, NoWay) and shortfall.phase is not None:
            # Less at the highest peak leaves more in one piece, also for a phase that no lever makes smaller.
            whole = replace(shortfall, phase=None)
            elsewhere = step_down(last, whole, bounds=bounds, before=tuple(self._tried))
            found, shortfall = (found, shortfall) if isinstance(elsewhere, NoWay) else (elsewhere, whole)
        if isinstance(found, NoWay):
            held = phase_bytes(before.footprint, "gpu", shortfall.phase, before.hardware)
            puzzling = shortfall.where == "gpu" and held < before.gpu_limit_bytes // 2
            return Refused(because=_put_together(found.because), puzzling=puzzling)
        tried = Tried(way=before, shortfall=shortfall)
        self._found = FoundPlan(plan=found.plan, tried=tried, bounds=bounds, entry=entry)
        after = found.plan.chosen
        assert after is not None
        old, new = before.levers, after.levers
        return Changed(
            because=_put_together([said for said in found.because if said.id != "plan.what-changes"]),
            changed=tuple(found.changed),
            another_job=after.changes != before.changes,
            carries=(old.method, old.lora, old.optimizer) == (new.method, new.lora, new.optimizer)
            and before.shape == after.shape,
        )

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
        files = render_plan(plan, self._target)
        worker = worker_file(files[WORKER_FILE], WORKER_FILE)
        write(files, self._folder.plan, force=True)
        devices = self.ready.devices[: worker.gpus_per_node]
        self.ready = replace(self.ready, plan=plan, files=files, worker=worker, devices=devices)
        self._tried += [] if found.tried is None else [found.tried]
        self.bounds = found.bounds
        if found.entry is not None:
            Calibrations(cache_folder()).add(found.entry)

    # --- others ---------------------------------------------------------------------------------

    def wait_for_room(self, say: Callable[[Said], None], give_up: Callable[[], bool]) -> Refused | None:
        """Nobody is asked to end anything: it is said who holds the memory."""
        began, patient = time.monotonic(), self._manner.patient

        def look() -> bool:
            ours = {device.key for device in self.ready.devices}
            for device in occupancy().devices if ours else ():
                if device.key in ours:
                    check_free(device, self.ready.worker)
            return True

        if wait_while_busy(look, say, lambda: give_up() or (not patient and time.monotonic() - began > WAITS_S)):
            return None
        try:
            look()
        except Busy as error:
            return Refused(because=error.said)
        return None


def _put_together(said: Sequence[Message]) -> Message:
    return Message("runs.several", parts=Listing(said, "."))


def learn(plan: Plan | None, tally: Tally, bounds: Bounds) -> Bounds:
    """Write down what an attempt measured, and hand back the bounds that know it; unchanged with `--no-calibration`."""
    if plan is None or bounds.calibration is None:
        return bounds
    entry = learned((*tally.marks, *([tally.last] if tally.last else ())), plan)
    if entry is not None:
        Calibrations(cache_folder()).add(entry)
    return replace(bounds, calibration=bounds.calibration.with_entry(entry))


def way_up(plan: Plan | None, tally: Tally, bounds: Bounds) -> Plan | None:
    """The faster plan that would fit, where the run left much of its cards unused; `bounds`: after `learn`.

    Its first `because` is the sentence to say.
    """
    peaks = [mark.measured_bytes for mark in tally.marks if mark.measured_bytes is not None]
    peak = max((*peaks, tally.peak_bytes or 0))
    return None if plan is None or not peak else room_above(plan, peak, bounds=bounds)
