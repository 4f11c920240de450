"""The one loop, with a trainer that only plays: what it asks of a trainer, in which order, and what it writes down."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tightfit.diagnose.verdict import Kind, Verdict
from tightfit.runs.events import AttemptFailed, Tally
from tightfit.runs.records import AttemptRecord, read_attempts
from tightfit.runs.run import Outcome, Signals, State
from tightfit.runs.supervise import Attempt, Decision, Policy, RunResult, Supervisor, stop
from tightfit.types import ConfigError, HardwareError


def played(state: State = "failed", kind: Kind = "communication", *, code: int = 1, last: int | None = None) -> Attempt:
    verdict = Verdict(id="x", kind=kind, cause="It broke.", confidence="likely", evidence=(), fixes=())
    outcome = Outcome(state=state, exit_code=code, failure=None, tally=Tally())
    return Attempt(outcome=outcome, exit_codes=(code,), verdict=verdict if state == "failed" else None, last_step=last)


DONE = played("done", code=0)


@dataclass
class Player:
    script: list[Attempt | Exception]
    """One for each attempt."""
    refuses: str | None = None
    kept_step: int | None = None
    words: str = "a play"
    ranks: int = 1
    effective_batch: int | None = 4
    precision: str = "bf16"
    said: list[str] = field(default_factory=list)

    @property
    def course(self) -> Player:
        return self

    def attempt(self, number: int) -> Attempt:
        self.said.append(f"attempt {number}")
        following = self.script[number - 1]
        if isinstance(following, Exception):
            raise following
        return following

    def carry_out(self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]) -> Decision:
        self.said.append(f"{decision.action} after {verdict.kind} in {len(records)}")
        if self.refuses is not None:
            raise HardwareError(self.refuses)
        return replace(decision, wait_s=0.0, changed=("a lever",))

    def after_failure(self, failed: AttemptFailed, changed: tuple[str, ...]) -> None:
        self.said.append(f"{failed.number} failed, {failed.action}: {failed.text}")

    def before_next(self, number: int, changed: tuple[str, ...]) -> None:
        self.said.append(f"next {number}: {', '.join(map(str, changed))}")


def supervised(player: Player, folder: Path, signals: Signals | None = None, **policy: int) -> RunResult:
    return Supervisor(trainer=player, folder=folder, policy=Policy(**policy), signals=signals or Signals()).run()


def test_an_attempt_that_fails_is_judged_carried_out_told_and_followed_by_another(tmp_path: Path) -> None:
    player = Player([played(last=3), DONE])
    ended = supervised(player, tmp_path)
    assert player.said == [
        "attempt 1",
        "same plan after communication in 1",
        "1 failed, same plan: It broke.",
        "next 2: a lever",
        "attempt 2",
    ]
    assert (ended.outcome.state, ended.verdict, ended.because) == ("done", None, "")
    first, second = read_attempts(tmp_path)
    assert ended.records == (first, second)
    assert (first.state, first.last_step, first.exit_codes, second.state) == ("failed", 3, (1,), "done")
    assert first.next is not None
    assert first.next.changed == ("a lever",)


def test_what_cannot_be_carried_out_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    ended = supervised(Player([played()], refuses="the GPU is gone: wait"), tmp_path)
    assert (ended.outcome.state, ended.because) == ("failed", "the GPU is gone: wait")
    assert ended.verdict is not None
    (record,) = read_attempts(tmp_path)
    assert record.next is not None
    assert (record.next.action, record.next.because) == ("stop", "the GPU is gone: wait")


def test_attempts_are_counted_for_every_trainer(tmp_path: Path) -> None:
    player = Player([played(last=number) for number in range(1, 9)])
    ended = supervised(player, tmp_path, max_attempts=3)
    assert len(ended.records) == 3
    assert "3 attempts in a row" in str(ended.because)


def test_a_first_start_that_is_refused_is_the_users_and_a_later_one_is_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no program"):
        supervised(Player([ConfigError("there is no program")]), tmp_path)
    ended = supervised(Player([played(), HardwareError("GPU 0 was just taken")]), tmp_path)
    assert (ended.outcome.state, ended.outcome.exit_code, ended.because) == ("failed", 3, "GPU 0 was just taken")
    assert ended.outcome.failure is not None
    assert [record.state for record in ended.records] == ["failed", "failed"]


@pytest.mark.parametrize("when", ["while it ran", "while it waited"])
def test_whoever_is_asked_to_stop_starts_nothing_again(tmp_path: Path, when: str) -> None:
    signals = Signals()

    class Asked(Player):
        def attempt(self, number: int) -> Attempt:
            signals.caught += [(signal.SIGINT, time.monotonic())] if when == "while it ran" else []
            return super().attempt(number)

        def before_next(self, number: int, changed: tuple[str, ...]) -> None:
            raise AssertionError("nothing is started again")

        def after_failure(self, failed: AttemptFailed, changed: tuple[str, ...]) -> None:
            signals.caught += [(signal.SIGINT, time.monotonic())] if when == "while it waited" else []

    ended = supervised(Asked([played(), DONE]), tmp_path, signals)
    assert str(ended.because) == "it was asked to stop"
    assert ended.outcome.state == ("failed" if when == "while it ran" else "interrupted")
    assert len(ended.records) == 1


def test_a_trainer_may_stop_where_the_decision_would_go_on(tmp_path: Path) -> None:
    class Careful(Player):
        def carry_out(self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]) -> Decision:
            return stop("nothing is known to resume")

    ended = supervised(Careful([played()]), tmp_path)
    assert (ended.outcome.exit_code, ended.because) == (1, "nothing is known to resume")
