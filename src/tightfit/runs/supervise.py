"""The loop that starts again, whoever trains: stay until it ends, see why it failed, change the least that may help.

Nothing is tried again inside a process that has failed: every attempt is a fresh start that resumes from the newest
whole checkpoint, as before or computed in another way. What that means differs between our own worker (`own.py`) and
somebody else's command (`external/trainer.py`): how it is started and watched, where its checkpoints lie, how it needs
less memory, how it resumes. Those are the two `Trainer`s; attempts, decisions, waiting and records are here.

What follows from a failure is decided from the verdict, the records of all attempts and what the user allows. Carrying
it out may show that it cannot be done, and then the run stops with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tightfit.diagnose.oom import read_oom
from tightfit.diagnose.verdict import RETRYABLE, Kind, Verdict
from tightfit.messages import Message, Said
from tightfit.planner.step_down import Reason, Shortfall
from tightfit.runs.cause import NUMBERS, is_suspicion, to_record
from tightfit.runs.events import AttemptFailed
from tightfit.runs.records import AttemptRecord, Next, timestamp, write_attempt
from tightfit.runs.run import FAILED, Failure, Outcome, Signals
from tightfit.types import UserError

MAX_ATTEMPTS = 5
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_REASONS: dict[Kind, Reason] = {  # kinds that a plan can do something about, and how the planner calls them
    "device-oom": "memory",
    "fragmentation": "fragmentation",
    "host-oom": "memory",
    "pinned-memory": "pinned",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    max_attempts: int = MAX_ATTEMPTS  # starts in a row that keep no new step; 1: none is made again
    allow: frozenset[str] = frozenset()  # costly changes by name
    hang_timeout_s: float | None = None  # None: the trainer's own measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Next):
    shortfall: Shortfall | None = None  # of a smaller plan
    step: int | None = None  # the one to leave out


def decide(verdict: Verdict, records: Sequence[AttemptRecord], policy: Policy, precision: str) -> Decision:
    """`records`: of all attempts, the failed one last, without its `next` as yet; `precision`: of its plan."""
    if verdict.kind not in RETRYABLE:
        return stop(Message("runs.same-again"))
    tries = tries_in_a_row(records)
    if tries >= policy.max_attempts:
        one, in_vain = Message("runs.one-attempt"), Message("runs.attempts-in-vain", most=policy.max_attempts)
        return stop(one if policy.max_attempts == 1 else in_vain)
    if verdict.kind in NUMBERS:
        # What ruined the numbers would do so again: the same plan alone cannot help.
        step, last = verdict.step, records[-1]
        if precision == "fp16" and "precision" in policy.allow:
            return Decision(action="precision", because=Message("runs.bf16-allowed"))
        if step is None or "skip-data" not in policy.allow:
            return stop(Message("runs.needs-leave-fp16" if precision == "fp16" else "runs.needs-leave"))
        skipped = [record for record in records[:-1] if record.next is not None and record.next.action == "skip data"]
        # steps that were left out after the checkpoint that the last attempt went on from
        left_out = sum(record.kept_step == last.kept_step for record in skipped)
        if step == (last.kept_step or 0) + 1 + left_out and skipped and skipped[-1] is records[-2]:
            return Decision(action="older checkpoint", because=Message("runs.first-step-fails"))
        return Decision(action="skip data", because=Message("runs.step-left-out", step=step), step=step)
    if verdict.kind in _REASONS and not (is_suspicion(verdict) and not _again(verdict, records)):
        return Decision(action="smaller plan", because=Message("runs.needs-less"), shortfall=_missing(verdict))
    if verdict.kind == "other-process":
        return Decision(action="wait", because=Message("runs.when-room"))
    if verdict.kind == "disk-full" and not _again(verdict, records):
        return Decision(action="make room", because=Message("runs.leftovers-go"))
    if _again(verdict, records):
        return stop(Message("runs.failed-twice"))
    return _same_plan(records, Message("runs.may-pass"))


def tries_in_a_row(records: Sequence[AttemptRecord]) -> int:
    """How many attempts have ended since the last one that kept a new step, that one included."""
    kept = [record.kept_step or 0 for record in records]
    return next((back for back in range(1, len(kept)) if kept[-back] > max(kept[:-back])), len(kept))


def _same_plan(records: Sequence[AttemptRecord], because: Said) -> Decision:
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries_in_a_row(records) - 1))
    return Decision(action="same plan", because=because, wait_s=wait_s)


def _again(verdict: Verdict, records: Sequence[AttemptRecord]) -> bool:
    """Whether the attempt before, with the same plan, ended at the same step for the same cause, and kept nothing."""
    if len(records) < 2:
        return False
    before, last = records[-2:]
    return (
        before.cause is not None
        and before.cause.kind == verdict.kind
        and (before.reached, before.kept_step) == (last.reached, last.kept_step)
        and before.plan == last.plan
    )


def without_smaller(
    verdict: Verdict, records: Sequence[AttemptRecord], because: Said, *, puzzling: bool = False
) -> Decision:
    """No plan needs less. The host is shared with others, who may want less the next time; a GPU may be, where the plan
    cannot have been what filled it (`puzzling`)."""
    shared = verdict.kind in ("host-oom", "pinned-memory")
    if (shared or puzzling) and not _again(verdict, records):
        return _same_plan(records, Message("runs.host-once-more") if shared else Message("runs.once-more"))
    return stop(because)


def _missing(verdict: Verdict) -> Shortfall:
    reason, numbers = _REASONS.get(verdict.kind, "memory"), verdict.oom
    if verdict.kind not in ("device-oom", "fragmentation"):
        # torch's words, where no rank's
        said = (numbers, *(read_oom(str(line.text)).numbers for line in verdict.evidence))
        asked = next((each.asked for each in said if each is not None and each.asked is not None), 0)
        return Shortfall(where="host", missing_bytes=asked, phase=verdict.phase, reason=reason)
    if numbers is None:
        return Shortfall(where="gpu", phase=verdict.phase, reason=reason)
    free = numbers.left or 0
    missing = (numbers.asked or 0) - (free if reason == "memory" else 0)
    room = None if numbers.allocated is None or numbers.left is None else numbers.allocated + free
    return Shortfall(where="gpu", missing_bytes=max(0, missing), phase=verdict.phase, reason=reason, room_bytes=room)


def stop(because: Said) -> Decision:
    return Decision(action="stop", because=because)


# --- the loop ------------------------------------------------------------------------------------


LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    outcome: Outcome
    exit_codes: tuple[int, ...]  # by rank; negative: the signal that ended it
    verdict: Verdict | None = None  # why it failed; of one that ended well: what is odd about it all the same
    first_step: int | None = None
    last_step: int | None = None


class Computed(Protocol):
    @property
    def words(self) -> Said:
        """The plan, or the command, in a line."""

    @property
    def ranks(self) -> int: ...

    @property
    def effective_batch(self) -> int | None: ...

    @property
    def precision(self) -> str: ...


class Trainer(Protocol):
    @property
    def course(self) -> Computed: ...

    @property
    def kept_step(self) -> int | None:
        """The step of the newest whole checkpoint; None: there is none."""

    def attempt(self, number: int) -> Attempt:
        """Start it, stay with it to the end, and judge how it ended."""

    def carry_out(self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]) -> Decision:
        """What was done, with what it changed, one by one; a decision to stop, where it could not be done."""

    def after_failure(self, failed: AttemptFailed, changed: tuple[Said, ...]) -> None:
        """Say what follows, and put aside what the attempt has left."""

    def before_next(self, number: int, changed: tuple[Said, ...]) -> None:
        """The next attempt begins: take what was found for it, and say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    outcome: Outcome
    records: tuple[AttemptRecord, ...] = ()  # none, where nobody supervised
    verdict: Verdict | None = None  # of the last attempt, where it failed or was odd
    because: Said = ""  # why there is no further attempt, where one failed

    @property
    def in_vain(self) -> bool:
        """Nothing came of it that anybody would miss: a single attempt that made no step."""
        return len(self.records) <= 1 and not self.outcome.tally.began


