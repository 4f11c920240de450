"""The loop that starts again: run the ranks, see why they failed, change the least that may help, and go on.

Nothing is tried again inside a process that has failed. Every attempt is a fresh group of ranks that goes on from the
newest whole checkpoint, under the same plan or another one: the checkpoint is portable, and the effective batch stays.
What has to be known of plans and machines is asked of a `Course`, which the verb brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tightfit.diagnose.verdict import Verdict
from tightfit.planner.step_down import Shortfall
from tightfit.runs import attempts, disk
from tightfit.runs.attempts import AttemptRecord, Next
from tightfit.runs.cause import Known, cause_of, known_config, recorded
from tightfit.runs.checkpoints import Torn, checked, newest_first, read_manifest, step_of, written_first
from tightfit.runs.decide import Decision, Policy, decide, without_smaller
from tightfit.runs.events import AttemptBegan, AttemptFailed, Event, Resumed, Step, Warned
from tightfit.runs.failure import Failure
from tightfit.runs.folder import AUTO, RunFolder
from tightfit.runs.heartbeat import Watch, clear_beats
from tightfit.runs.inventory import goners, inventory, keeping_of
from tightfit.runs.inventory import remove as remove_goner
from tightfit.runs.kernel import KernelRecord, KernelSaid
from tightfit.runs.launch import RankStart
from tightfit.runs.run import FAILED, Company, Outcome, Signals, run
from tightfit.runs.tally import Tally
from tightfit.types import UserError

LOOK_S = 0.1
LEAST_ROOM_BYTES = 64 * 2**20
"""What a disk must have left before a run is started again on it, where no checkpoint tells how large they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The next attempt is computed in another way."""

    because: str
    changed: tuple[str, ...]
    another_job: bool = False
    """As the user allowed, it changes what is trained, so that a checkpoint has to be gone on from all the same."""
    carries: bool = True
    """Whether it can go on from a checkpoint at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """That is not to be had."""

    because: str
    puzzling: bool = False
    """By far less was predicted than there is: something else may have held the memory."""


