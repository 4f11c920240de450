"""Our own worker as a trainer: a group of ranks whose events are followed and whose heartbeats are watched.

Its checkpoint is portable, so an attempt may resume under the same plan or another one; the effective batch stays.
What has to be known of plans and machines is asked of a `Course`, which the verb brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tightfit.diagnose.verdict import Verdict
from tightfit.messages import Listing, Message, Said
from tightfit.planner.step_down import Shortfall
from tightfit.runs import checkpoints, disk
from tightfit.runs.cause import FailedAttempt, KernelRecord, KernelSaid, config_of_plan, find_cause
from tightfit.runs.events import AttemptBegan, AttemptFailed, Event, Resumed, Step, Tally, Warned
from tightfit.runs.folder import AUTO
from tightfit.runs.hang import Watch
from tightfit.runs.heartbeat import clear_beats, read_beat
from tightfit.runs.launch import Ranks, RankStart
from tightfit.runs.leader import Leader, Orders, SpreadRanks
from tightfit.runs.records import AttemptRecord, RunFolder, WorkerFile, append_event, keep_plan, put_aside
from tightfit.runs.run import Company, Outcome, Signals, run
from tightfit.runs.supervise import Attempt, Computed, Decision, Policy, stop, without_smaller
from tightfit.runs.wire import Facts

LEAST_ROOM_BYTES = 64 * 2**20
"""What a disk must have left before a run is started again on it, where no checkpoint tells how large they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The next attempt is computed in another way."""

    because: Said
    changed: tuple[Said, ...]
    another_job: bool = False
    """As the user allowed, it changes what is trained, so that a checkpoint has to be resumed all the same."""
    carries: bool = True  # whether it can resume from a checkpoint at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """That is not to be had."""

    because: Said
    puzzling: bool = False  # by far less was predicted than there is: something else may have held the memory


class Course(Computed, Protocol):
    """How the training is computed at present, and how else it could be."""

    @property
    def worker_file(self) -> WorkerFile: ...

    @property
    def orders(self) -> Orders:
        """What other nodes are told to start: the same as `starts` last gave this one."""

    def starts(self, options: Sequence[str]) -> Sequence[RankStart]:
        """The ranks of the next attempt, with these options beside those that every attempt has."""

    def learn(self, outcome: Outcome) -> None:
        """An attempt has measured something."""

    def smaller(self, shortfall: Shortfall, verdict: Verdict) -> Changed | Refused:
        """A plan that needs less; nothing has changed until it is taken."""

    def in_bf16(self) -> Changed | Refused:
        """Likewise, in another precision."""

    def take(self) -> None:
        """Go on with what was found last."""

    def wait_for_room(self, say: Callable[[Said], None], give_up: Callable[[], bool]) -> Refused | None:
        """Until the GPUs have room for the plan; None: they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where and how the first attempt begins. The others resume from what there is."""

    place: str = AUTO  # `auto`, `none`, or the absolute path of a checkpoint or of a run's folder
    anyway: bool = False  # although the job has changed
    trust_pickle: bool = False  # open a checkpoint of another program that cannot be read safely

    @property
    def options(self) -> tuple[str, ...]:
        switches = {"--resume-anyway": self.anyway, "--trust-pickle": self.trust_pickle}
        return ("--resume", self.place, *(name for name, given in switches.items() if given))


@dataclass(kw_only=True)
class OwnTrainer:
    course: Course
    folder: RunFolder
    show: Callable[[Event], None]  # gets every event as it comes
    policy: Policy
    resume: Resume
    signals: Signals
    cwd: Path | None = None
    leader: Leader | None = None  # of several nodes; None: every rank runs here
    facts: Facts | None = None  # of this node, where there are several
    skips: set[int] = field(default_factory=set)
    older: Path | None = None  # a checkpoint behind the newest one, to go back to
    tally: Tally = field(default_factory=Tally)
    logs: Sequence[Path] = ()  # of the last attempt

    @property
    def kept_step(self) -> int | None:
        newest = checkpoints.written_first(self.folder.path)
        return None if newest is None else checkpoints.step_of(newest)

    def attempt(self, number: int) -> Attempt:
        resume = self.resume
        if self.older is not None:
            resume, self.older = replace(resume, place=str(self.older)), None
        elif number > 1 and self.kept_step is not None:
            resume = replace(resume, place=AUTO)  # what was there before has made way, or is what this run began with
        if self.leader is not None and not self._assemble(self.leader, first=number == 1):
            code, tally = self.signals.exit_code, self.tally
            return Attempt(
                outcome=Outcome(state="interrupted", exit_code=code, failure=None, tally=tally), exit_codes=()
            )
        skipped = ["--skip-steps", ",".join(map(str, sorted(self.skips)))] if self.skips else []
        starts = self.course.starts([*resume.options, *skipped])
        self.logs = [start.log for start in starts]
        first: int | None = None
        last: int | None = None

        def note(event: Event) -> None:
            nonlocal first, last
            if isinstance(event, Resumed):
                first = event.step
            elif isinstance(event, Step):
                first, last = first or 0, event.step
            self.show(event)

        before = self.tally
        self.tally = Tally(first_loss=before.first_loss, checkpoint=before.checkpoint, resumed=before.resumed)
        ranks = [start.rank for start in starts]
        clear_beats(self.folder.path, ranks)  # what a desk that was killed has left
        read, spread = read_beat if self.leader is None else self.leader.read_beat, list[SpreadRanks]()

        def gather(starts: Sequence[RankStart], cwd: Path) -> Ranks:
            if self.leader is None:
                return Ranks(starts, cwd)
            spread.append(SpreadRanks(starts, cwd, self.leader, number, self.course.orders))
            return spread[0]

        watch = Watch(self.folder.path, ranks, self.policy.hang_timeout_s, read=read)
        company = Company(signals=self.signals, watch=watch, tally=self.tally, gather=gather)
        kernel = KernelRecord()
        try:
            outcome = run(starts, self.folder, note, cwd=self.cwd, company=company)
            said = kernel.said(outcome.pids) if outcome.state == "failed" else KernelSaid()
            if spread and outcome.state == "failed" and outcome.failure is not None:
                said = spread[0].kernel_of(outcome.failure.rank) or said
            beats = watch.beats()
        finally:
            kernel.close()
            clear_beats(self.folder.path, ranks)
        config = config_of_plan(self.cwd or self.folder.plan)
        known = FailedAttempt(outcome=outcome, starts=starts, kernel=said, beats=beats, config=config)
        if outcome.state == "failed" and outcome.tally.saved is not None and self.folder.model.is_dir():
            # A rank that fails when the model stands already takes nothing away from it.
            late = Message("runs.saved-then-failed")
            if outcome.failure is not None:
                late = Message("runs.saved-then", why=outcome.failure.sentence)
            self.show(Warned(text=late))
            outcome = replace(outcome, state="done", exit_code=0, failure=None)
        self.course.learn(outcome)
        self.tally.last = self.tally.last or before.last  # how far the run has come, whichever attempt brought it there
        codes = {gone.start.rank: gone.code for gone in outcome.every}
        return Attempt(
            outcome=outcome,
            exit_codes=tuple(codes[rank] for rank in sorted(codes)),
            verdict=find_cause(known) if outcome.state in ("failed", "user error") else None,
            first_step=first,
            last_step=last,
        )

    def _assemble(self, leader: Leader, *, first: bool) -> bool:
        assert self.facts is not None
        return leader.assemble(
            self.course.worker_file,
            self.facts,
            first=first,
            say=lambda said: self.show(Warned(text=said)),
            give_up=self.signals.have_come,
        )

    def carry_out(self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]) -> Decision:
        if decision.action in ("smaller plan", "precision"):
            if decision.shortfall is not None:
                found = self.course.smaller(decision.shortfall, verdict)
                if isinstance(found, Refused):
                    return without_smaller(verdict, records, found.because, puzzling=found.puzzling)
            else:
                found = self.course.in_bf16()
                if isinstance(found, Refused):
                    return stop(found.because)
            kept = self.kept_step
            if not found.carries and kept is not None:
                return stop(Message("runs.fits-but-not-from", changes=Listing(found.changed, ";"), step=kept))
            keep_plan(self.folder, records[-1].number)
            self.course.take()
            self.resume = replace(self.resume, anyway=self.resume.anyway or found.another_job)
            return replace(decision, because=found.because, changed=found.changed)
        if decision.action == "wait":
            refused = self.course.wait_for_room(lambda said: self.show(Warned(text=said)), self.signals.have_come)
            return decision if refused is None else stop(refused.because)
        if decision.action == "make room":
            run, freed = self.folder.path, 0
            for goner in checkpoints.goners(checkpoints.inventory(run), checkpoints.keeping_of(run)):
                checkpoints.remove_goner(goner)
                freed += goner.bytes
            newest, needed, room = checkpoints.written_first(run), LEAST_ROOM_BYTES, disk.room(run)
            if newest is not None:
                with suppress(checkpoints.Torn):
                    needed = checkpoints.read_manifest(newest).bytes
            if room < needed:
                return stop(Message("runs.needs-room", folder=run, left=room / 1e6, need=needed / 1e6))
            done = Message("runs.leftovers-gone", size=freed / 1e6) if freed else Message("runs.room-again")
            return replace(decision, because=done)
        if decision.action == "older checkpoint":
            kept = self.kept_step or 0
            for folder in checkpoints.newest_first(self.folder.path):
                with suppress(checkpoints.Torn):
                    if checkpoints.checked(folder).step >= kept:
                        continue
                    self.older = folder
                    why = Message("runs.goes-back", why=decision.because, name=folder.name)
                    return replace(decision, because=why)
            return stop(Message("runs.no-older-one", why=decision.because))
        if decision.step is not None:
            self.skips.add(decision.step)
        return decision

    def after_failure(self, failed: AttemptFailed, changed: tuple[Said, ...]) -> None:
        append_event(self.folder, failed)
        if failed.action != "stop":  # how it ends is said at the end
            self.show(failed)
            put_aside(self.folder, failed.number, self.logs)

    def before_next(self, number: int, changed: tuple[Said, ...]) -> None:
        event = AttemptBegan(number=number, plan=self.course.words, changed=changed)
        append_event(self.folder, event)
        self.show(event)
