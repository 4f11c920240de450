"""The attempts of a run, a numbered record each: what was tried, what went wrong, and what was changed.

    attempts/001.json    the record, written when the attempt begins and again when it ends
    attempts/001/        logs and last words of its ranks, and its plan where the next one has another

A record is replaced whole: who reads one never sees half of it. A disk that takes nothing costs the record and never
the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal

from tightfit.inputs.records import find_record, record_text
from tightfit.messages import Said
from tightfit.owned import NotOurs, open_own, replace_file
from tightfit.runs.events import AttemptBegan, AttemptFailed, attempt_line
from tightfit.runs.folder import RunFolder

ATTEMPTS = "attempts"

Action = Literal["same plan", "smaller plan", "wait", "make room", "skip data", "precision", "older checkpoint", "stop"]
"""What follows from a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an attempt failed, as its record keeps it."""

    id: str
    """Of the symptom: `tightfit explain` knows it."""
    kind: str
    sentence: Said
    confidence: str
    rank: int | None
    phase: str | None
    evidence: tuple[str, ...]
    """`rank-1.log:17: torch.OutOfMemoryError: …`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What was done about it."""

    action: Action
    because: Said
    changed: tuple[Said, ...] = ()
    """`micro batch 4 × 1 → 2 × 2`, lever by lever."""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of the ranks."""

    SCHEMA: ClassVar[int] = 1

    number: int
    started: str
    plan: Said
    """`ZeRO-2, optimizer on CPU: micro batch 4 × 1 on 2 ranks`"""
    ranks: int
    effective_batch: int | None
    ended: str | None = None
    """None: it runs."""
    state: str = "running"
    """`running`, `done`, `stopped`, `interrupted`, `failed`."""
    exit_codes: tuple[int, ...] = ()
    """By rank; negative: the signal that ended it."""
    first_step: int | None = None
    """The step from which it went on; 0: from the beginning; None: it did not get there."""
    last_step: int | None = None
    """None: it made none."""
    kept_step: int | None = None
    """The newest checkpoint when it ended: from here the next one goes on."""
    cause: Cause | None = None
    next: Next | None = None

    @property
    def reached(self) -> int:
        """How far it came: its last step, or the one that it went on from."""
        return self.last_step if self.last_step is not None else self.first_step or 0

    @property
    def lost_steps(self) -> int:
        """Steps that the next attempt makes again."""
        return 0 if self.last_step is None else max(0, self.last_step - (self.kept_step or 0))


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def attempt_path(run: Path, number: int) -> Path:
    return run / ATTEMPTS / f"{number:03d}.json"


def attempt_paths(run: Path) -> list[Path]:
    """Where the records of the run's last start are, in order; whatever they say."""
    try:
        found = [path for path in (run / ATTEMPTS).glob("*.json") if path.stem.isdecimal()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.stem))


def write_attempt(run: Path, record: AttemptRecord) -> bool:
    """Whole or not at all; False: the disk did not take it."""
    path = attempt_path(run, record.number)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, record_text(record).encode())
    except OSError:
        return False
    return True


def read_attempts(run: Path) -> tuple[AttemptRecord, ...]:
    """Those of the run's last start, in order; what is no record of ours is left out."""
    found = (find_record(path, AttemptRecord) for path in attempt_paths(run))
    return tuple(record for record in found if record is not None)


def _place(folder: RunFolder, number: int) -> Path:
    place = attempt_path(folder.path, number).with_suffix("")
    place.mkdir(parents=True, exist_ok=True)
    return place


def put_aside(folder: RunFolder, number: int, logs: Sequence[Path]) -> None:
    """Logs and last words of an attempt make way for the next one's."""
    with suppress(OSError):  # a full disk: the next attempt's words count more than the last one's
        place = _place(folder, number)
        for log in logs:
            if log.exists():
                log.rename(place / log.name)
        if folder.errors.is_dir():
            folder.errors.rename(place / folder.errors.name)


def keep_plan(folder: RunFolder, number: int) -> None:
    """Before another takes its place."""
    with suppress(OSError):
        shutil.copytree(folder.plan, _place(folder, number) / folder.plan.name, dirs_exist_ok=True)


def append_event(folder: RunFolder, event: AttemptBegan | AttemptFailed) -> None:
    """A line of the supervisor's own in the run's events, between two attempts. A torn last line is ended first."""
    with suppress(OSError, NotOurs), open_own(folder.events, "ab+") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(attempt_line(event, time.time()).encode())