@dataclass(kw_only=True)
class Supervisor:
    trainer: Trainer
    folder: Path  # for the records
    policy: Policy
    signals: Signals
    records: list[AttemptRecord] = field(default_factory=list)

    def run(self) -> RunResult:
        last: Outcome | None = None
        while True:
            number = len(self.records) + 1
            self._write(
                AttemptRecord(
                    number=number,
                    started=timestamp(),
                    plan=self.trainer.course.words,
                    ranks=self.trainer.course.ranks,
                    effective_batch=self.trainer.course.effective_batch,
                )
            )
            try:
                attempt = self.trainer.attempt(number)
            except UserError as error:
                if last is None:  # nothing is lost, and nothing has to be kept
                    raise
                # what an attempt needs is not there any more: a GPU that somebody else has taken meanwhile
                failure = Failure(rank=0, is_users=False, sentence=error.said, tail=(), log=None)
                outcome = replace(last, state="failed", exit_code=FAILED, failure=failure)
                self._close(Attempt(outcome=outcome, exit_codes=()))
                self._write(replace(self.records[-1], next=Next(action="stop", because=error.said)))
                return self._make_result(outcome, because=error.said)
            last, verdict = attempt.outcome, attempt.verdict
            self._close(attempt)
            if last.state not in ("failed", "user error"):
                return self._make_result(last, verdict)
            assert verdict is not None, "a trainer judges each attempt that fails"
            if self.signals.caught:
                decision = stop(Message("runs.was-asked-to-stop"))
            else:
                decision = decide(verdict, self.records, self.policy, self.trainer.course.precision)
                try:
                    decision = self.trainer.carry_out(decision, verdict, self.records)
                except UserError as error:
                    decision = stop(error.said)
            action, because, changed, wait_s = decision.action, decision.because, decision.changed, decision.wait_s
            following = Next(action=action, because=because, changed=changed, wait_s=wait_s)
            record = replace(self.records[-1], next=following)
            self._write(record)
            failed = AttemptFailed(
                number=record.number,
                kind=verdict.kind,
                text=verdict.cause,
                step=record.last_step,
                kept_step=record.kept_step,
                action=action,
                because=because,
                wait_s=wait_s,
            )
            self.trainer.after_failure(failed, changed)
            if action == "stop":
                return self._make_result(last, verdict, because)
            end = time.monotonic() + wait_s
            while time.monotonic() < end and not self.signals.caught:
                time.sleep(LOOK_S)
            if self.signals.caught:
                asked = replace(last, state="interrupted", exit_code=self.signals.exit_code, failure=None)
                return self._make_result(asked, verdict, Message("runs.was-asked-to-stop"))
            self.trainer.before_next(number + 1, changed)

    def _make_result(self, outcome: Outcome, verdict: Verdict | None = None, because: Said = "") -> RunResult:
        return RunResult(outcome=outcome, records=tuple(self.records), verdict=verdict, because=because)

    def _write(self, record: AttemptRecord) -> None:
        self.records[record.number - 1 :] = [record]
        write_attempt(self.folder, record)

    def _close(self, attempt: Attempt) -> None:
        state = attempt.outcome.state
        self._write(
            replace(
                self.records[-1],
                ended=timestamp(),
                state="failed" if state == "user error" else state,
                exit_codes=attempt.exit_codes,
                first_step=attempt.first_step,
                last_step=attempt.last_step,
                kept_step=self.trainer.kept_step,
                cause=None if attempt.verdict is None else to_record(attempt.verdict),
            )
        )
