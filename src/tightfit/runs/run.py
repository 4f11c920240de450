"""One run from its first process to its last: start, follow, end, and say how it ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from tightfit.runs.events import Event
from tightfit.runs.failure import USER, Failure, LastWords, first_failure, last_words
from tightfit.runs.folder import RunFolder
from tightfit.runs.follow import Follower
from tightfit.runs.launch import GRACE_S, LOOK_S, Exit, Ranks, RankStart
from tightfit.runs.tally import Tally

DONE, FAILED = 0, 3
STRAGGLER_S = 600.0
"""A rank leaves together with the others. One that stays so much longer will stay for ever."""
LAST_WORDS_S = 0.3
"""Time for ranks that fail together to end by themselves, so that the first can be told from the others."""

State = Literal["done", "user error", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: State
    exit_code: int
    failure: Failure | None
    tally: Tally


class Signals:
    """Notes the signals that ask the desk to end, for as long as ranks run: they have to be ended first."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # nobody else may
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)

    @property
    def exit_code(self) -> int:
        """As a shell says it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.caught[0]


def run(
    starts: Sequence[RankStart],
    folder: RunFolder,
    show: Callable[[Event], None],
    *,
    cwd: Path | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Start the ranks and stay with them to the end; `show` gets every event as it comes."""
    tally, follower, began = Tally(), Follower(folder.events), time.time()

    def pass_on(events: list[Event]) -> None:
        for event in events:
            tally.add(event)
            show(event)

    with Signals() as signals, Ranks(starts, cwd or folder.plan) as ranks:
        _stay(ranks, signals, lambda: pass_on(follower.poll()))
        before, words = list(ranks.exits), last_words(folder.errors, began)
        ranks.end(grace_s, hurry=lambda: len(signals.caught) > 1)
        pass_on(follower.rest())
    ending = _Ending(starts=starts, before=before, every=ranks.exits, words=words)
    return _outcome(ending, signals, tally)


def _stay(ranks: Ranks, signals: Signals, look: Callable[[], None]) -> None:
    """Until the first failure, a signal, or the last rank's end."""
    first_end: float | None = None
    while ranks.running and not signals.caught:
        look()
        ended = ranks.poll()
        if any(gone.code for gone in ended):
            deadline = time.monotonic() + LAST_WORDS_S
            while ranks.running and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                ranks.poll()
            return
        if ended and first_end is None:
            first_end = time.monotonic()
        if first_end is not None and ranks.running and time.monotonic() - first_end > STRAGGLER_S:
            return
        time.sleep(LOOK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What is known of the ranks at the end."""

    starts: Sequence[RankStart]
    before: Sequence[Exit]
    """Those that ended by themselves."""
    every: Sequence[Exit]
    words: tuple[LastWords, ...]


def _outcome(ending: _Ending, signals: Signals, tally: Tally) -> Outcome:
    if any(gone.code for gone in ending.before):
        failure = first_failure(ending.before, ending.starts, ending.words)
        state: State = "user error" if failure.is_users else "failed"
        code = USER if failure.is_users else FAILED
        return Outcome(state=state, exit_code=code, failure=failure, tally=tally)
    if signals.caught:
        return Outcome(state="interrupted", exit_code=signals.exit_code, failure=None, tally=tally)
    late = [gone for gone in ending.every if gone not in ending.before]
    if late:
        failure = Failure(
            rank=late[0].start.rank,
            is_users=False,
            sentence=f"{late[0].start.name.replace('-', ' ')} went on for {STRAGGLER_S:.0f} s after others had ended",
            tail=(),
            log=late[0].start.log,
        )
        return Outcome(state="failed", exit_code=FAILED, failure=failure, tally=tally)
    return Outcome(state="done", exit_code=DONE, failure=None, tally=tally)
