"""One run from its first process to its last: start, follow, stop, end, and say how it ended.

The first signal asks the ranks to save a checkpoint at their next step and to leave by themselves, which takes as long
as a step and a save; the run is followed meanwhile. The second one ends them.

When one rank fails the others fail after it, with errors about lost connections that say nothing. A rank that leaves
in distress writes `errors/rank-N.json` with the moment; one that was killed writes nothing, and the moment at which it
was found ended stands for it. Words about a lost neighbour come last, whenever they were said.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.messages import Message, Said
from tightfit.runs.events import Event, Follower, Stopping, Tally
from tightfit.runs.hang import Hung, Watch, ask_for_stacks
from tightfit.runs.heartbeat import DISK_FULL
from tightfit.runs.launch import GRACE_S, LOOK_S, Exit, NodeTrouble, Ranks, RankStart
from tightfit.runs.records import USERS, LastWords, RunFolder, read_last_words

USER = 2  # the exit code of a worker whose user has to change something
TAIL_LINES = 15
TRACEBACK_LINES = 80
_TAIL_BYTES = 16_384
_FULL_BYTES = 16_384  # with less than this a disk takes no file any more
_PEER = re.compile(
    r"closed by peer|connection (was )?(reset|closed|refused)|broken pipe|remote process|"
    r"socket timeout|timed out|ncclRemoteError|NCCL communicator was aborted|unhandled system error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    rank: int
    is_users: bool  # the user's to mend: the sentence says how
    sentence: Said
    tail: tuple[str, ...]  # the last lines of that rank's log
    log: Path | None  # None: it ran on another machine
    is_disk_full: bool = False  # a disk took nothing any more


def first_failure(exits: Sequence[Exit], starts: Sequence[RankStart], words: Sequence[LastWords]) -> Failure:
    """The failure that came before the others. `exits` are those that were seen before any was ended by us."""
    start_of = {start.rank: start for start in starts}
    # Words about a lost neighbour are about another rank's failure.
    said = [
        each
        for each in words
        if each.kind in USERS or (each.kind != "peer" and not (isinstance(each.text, str) and _PEER.search(each.text)))
    ]
    killed = [gone for gone in exits if gone.code < 0]
    silent = [gone for gone in exits if gone.code != 0 and gone.start.rank not in {each.rank for each in words}]
    told = min(said or words, key=lambda each: each.at, default=None)
    fell = min(killed, key=lambda gone: gone.at, default=None)
    if told is not None and (fell is None or (said and told.at <= fell.at - LOOK_S)):
        start = start_of.get(told.rank)
        return _failure(told.rank, start, told.text, is_users=told.kind in USERS, is_disk_full=told.kind == DISK_FULL)
    # One that was killed had no time for words; one that left with a code and without words has seen others fail.
    gone = fell or min(silent or [each for each in exits if each.code], key=lambda each: each.at)
    is_users, tail = gone.code == USER, tail_of(gone.start.log)
    is_disk_full = False
    with suppress(OSError):  # nothing that it said could be written
        is_disk_full = gone.code >= 0 and shutil.disk_usage(gone.start.log.parent).free < _FULL_BYTES
    who = gone.start.shown
    sentence: Said
    if is_disk_full:
        sentence = Message("runs.disk-of-is-full", who=who, folder=gone.start.log.parent.parent)
    elif is_users and tail:
        sentence = tail[-1]
    elif gone.code >= 0:
        sentence = Message("runs.exited", who=who, code=gone.code)
    else:
        id_, name = "runs.killed" if -gone.code == signal.SIGKILL else "runs.crashed", f"signal {-gone.code}"
        with suppress(ValueError):  # one without a name
            name = signal.Signals(-gone.code).name
        sentence = Message(id_, who=who, signal=name)
    return _failure(gone.start.rank, gone.start, sentence, is_users=is_users, is_disk_full=is_disk_full)


def _failure(rank: int, start: RankStart | None, sentence: Said, *, is_users: bool, is_disk_full: bool) -> Failure:
    log = None if start is None else start.log
    return Failure(
        rank=rank,
        is_users=is_users,
        sentence=sentence,
        tail=() if log is None else tail_of(log),
        log=log,
        is_disk_full=is_disk_full,
    )


def tail_of(log: Path) -> tuple[str, ...]:
    """The last lines of a log, without what would steer a terminal."""
    return _last_lines(log, _TAIL_BYTES)[-TAIL_LINES:]


def traceback_in(log: Path) -> tuple[str, ...]:
    """The last traceback of a log, from its first line on; empty: there is none."""
    lines = _last_lines(log, 4 * _TAIL_BYTES)
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[begins[-1] :][-TRACEBACK_LINES:] if begins else ()


def _last_lines(log: Path, most_bytes: int) -> tuple[str, ...]:
    text = read_tail(log, most_bytes).decode("utf-8", errors="replace")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    plain = ["".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines]
    return tuple(line[:400] for line in plain if line)


def read_tail(log: Path, most_bytes: int) -> bytes:
    """The end of a file; nothing, where it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - most_bytes))
        return file.read()
    return b""