class Course(Protocol):
    """How the training is computed at present, and how else it could be."""

    @property
    def words(self) -> str:
        """The plan in a line."""
        ...

    @property
    def ranks(self) -> int: ...

    @property
    def effective_batch(self) -> int | None: ...

    @property
    def precision(self) -> str: ...

    def starts(self, options: Sequence[str]) -> Sequence[RankStart]:
        """The ranks of the next attempt, with these options beside those that every attempt has."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """An attempt has measured something."""
        ...

    def smaller(self, shortfall: Shortfall, verdict: Verdict) -> Changed | Refused:
        """A plan that needs less; nothing has changed until it is taken."""
        ...

    def in_bf16(self) -> Changed | Refused:
        """Likewise, in another precision."""
        ...

    def take(self) -> None:
        """Go on with what was found last."""
        ...

    def wait_for_room(self, say: Callable[[str], None], give_up: Callable[[], bool]) -> Refused | None:
        """Until the GPUs have room for the plan; None: they have."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the user says about the supervision."""

    policy: Policy = field(default_factory=Policy)
    hang_timeout_s: float | None = None
    resume: str = AUTO
    """Where the first attempt begins: `auto`, `none`, or a checkpoint or run. The others go on from what there is."""
    anyway: bool = False
    trust_pickle: bool = False
    cwd: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a supervised run ended."""

    outcome: Outcome
    records: tuple[AttemptRecord, ...] = ()
    """None, where nobody supervised."""
    verdict: Verdict | None = None
    """Of the last attempt, where it failed."""

    @property
    def in_vain(self) -> bool:
        """Nothing came of it that anybody would miss: a single attempt that made no step."""
        return len(self.records) <= 1 and not self.outcome.tally.began


def supervise(course: Course, folder: RunFolder, show: Callable[[Event], None], orders: Orders) -> Ended:
    """Run to the end, whatever comes between; `show` gets every event as it comes."""
    with Signals() as signals:
        return Supervisor(course=course, folder=folder, show=show, orders=orders, signals=signals).run()


@dataclass(kw_only=True)
class Supervisor:
    """Changes with every attempt."""

    course: Course
    folder: RunFolder
    show: Callable[[Event], None]
    orders: Orders
    signals: Signals
    records: list[AttemptRecord] = field(default_factory=list)
    skips: set[int] = field(default_factory=set)
    older: Path | None = None
    """A checkpoint behind the newest one, to go back to."""
    anyway: bool = False
    """The job is not quite what it was, as the user allowed."""
    tally: Tally = field(default_factory=Tally)

    def run(self) -> Ended:
        while True:
            last = self.tally.last
            try:
                known = self._attempt()
            except UserError as error:
                if len(self.records) < 2:  # nothing is lost, and nothing has to be kept
                    raise
                return self._not_started(str(error))
            outcome = self._finished(known.outcome)
            self.course.learn(outcome)
            self.tally.last = self.tally.last or last  # how far the run has come, whichever attempt brought it there
            if outcome.state not in ("failed", "user error"):
                self._write(_closed(self.records[-1], outcome, self._kept()))
                return Ended(outcome=outcome, records=tuple(self.records))
            verdict = cause_of(known)
            self._write(_closed(self.records[-1], outcome, self._kept(), verdict))
            decision, changed = self._carried_out(self._decided(verdict), verdict)
            self._note(decision, changed, verdict)
            if decision.action == "stop":
                return Ended(outcome=outcome, records=tuple(self.records), verdict=verdict)
            attempts.put_aside(self.folder, self.records[-1].number, [start.log for start in known.starts])
            self._wait(decision.wait_s)
            if self.signals.caught:
                code = self.signals.exit_code
                asked = replace(outcome, state="interrupted", exit_code=code, failure=None)
                return Ended(outcome=asked, records=tuple(self.records), verdict=verdict)
            self._tell(AttemptBegan(number=len(self.records) + 1, plan=self.course.words, changed=changed))

    # --- one attempt ----------------------------------------------------------------------------

    def _attempt(self) -> Known:
        options = self._options()
        self._write(
            AttemptRecord(
                number=len(self.records) + 1,
                started=attempts.now(),
                plan=self.course.words,
                ranks=self.course.ranks,
                effective_batch=self.course.effective_batch,
            )
        )
        starts = self.course.starts(options)
        before = self.tally
        self.tally = Tally(first_loss=before.first_loss, checkpoint=before.checkpoint, resumed=before.resumed)
        ranks = [start.rank for start in starts]
        clear_beats(self.folder.path, ranks)  # what a desk that was killed has left
        watch = Watch(self.folder.path, ranks, self.orders.hang_timeout_s)
        company = Company(signals=self.signals, watch=watch, tally=self.tally)
        kernel = KernelRecord()
        try:
            outcome = run(starts, self.folder, self._shown, cwd=self.orders.cwd, company=company)
            said = kernel.said(outcome.pids) if outcome.state == "failed" else KernelSaid()
            beats = watch.beats()
        finally:
            kernel.close()
            clear_beats(self.folder.path, ranks)
        config = known_config(self.orders.cwd or self.folder.plan)
        return Known(outcome=outcome, starts=starts, kernel=said, beats=beats, config=config)

    def _options(self) -> list[str]:
        place = self.orders.resume
        if self.older is not None:
            place, self.older = str(self.older), None
        elif self.records and self._kept() is not None:
            place = AUTO  # what was there before has made way, or is what this run began with
        options = ["--resume", place]
        options += ["--resume-anyway"] if self.orders.anyway or self.anyway else []
        options += ["--trust-pickle"] if self.orders.trust_pickle else []
        options += ["--skip-steps", ",".join(map(str, sorted(self.skips)))] if self.skips else []
        return options

    def _shown(self, event: Event) -> None:
        record = self.records[-1]
        if isinstance(event, Resumed):
            self.records[-1] = replace(record, first_step=event.step)
        elif isinstance(event, Step):
            first = 0 if record.first_step is None else record.first_step
            self.records[-1] = replace(record, first_step=first, last_step=event.step)
        self.show(event)

    def _finished(self, outcome: Outcome) -> Outcome:
        """A rank that fails when the model stands already takes nothing away from it."""
        if outcome.state != "failed" or outcome.tally.saved is None or not self.folder.model.is_dir():
            return outcome
        sentence = "" if outcome.failure is None else f": {outcome.failure.sentence}"
        self.show(Warned(text=f"the model is saved, and then not every rank left in order{sentence}"))
        return replace(outcome, state="done", exit_code=0, failure=None)

    def _kept(self) -> int | None:
        """The step from which the next attempt goes on; None: it begins anew."""
        newest = written_first(self.folder.path)
        return None if newest is None else step_of(newest)

    def _not_started(self, sentence: str) -> Ended:
        """What an attempt needs is not there any more: a GPU that somebody else has taken meanwhile."""
        failure = Failure(rank=0, is_users=False, sentence=sentence, tail=(), log=None)
        outcome = Outcome(state="failed", exit_code=FAILED, failure=failure, tally=self.tally)
        self._write(
            replace(_closed(self.records[-1], outcome, self._kept()), next=Next(action="stop", because=sentence))
        )
        return Ended(outcome=outcome, records=tuple(self.records))

    # --- what follows ---------------------------------------------------------------------------

    def _decided(self, verdict: Verdict) -> Decision:
        if self.signals.caught:
            return Decision(action="stop", because="it was asked to stop")
        return decide(verdict, self.records, self.orders.policy, self.course.precision)

    def _carried_out(self, decision: Decision, verdict: Verdict) -> tuple[Decision, tuple[str, ...]]:
        """What was done, and what it changed lever by lever; a decision to stop, where it could not be done."""
        try:
            if decision.action in ("smaller plan", "precision"):
                return self._changed_plan(decision, verdict)
            if decision.action == "wait":
                refused = self.course.wait_for_room(self._say, lambda: bool(self.signals.caught))
                return (decision if refused is None else _stop(refused.because)), ()
            if decision.action == "make room":
                return self._made_room(decision), ()
            if decision.action == "older checkpoint":
                return self._went_back(decision), ()
        except UserError as error:
            return _stop(str(error)), ()
        if decision.step is not None:
            self.skips.add(decision.step)
        return decision, ()

    def _changed_plan(self, decision: Decision, verdict: Verdict) -> tuple[Decision, tuple[str, ...]]:
        if decision.shortfall is not None:
            found = self.course.smaller(decision.shortfall, verdict)
            if isinstance(found, Refused):
                return without_smaller(verdict, self.records, found.because, puzzling=found.puzzling), ()
        else:
            found = self.course.in_bf16()
            if isinstance(found, Refused):
                return _stop(found.because), ()
        kept = self._kept()
        if not found.carries and kept is not None:
            what = "; ".join(found.changed)
            return _stop(f"what would fit ({what}) cannot go on from the checkpoint of step {kept:,}"), ()
        attempts.keep_plan(self.folder, self.records[-1].number)
        self.course.take()
        self.anyway |= found.another_job
        return replace(decision, because=found.because), found.changed

    def _made_room(self, decision: Decision) -> Decision:
        run = self.folder.path
        freed = 0
        for goner in goners(inventory(run), keeping_of(run)):
            remove_goner(goner)
            freed += goner.bytes
        newest = written_first(run)
        try:
            needed = LEAST_ROOM_BYTES if newest is None else read_manifest(newest).bytes
        except Torn:
            needed = LEAST_ROOM_BYTES
        room = disk.room(run)
        if room < needed:
            left = f"{run} has {room / 1e6:,.0f} MB left and needs {needed / 1e6:,.0f} MB"
            return _stop(f"{left}: make room, and the same command goes on")
        done = f"{freed / 1e6:,.0f} MB of leftovers were removed" if freed else "there is room again"
        return replace(decision, because=done)

    def _went_back(self, decision: Decision) -> Decision:
        for folder in newest_first(self.folder.path)[1:]:
            try:
                checked(folder)
            except Torn:
                continue
            self.older = folder
            return replace(decision, because=f"{decision.because}, so the run goes on from {folder.name}")
        return _stop(f"{decision.because}, and there is no older one")

    def _note(self, decision: Decision, changed: tuple[str, ...], verdict: Verdict) -> None:
        following = Next(action=decision.action, because=decision.because, changed=changed, wait_s=decision.wait_s)
        record = replace(self.records[-1], next=following)
        self._write(record)
        event = AttemptFailed(
            number=record.number,
            kind=verdict.kind,
            text=verdict.cause,
            step=record.last_step,
            kept_step=record.kept_step,
            action=decision.action,
            because=decision.because,
            wait_s=decision.wait_s,
        )
        if decision.action == "stop":  # how it ends is said at the end
            attempts.append_event(self.folder, event)
        else:
            self._tell(event)

    # --- telling --------------------------------------------------------------------------------

    def _write(self, record: AttemptRecord) -> None:
        self.records[record.number - 1 :] = [record]
        attempts.write_attempt(self.folder.path, record)

    def _tell(self, event: AttemptBegan | AttemptFailed) -> None:
        attempts.append_event(self.folder, event)
        self.show(event)

    def _say(self, text: str) -> None:
        self.show(Warned(text=text))

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals.caught:
            time.sleep(LOOK_S)


def _stop(because: str) -> Decision:
    return Decision(action="stop", because=because)


def _closed(
    record: AttemptRecord, outcome: Outcome, kept_step: int | None, verdict: Verdict | None = None
) -> AttemptRecord:
    """The record of an attempt that has ended."""
    codes = {gone.start.rank: gone.code for gone in outcome.every}
    return replace(
        record,
        ended=attempts.now(),
        state="failed" if outcome.state == "user error" else outcome.state,
        exit_codes=tuple(codes[rank] for rank in sorted(codes)),
        kept_step=kept_step,
        cause=None if verdict is None else recorded(verdict),
    )
