"""Where ranks stand that give no sign of life: the stack dumps that they are asked for, read from their logs.

A rank that is asked by `DUMP` writes the stacks of all its threads to its log, whatever it is doing: the handler is C
code and needs nothing of the interpreter. The ranks that wait stand in a collective; the one that they wait for stands
elsewhere.

A group of ranks that does not move any more: every one says where it stands, before they are ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.messages import Message
from tightfit.runs.heartbeat import Beat, Quiet
from tightfit.runs.launch import LOOK_S, Ranks

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_MAIN = re.compile(r"tightfit/train/__main__\.py$")
_WAITING = re.compile(r"/torch/distributed/|/deepspeed/comm/|/torch/_C/|tightfit/train/place\.py$")
_WRITING = re.compile(r"tightfit/train/(?:checkpoint|saved_model)\.py$|tightfit/runs/disk\.py$")
_BATON = re.compile(r"/torch/utils/file_baton\.py$")
_INNER = re.compile(r"/(?:threading|concurrent/futures/\w+|selectors)\.py$|^<frozen ")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def words(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where one rank's threads stand that matter: the innermost frame first."""

    rank: int
    main: tuple[Frame, ...]  # of the thread that trains
    writer: tuple[Frame, ...] = ()
    """Of the thread that writes a checkpoint; empty: there is none, or it has nothing to do."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        frames = self.writer or self.main
        return any(_WAITING.search(frame.file) for frame in frames[:6])

    @property
    def waits_for_a_build(self) -> bool:
        """Whether it waits for torch's lock on a part that is being compiled."""
        return any(_BATON.search(frame.file) for frame in self.main[:6])

    @property
    def place(self) -> Frame | None:
        """The frame that tells most: not the lock that a thread waits at."""
        frames = self.writer or self.main
        return next((frame for frame in frames if not _INNER.search(frame.file)), frames[0] if frames else None)


def read_stand(rank: int, log: Path, start: int) -> Stand | None:
    """What the dump says that came into the log after `start` bytes; None: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (at := _FRAME.match(line)):
            found[-1].append(Frame(file=at["file"], line=int(at["line"]), name=at["name"]))
    threads = [tuple(each) for each in found if each]
    if not threads:
        return None
    began = [each for each in threads if any(frame.name == "<module>" and _MAIN.search(frame.file) for frame in each)]
    main = began[0] if began else threads[-1]
    writers = [each for each in threads if each is not main and any(_WRITING.search(frame.file) for frame in each)]
    return Stand(rank=rank, main=main, writer=writers[0] if writers else ())


def odd_one(stands: Sequence[Stand]) -> int | None:
    """The rank that stands elsewhere while all others wait; None: the stacks do not tell."""
    busy = [stand.rank for stand in stands if not stand.waits]
    return busy[0] if len(busy) == 1 and len(stands) > 1 else None


# --- a group of ranks that does not move any more ------------------------------------------------


DUMP_S = 3.0  # for all ranks to write down their stacks; one that the kernel holds never does
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """Who hangs, and where everybody stands."""

    quiet: Quiet
    stands: tuple[Stand, ...]  # of the ranks that said it

    @property
    def rank(self) -> int:
        """The one that the others wait for: alone behind, alone not waiting, or alone without an answer."""
        behind = [beat.rank for beat in self.quiet.beats if beat.progress == self.beat_of(self.quiet.rank).progress]
        if len(behind) == 1 and len(self.quiet.beats) > 1:
            return behind[0]
        mute = [beat.rank for beat in self.quiet.beats if beat.rank not in {stand.rank for stand in self.stands}]
        if len(mute) == 1 and self.stands and all(stand.waits for stand in self.stands):
            return mute[0]  # stopped, or held by the kernel
        found = odd_one(self.stands)
        return self.quiet.rank if found is None else found

    @property
    def beat(self) -> Beat:
        return self.beat_of(self.rank)

    @property
    def place(self) -> Frame | None:
        """The frame in which that rank stands; None: it did not say."""
        return next((stand.place for stand in self.stands if stand.rank == self.rank), None)

    @property
    def sentence(self) -> Message:
        said = {"rank": self.rank, "silent_s": self.quiet.silent_s, "where": self.beat.where}
        if self.place is not None:
            return Message("runs.hangs-at", place=self.place.words, **said)
        return Message("runs.hangs-mute" if self.stands else "runs.hangs", **said)

    def beat_of(self, rank: int) -> Beat:
        return next(beat for beat in self.quiet.beats if beat.rank == rank)


def ask_for_stacks(ranks: Ranks, quiet: Quiet) -> Hung:
    """Ask every rank that can hear it for its stacks, and read them."""
    listening = {beat.rank for beat in quiet.beats}
    logs = {start.rank: start.log for start in ranks.starts if start.rank in listening}
    sizes = {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}
    ranks.dump(listening)
    deadline, stands = time.monotonic() + DUMP_S, dict[int, Stand]()
    while time.monotonic() < deadline and len(stands) < len(logs):
        time.sleep(LOOK_S)
        for rank in set(logs) - set(stands):
            if (found := read_stand(rank, logs[rank], sizes[rank])) is not None:
                stands[rank] = found
    time.sleep(_SETTLE_S)  # a dump is written line by line, the thread that trains last
    whole = [read_stand(rank, logs[rank], sizes[rank]) or stand for rank, stand in sorted(stands.items())]
    return Hung(quiet=quiet, stands=tuple(whole))