# --- the run -------------------------------------------------------------------------------------


DONE, FAILED, STOPPED = 0, 3, 4
"""STOPPED is what a rank leaves with that has saved a checkpoint before the end, and the desk after it."""
ENDED_BY_REQUEST = (128 + signal.SIGTERM, -signal.SIGTERM)
"""What a rank leaves with that was asked to stop and had nothing to save; the second: before it could listen."""
STRAGGLER_S = 600.0  # a rank leaves together with the others. One that stays so much longer will stay for ever
LAST_WORDS_S = 0.3
"""Time for ranks that fail together to end by themselves, so that the first can be told from the others."""
STOP_PATIENCE_S = math.inf
"""For a step and a save after the first signal, on whatever disk; a second signal, or the scheduler, ends the wait."""
AGAIN_S = 1.0
"""A shell, a wrapper and a terminal that closes may all pass on the same wish: what comes so soon after the first
signal is no second one. Longer than the ranks' own measure of this, which counts from a later moment."""

State = Literal["done", "stopped", "user error", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    state: State
    exit_code: int
    failure: Failure | None
    tally: Tally
    exits: tuple[Exit, ...] = ()  # of the ranks that ended by themselves, the first one first
    every: tuple[Exit, ...] = ()  # of all ranks
    words: tuple[LastWords, ...] = ()  # what ranks wrote before they left
    hung: Hung | None = None  # they were ended because they did not move any more; None: not for that
    trouble: NodeTrouble | None = None  # or because a whole node could not go on
    pids: tuple[int, ...] = ()  # of all ranks


class Signals:
    """Notes the signals that ask the desk to end, for as long as ranks run: they have to be asked first."""

    def __init__(self) -> None:
        self.caught: list[tuple[int, float]] = []  # their numbers and moments
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # nobody else may
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                    self._before[number] = signal.signal(
                        number, lambda which, _: self.caught.append((which, time.monotonic()))
                    )
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def times(self) -> int:
        wishes: list[float] = []
        for _, at in self.caught:
            if not wishes or at - wishes[-1] >= AGAIN_S:
                wishes.append(at)
        return len(wishes)

    def have_come(self) -> bool:
        return bool(self.caught)

    @property
    def exit_code(self) -> int:
        """As a shell says it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.caught[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What a supervisor brings along to each of a run's attempts."""

    signals: Signals  # which listen already
    watch: Watch
    tally: Tally  # with what the attempts before have left that still counts
    gather: Callable[[Sequence[RankStart], Path], Ranks] = Ranks  # how its ranks are started, here or on several nodes


def run(
    starts: Sequence[RankStart],
    folder: RunFolder,
    show: Callable[[Event], None],
    *,
    cwd: Path | None = None,
    grace_s: float = GRACE_S,
    patience_s: float = STOP_PATIENCE_S,
    company: Company | None = None,
) -> Outcome:
    """Start the ranks and stay with them to the end; `show` gets every event as it comes."""
    follower, began = Follower(folder.events), time.time()
    signals, tally = (Signals(), Tally()) if company is None else (company.signals, company.tally)
    hung: list[Hung] = []

    def pass_on(events: list[Event]) -> None:
        for event in events:
            tally.add(event)
            if not signals.caught:
                show(event)
                continue
            with suppress(OSError):  # a terminal that has closed must not cost the checkpoint
                show(event)

    def ask() -> None:
        ranks.ask()
        saves = tally.began and all(start.saves for start in starts)
        pass_on([Stopping(text=Message("runs.stops-saving") if saves else Message("runs.stops-ending"))])

    def look() -> bool:
        pass_on(follower.poll())
        if company is not None:
            # What a step takes; the first ones have to do until there are more.
            step_s = tally.step_s or (None if tally.last is None else tally.last.step_s)
            quiet = company.watch.look(step_s)
            hung.extend([] if quiet is None else [ask_for_stacks(ranks, quiet)])
        return bool(hung) or ranks.find_trouble() is not None

    listening, gather = (signals, Ranks) if company is None else (nullcontext(), company.gather)
    with listening, gather(starts, cwd or folder.plan) as ranks:
        _stay(ranks, signals, look, ask, patience_s)
        trouble = ranks.find_trouble() if ranks.running else None
        before = list(ranks.exits)
        words = [each for each in ranks.set_clocks(read_last_words(folder.errors, 0.0)) if each.at >= began]
        wishes = max(1, signals.times)
        ranks.end(grace_s, hurry=lambda: signals.times > wishes)
        pass_on(follower.rest())
    codes = {gone.code for gone in before}
    late = [gone for gone in ranks.exits if gone not in before]
    # Whether one left at the first signal. What the others say after that is about the one that they miss.
    obeyed = any(
        gone.code in ENDED_BY_REQUEST or (gone.code not in (DONE, STOPPED) and not gone.start.saves) for gone in before
    )
    state: State
    failure: Failure | None = None
    if signals.caught and (obeyed or (late and not codes - {DONE, STOPPED})):
        state, code = "interrupted", signals.exit_code
    elif trouble is not None:
        start = next((start for start in starts if start.rank == trouble.rank), None)
        is_users = trouble.is_users
        failure = _failure(trouble.rank, start, trouble.sentence, is_users=is_users, is_disk_full=False)
        state, code = ("user error", USER) if is_users else ("failed", FAILED)
    elif codes - {DONE, STOPPED}:
        failure = first_failure(before, starts, words)
        state, code = ("user error", USER) if failure.is_users else ("failed", FAILED)
    elif hung:
        start = next((start for start in starts if start.rank == hung[0].rank), None)
        failure = _failure(hung[0].rank, start, hung[0].sentence, is_users=False, is_disk_full=False)
        state, code = "failed", FAILED
    elif late:
        start = late[0].start
        sentence = Message("runs.straggler", who=start.shown, seconds=STRAGGLER_S)
        failure = Failure(rank=start.rank, is_users=False, sentence=sentence, tail=(), log=start.log)
        state, code = "failed", FAILED
    else:
        state, code = ("stopped", STOPPED) if STOPPED in codes else ("done", DONE)
    return Outcome(
        state=state,
        exit_code=code,
        failure=failure,
        tally=tally,
        exits=tuple(before),
        every=tuple(ranks.exits),
        words=tuple(words),
        hung=hung[0] if hung else None,
        trouble=trouble,
        pids=tuple(ranks.pids),
    )


def _stay(ranks: Ranks, signals: Signals, look: Callable[[], bool], ask: Callable[[], None], patience_s: float) -> None:
    """Until the first failure or the last rank's end; once a signal has come, until the second or the end of patience.

    `look` follows the run, and is true when it hangs; `ask` asks it to stop.
    """
    first_end: float | None = None
    asked_at: float | None = None
    while ranks.running and signals.times < 2:
        if look():
            return
        if signals.caught and asked_at is None:
            asked_at = time.monotonic()
            ask()
        ended = ranks.poll()
        if any(gone.code not in (DONE, STOPPED) for gone in ended):
            deadline = time.monotonic() + LAST_WORDS_S
            while ranks.running and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                ranks.poll()
            return
        now = time.monotonic()
        if ended and first_end is None:
            first_end = now
        if first_end is not None and ranks.running and now - first_end > STRAGGLER_S:
            return
        if asked_at is not None and now - asked_at > patience_s:
            return
        time.sleep(LOOK_S)
