"""The loop that starts again, whoever trains: stay until it ends, see why it failed, change the least that may help.

Nothing is tried again inside a process that has failed: every attempt is a fresh start that resumes from the newest
whole checkpoint, as before or computed in another way. What that means differs between our own worker (`own.py`) and
somebody else's command (`external/trainer.py`): how it is started and watched, where its checkpoints lie, how it needs
less memory, how it resumes. Those are the two `Trainer`s; attempts, decisions, waiting and records are here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tightfit.diagnose.verdict import Verdict
from tightfit.messages import Message, Said
from tightfit.runs import attempts
from tightfit.runs.attempts import AttemptRecord, Next
from tightfit.runs.cause import to_record
from tightfit.runs.decide import Decision, Policy, decide, stop
from tightfit.runs.events import AttemptFailed
from tightfit.runs.failure import Failure
from tightfit.runs.run import FAILED, Outcome, Signals
from tightfit.types import UserError

LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the user says about the supervision."""

    policy: Policy = field(default_factory=Policy)
    hang_timeout_s: float | None = None
    """None: the trainer's own measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start that has ended."""

    outcome: Outcome
    exit_codes: tuple[int, ...]
    """By rank; negative: the signal that ended it."""
    verdict: Verdict | None = None
    """Why it failed; of one that ended well: what is odd about it all the same."""
    first_step: int | None = None
    last_step: int | None = None


class Trainer(Protocol):
    """Who trains, and how at present."""

    @property
    def words(self) -> Said:
        """How it is computed, or the command, in a line."""
        ...

    @property
    def ranks(self) -> int: ...

    @property
    def effective_batch(self) -> int | None: ...

    @property
    def precision(self) -> str: ...

    @property
    def kept_step(self) -> int | None:
        """The step of the newest whole checkpoint; None: there is none."""
        ...

    def attempt(self, number: int) -> Attempt:
        """Start it, stay with it to the end, and judge how it ended."""
        ...

    def carry_out(
        self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]
    ) -> tuple[Decision, tuple[Said, ...]]:
        """What was done, and what it changed, one by one; a decision to stop, where it could not be done."""
        ...

    def after_failure(self, failed: AttemptFailed, changed: tuple[Said, ...]) -> None:
        """Say what follows, and put aside what the attempt has left."""
        ...

    def before_next(self, number: int, changed: tuple[Said, ...]) -> None:
        """The next attempt begins: take what was found for it, and say so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a supervised run ended."""

    outcome: Outcome
    records: tuple[AttemptRecord, ...] = ()
    """None, where nobody supervised."""
    verdict: Verdict | None = None
    """Of the last attempt, where it failed or was odd."""
    because: Said = ""
    """Why there is no further attempt, where one failed."""

    @property
    def in_vain(self) -> bool:
        """Nothing came of it that anybody would miss: a single attempt that made no step."""
        return len(self.records) <= 1 and not self.outcome.tally.began


@dataclass(kw_only=True)
class Supervisor:
    """Changes with every attempt."""

    trainer: Trainer
    folder: Path
    """For the records."""
    policy: Policy
    signals: Signals
    records: list[AttemptRecord] = field(default_factory=list)

    def run(self) -> RunResult:
        """Run to the end, whatever comes between."""
        last: Outcome | None = None
        while True:
            number = len(self.records) + 1
            self._write(
                AttemptRecord(
                    number=number,
                    started=attempts.now(),
                    plan=self.trainer.words,
                    ranks=self.trainer.ranks,
                    effective_batch=self.trainer.effective_batch,
                )
            )
            try:
                attempt = self.trainer.attempt(number)
            except UserError as error:
                if last is None:  # nothing is lost, and nothing has to be kept
                    raise
                return self._fail_to_start(last, error.said)
            last, verdict = attempt.outcome, attempt.verdict
            self._close(attempt)
            if last.state not in ("failed", "user error"):
                return self._make_result(last, verdict)
            assert verdict is not None, "a trainer judges each attempt that fails"
            decision, changed = self._decide(verdict)
            self._note(decision, changed, verdict)
            if decision.action == "stop":
                return self._make_result(last, verdict, decision.because)
            end = time.monotonic() + decision.wait_s
            while time.monotonic() < end and not self.signals.caught:
                time.sleep(LOOK_S)
            if self.signals.caught:
                asked = replace(last, state="interrupted", exit_code=self.signals.exit_code, failure=None)
                return self._make_result(asked, verdict, Message("runs.was-asked-to-stop"))
            self.trainer.before_next(number + 1, changed)

    def _decide(self, verdict: Verdict) -> tuple[Decision, tuple[Said, ...]]:
        if self.signals.caught:
            return stop(Message("runs.was-asked-to-stop")), ()
        decision = decide(verdict, self.records, self.policy, self.trainer.precision)
        try:
            return self.trainer.carry_out(decision, verdict, self.records)
        except UserError as error:
            return stop(error.said), ()

    def _fail_to_start(self, last: Outcome, sentence: Said) -> RunResult:
        """What an attempt needs is not there any more: a GPU that somebody else has taken meanwhile."""
        failure = Failure(rank=0, is_users=False, sentence=sentence, tail=(), log=None)
        outcome = replace(last, state="failed", exit_code=FAILED, failure=failure)
        self._close(Attempt(outcome=outcome, exit_codes=()))
        self._write(replace(self.records[-1], next=Next(action="stop", because=sentence)))
        return self._make_result(outcome, because=sentence)

    def _make_result(self, outcome: Outcome, verdict: Verdict | None = None, because: Said = "") -> RunResult:
        return RunResult(outcome=outcome, records=tuple(self.records), verdict=verdict, because=because)

    # --- records --------------------------------------------------------------------------------

    def _write(self, record: AttemptRecord) -> None:
        self.records[record.number - 1 :] = [record]
        attempts.write_attempt(self.folder, record)

    def _close(self, attempt: Attempt) -> None:
        state = attempt.outcome.state
        self._write(
            replace(
                self.records[-1],
                ended=attempts.now(),
                state="failed" if state == "user error" else state,
                exit_codes=attempt.exit_codes,
                first_step=attempt.first_step,
                last_step=attempt.last_step,
                kept_step=self.trainer.kept_step,
                cause=None if attempt.verdict is None else to_record(attempt.verdict),
            )
        )

    def _note(self, decision: Decision, changed: tuple[Said, ...], verdict: Verdict) -> None:
        following = Next(action=decision.action, because=decision.because, changed=changed, wait_s=decision.wait_s)
        record = replace(self.records[-1], next=following)
        self._write(record)
        failed = AttemptFailed(
            number=record.number,
            kind=verdict.kind,
            text=verdict.cause,
            step=record.last_step,
            kept_step=record.kept_step,
            action=decision.action,
            because=decision.because,
            wait_s=decision.wait_s,
        )
        self.trainer.after_failure(failed, changed)
