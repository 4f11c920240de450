"""The attempts of a run, a numbered record each: what was tried, what went wrong, and what was changed.

    attempts/001.json    the record, written when the attempt begins and again when it ends
    attempts/001/        logs and last words of its ranks, and its plan where the next one has another

A record is replaced whole: who reads one never sees half of it. A disk that takes nothing costs the record and never
the run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tightfit.owned import NotOurs, open_own, replace_file
from tightfit.runs.events import AttemptBegan, AttemptFailed, attempt_line
from tightfit.runs.folder import RunFolder

ATTEMPTS = "attempts"
SCHEMA = 1

Action = Literal["same plan", "smaller plan", "wait", "make room", "skip data", "precision", "older checkpoint", "stop"]
"""What follows from a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an attempt failed, as its record keeps it."""

    id: str
    """Of the symptom: `tightfit explain` knows it."""
    kind: str
    sentence: str
    confidence: str
    rank: int | None
    phase: str | None
    evidence: tuple[str, ...]
    """`rank-1.log:17: torch.OutOfMemoryError: …`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What was done about it."""

    action: Action
    because: str
    changed: tuple[str, ...] = ()
    """`micro batch 4 × 1 → 2 × 2`, lever by lever."""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of the ranks."""

    number: int
    started: str
    plan: str
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


def record_path(run: Path, number: int) -> Path:
    return run / ATTEMPTS / f"{number:03d}.json"


def write_record(run: Path, record: AttemptRecord) -> bool:
    """Whole or not at all; False: the disk did not take it."""
    path = record_path(run, record.number)
    text = json.dumps({"schema": SCHEMA, **asdict(record)}, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, f"{text}\n".encode())
    except OSError:
        return False
    return True


def read_records(run: Path) -> tuple[AttemptRecord, ...]:
    """Those of the run's last start, in order; what is no record of ours is left out."""
    try:
        paths = sorted(path for path in (run / ATTEMPTS).glob("*.json") if path.stem.isdigit())
    except OSError:
        return ()
    return tuple(record for record in map(_read, paths) if record is not None)


def _read(path: Path) -> AttemptRecord | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.pop("schema") != SCHEMA:
            return None
        cause, following = tree.pop("cause"), tree.pop("next")
        record = AttemptRecord(
            **{**tree, "exit_codes": tuple(tree["exit_codes"])},
            cause=None if cause is None else Cause(**_with_tuple(cause, "evidence")),
            next=None if following is None else Next(**_with_tuple(following, "changed")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    parts = [each for each in (record, record.cause, record.next) if each is not None]
    return record if all(_is_typed(each) for each in parts) else None


def damaged_records(run: Path) -> tuple[Path, ...]:
    """Those that are there and say what none of ours says."""
    try:
        paths = sorted(path for path in (run / ATTEMPTS).glob("*.json") if path.stem.isdigit())
    except OSError:
        return ()
    return tuple(path for path in paths if _read(path) is None)


def _is_typed(part: AttemptRecord | Cause | Next) -> bool:
    """Whether every field is of its own type, as nobody has looked at them yet."""
    return all(_fits(getattr(part, name), kind) for name, kind in get_type_hints(type(part)).items())


def _fits(value: Any, kind: Any) -> bool:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, inside[0]) for each in value)
    if origin is Literal:
        return isinstance(value, str) and value in inside
    if origin is not None:  # one of several
        return any(_fits(value, each) for each in inside)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _with_tuple(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**tree, name: tuple(tree[name])}


def _place(folder: RunFolder, number: int) -> Path:
    place = record_path(folder.path, number).with_suffix("")
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
