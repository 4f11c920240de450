"""Signs of life: each rank keeps a small file that says where it stands, and the desk sees whether it changes.

    heartbeats/rank-N    `17 forward 4 1`: how often it has been written, stage, step, micro batch

The file has one length and is written in place, so that a beat costs one call and a full disk takes it too: that the
disk is full can be said here and nowhere else, as a fifth word. The desk never compares clocks: it notes when it saw a
file change, so ranks on other machines may have other ones.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tightfit.inputs.spelling import open_regular
from tightfit.messages import Message
from tightfit.owned import open_own
from tightfit.types import PhaseName

Stage = Literal["prepare", "init", "forward", "backward", "step", "vote", "save", "eval", "end"]
"""Where a rank may stand, in the order in which it gets there within a step."""
STAGES: tuple[Stage, ...] = get_args(Stage)
PHASES: Mapping[Stage, PhaseName] = {
    "init": "init", "forward": "forward", "backward": "backward", "step": "step", "vote": "step", "save": "save",
    "eval": "eval",
}  # fmt: skip
"""The phase of the memory model in which a rank stands; the others are in none."""
HEARTBEATS = "heartbeats"
DISK_FULL = "disk-full"  # a last word
DUMP = signal.SIGUSR2  # asks a rank for its stacks: see `hang.py`
_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    rank: int
    count: int
    stage: Stage
    step: int  # the one that is being made, from 1; 0: none yet
    micro: int = 0  # the micro batch, from 0
    last_word: str | None = None  # why it ended; None: it said nothing, or said it elsewhere

    @property
    def progress(self) -> tuple[int, int, int]:
        """Greater: further on."""
        inside = self.micro if self.stage in ("forward", "backward") else 1 << 30
        return self.step, inside, STAGES.index(self.stage)

    @property
    def where(self) -> Message:
        """`in the forward pass of step 4`"""
        if self.stage in ("prepare", "init", "end") or (self.stage == "save" and not self.step):
            return _WITHOUT_STEP[self.stage]
        return Message(_IN_STEP[self.stage], step=self.step)


_WITHOUT_STEP: Mapping[Stage, Message] = {
    "prepare": Message("runs.in-prepare"),
    "init": Message("runs.in-init"),
    "save": Message("runs.in-save-model"),
    "end": Message("runs.in-end"),
}
_IN_STEP: Mapping[Stage, str] = {
    "forward": "runs.in-forward",
    "backward": "runs.in-backward",
    "step": "runs.in-step",
    "vote": "runs.in-vote",
    "save": "runs.in-save",
    "eval": "runs.in-eval",
}


class Heartbeat:
    """A rank's own: whoever works says where. Any thread may."""

    def __init__(self, run: Path, rank: int) -> None:
        path = beat_path(run, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(path, "wb") as file:
            self._file = os.dup(file.fileno())
        self._lock, self._count = threading.Lock(), 0
        self._at: tuple[Stage, int, int] = ("prepare", 0, 0)
        self.beat()

    def at(self, stage: Stage, step: int = 0, micro: int = 0) -> None:
        self._at = (stage, step, micro)
        self.beat()

    def beat(self, last_word: str = "") -> None:
        """Still there, and still at it; or why not."""
        with self._lock, suppress(OSError):  # a disk that is gone for a moment is no reason to stop training
            self._count += 1
            text = f"{self._count} {' '.join(map(str, self._at))} {last_word}"
            os.pwrite(self._file, text.ljust(_LENGTH - 1).encode() + b"\n", 0)


def beat_path(run: Path, rank: int) -> Path:
    return run / HEARTBEATS / f"rank-{rank}"


def read_beat(run: Path, rank: int) -> Beat | None:
    """None: it has not begun to give any."""
    with suppress(OSError, ValueError):  # not there, or half written
        with open_regular(beat_path(run, rank)) as file:
            words = file.read(_LENGTH).decode("ascii", errors="replace").split()
        count, stage, step, micro, *said = words
        if stage not in STAGES:
            return None
        last = said[0] if said else None
        return Beat(rank=rank, count=int(count), stage=stage, step=int(step), micro=int(micro), last_word=last)
    return None


def clear_beats(run: Path, ranks: Iterable[int]) -> None:
    """Of ranks that have ended: others of the run may live on another machine."""
    with suppress(OSError):
        for rank in ranks:
            beat_path(run, rank).unlink(missing_ok=True)
        (run / HEARTBEATS).rmdir()
