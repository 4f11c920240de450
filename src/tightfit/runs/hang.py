"""Ranks that give no sign of life: for how long they may, and where all of them stand before they are ended.

How long a rank may be silent depends on what it does. Preparing may mean a download of hours, for which the others wait
as well: there is no limit. Building the model, saving and evaluating have generous ones, since nobody can tell how long
they take here. A step has shown how long it takes: it may take twenty times that.

A rank that is asked by `DUMP` writes the stacks of all its threads to its log, whatever it is doing: the handler is C
code and needs nothing of the interpreter. The ranks that wait stand in a collective; the one that they wait for stands
elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tightfit.messages import Message
from tightfit.runs.heartbeat import Beat, Stage, read_beat
from tightfit.runs.launch import LOOK_S, Ranks

LEAST_S = 300.0
STEPS = 20  # a step may take so many times as long as the steps before it
START_S = 1800.0  # to build the model, and for a first step, which may compile
LONG_S = 6 * 3600.0  # to save and to evaluate: what a slow disk is given elsewhere too
_LOOK_S = 0.5
DUMP_S = 3.0  # for all ranks to write down their stacks; one that the kernel holds never does
_SETTLE_S = 0.3
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_MAIN = re.compile(r"tightfit/train/__main__\.py$")
_WAITING = re.compile(r"/torch/distributed/|/deepspeed/comm/|/torch/_C/|tightfit/train/place\.py$")
_WRITING = re.compile(r"tightfit/train/(?:checkpoint|saved_model)\.py$|tightfit/runs/disk\.py$")
_BATON = re.compile(r"/torch/utils/file_baton\.py$")
_INNER = re.compile(r"/(?:threading|concurrent/futures/\w+|selectors)\.py$|^<frozen ")
_MOST_BYTES = 1 << 20


class Frame(NamedTuple):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """Who hangs, and where everybody stands."""

    silent_s: float
    beats: tuple[Beat, ...]  # of all ranks, the first one first
    stands: tuple[Stand, ...] = ()  # of the ranks that said it

    @property
    def rank(self) -> int:
        """The one that the others wait for: alone behind, alone without an answer, or alone not waiting."""
        least = min(beat.progress for beat in self.beats)
        behind = [beat.rank for beat in self.beats if beat.progress == least]
        if len(behind) == 1 and len(self.beats) > 1:
            return behind[0]
        mute = [beat.rank for beat in self.beats if beat.rank not in {stand.rank for stand in self.stands}]
        if len(mute) == 1 and self.stands and all(stand.waits for stand in self.stands):
            return mute[0]  # stopped, or held by the kernel
        busy = [stand.rank for stand in self.stands if not stand.waits]
        return busy[0] if len(busy) == 1 and len(self.stands) > 1 else behind[0]

    @property
    def beat(self) -> Beat:
        return next(beat for beat in self.beats if beat.rank == self.rank)

    @property
    def place(self) -> Frame | None:
        """The frame in which that rank stands; None: it did not say."""
        return next((stand.place for stand in self.stands if stand.rank == self.rank), None)

    @property
    def sentence(self) -> Message:
        said = {"rank": self.rank, "silent_s": self.silent_s, "where": self.beat.where}
        if self.place is not None:
            return Message("runs.hangs-at", place=self.place.words, **said)
        return Message("runs.hangs-mute" if self.stands else "runs.hangs", **said)


class Watch:
    """Sees the beats of the ranks of one attempt."""

    def __init__(
        self,
        run: Path,
        ranks: Sequence[int],
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Path, int], Beat | None] = read_beat,
    ) -> None:
        """`timeout_s`: what the user allows a step, an evaluation and a save; None: judged by what they are."""
        self._run, self._ranks, self._timeout, self._clock, self._read = run, ranks, timeout_s, clock, read
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._looked = -_LOOK_S

    def look(self, step_s: float | None) -> Hung | None:
        """Whether a rank is silent for too long; `step_s`: what a step takes, where one was made."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return None
        self._looked = now
        for rank in self._ranks:
            beat, known = self._read(self._run, rank), self._seen.get(rank)
            if beat is not None and (known is None or known[0] != beat):
                self._seen[rank] = beat, now
        silent = [
            now - at
            for beat, at in self._seen.values()
            if (limit := self.limit(beat.stage, step_s)) is not None and now - at > limit
        ]
        beats = sorted((beat for beat, _ in self._seen.values()), key=lambda beat: beat.rank)
        return Hung(silent_s=max(silent), beats=tuple(beats)) if silent else None

    def beats(self) -> tuple[Beat, ...]:
        """Where the ranks stand now, or stood when they ended."""
        found = (self._read(self._run, rank) for rank in self._ranks)
        return tuple(beat for beat in found if beat is not None)

    def limit(self, stage: Stage, step_s: float | None) -> float | None:
        """Seconds without a sign of life after which a rank hangs; None: none is too long."""
        if stage == "prepare":
            return None
        if stage in ("init", "end"):
            return max(START_S, self._timeout or 0.0)
        if self._timeout is not None:
            return self._timeout
        if stage in ("save", "eval"):
            return LONG_S
        return START_S if step_s is None else max(LEAST_S, STEPS * step_s)


def ask_for_stacks(ranks: Ranks, hung: Hung) -> Hung:
    """The same with the stacks of every rank that could hear the question."""
    listening = {beat.rank for beat in hung.beats}
    logs = {start.rank: start.log for start in ranks.every_start if start.rank in listening}
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
    return replace(hung, stands=tuple(whole))
