"""Which rank failed first, and what it said.

When one rank fails the others fail after it, with errors about lost connections that say nothing. A rank that leaves
in distress writes `errors/rank-N.json` with the moment; one that was killed writes nothing, and the moment at which it
was found ended stands for it. Words about a lost neighbour come last, whenever they were said.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.messages import Message, Said
from tightfit.runs.heartbeat import DISK_FULL
from tightfit.runs.last_words import USERS, LastWords
from tightfit.runs.launch import LOOK_S, Exit, RankStart

USER = 2
"""The exit code of a worker whose user has to change something."""
TAIL_LINES = 15
TRACEBACK_LINES = 80
_TAIL_BYTES = 16_384
_FULL_BYTES = 16_384
"""With less than this a disk takes no file any more."""
_PEER = re.compile(
    r"closed by peer|connection (was )?(reset|closed|refused)|broken pipe|remote process|"
    r"socket timeout|timed out|ncclRemoteError|NCCL communicator was aborted|unhandled system error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first failure of a run."""

    rank: int
    is_users: bool
    """The user's to mend: the sentence says how."""
    sentence: Said
    tail: tuple[str, ...]
    """The last lines of that rank's log."""
    log: Path | None
    """None: it ran on another machine."""
    is_disk_full: bool = False
    """A disk took nothing any more."""


def first_failure(exits: Sequence[Exit], starts: Sequence[RankStart], words: Sequence[LastWords]) -> Failure:
    """The failure that came before the others. `exits` are those that were seen before any was ended by us."""
    start_of = {start.rank: start for start in starts}
    said = [each for each in words if not _is_echo(each)]
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
    is_disk_full = gone.code >= 0 and _is_full(gone.start.log.parent)  # nothing that it said could be written
    who = gone.start.shown
    sentence: Said
    if is_disk_full:
        sentence = Message("runs.disk-of-is-full", who=who, folder=gone.start.log.parent.parent)
    elif is_users and tail:
        sentence = tail[-1]
    elif gone.code >= 0:
        sentence = Message("runs.exited", who=who, code=gone.code)
    else:
        id_ = "runs.killed" if -gone.code == signal.SIGKILL else "runs.crashed"
        sentence = Message(id_, who=who, signal=_signal_name(-gone.code))
    return _failure(gone.start.rank, gone.start, sentence, is_users=is_users, is_disk_full=is_disk_full)


def _is_echo(words: LastWords) -> bool:
    """Words about a lost neighbour, which are about another rank's failure."""
    return words.kind == "peer" or (
        words.kind not in USERS and isinstance(words.text, str) and _PEER.search(words.text) is not None
    )


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
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    plain = ["".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines]
    return tuple(line[:400] for line in plain if line)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
