"""What earlier runs on this account have taught, kept in the user's cache; `--no-calibration` leaves it out.

A small JSON file, replaced whole. One that is torn, foreign or of another version of tightfit, whose predictions may
differ, counts for nothing; and a cache that cannot be written keeps nothing. A calibration is worth having and never
needed. What is done with it stands in `planner/calibration.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tightfit.desk.request import Request
from tightfit.inputs.records import as_record, find_json, find_record, record_text
from tightfit.inputs.surroundings import cache_folder, faults_are_injected
from tightfit.inputs.versions import find_installed
from tightfit.job import Job
from tightfit.owned import flock, replace_file
from tightfit.planner.calibration import Calibration, Entry, data_mark

FILE = "calibration.json"
MOST_ENTRIES = 256
"""The newest that are kept."""

_DAY = re.compile(r"\d{4}-\d\d-\d\d")


def calibration_of(request: Request, job: Job) -> Calibration | None:
    """None: it is not wanted, so nothing is written down at the end either."""
    return Calibrations(cache_folder()).read(job) if request.calibrates else None


class Calibrations:
    """The file in one folder: `inputs.surroundings.cache_folder()`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self, job: Job | None = None) -> Calibration:
        """All entries that are ours, for planning this job; never raises."""
        return Calibration(entries=_entries(self._path), data=None if job is None else data_mark(job))

    def add(self, entry: Entry) -> bool:
        """Write an entry down; False: there is no place to write it to, or it was invented by a fault of the tests."""
        if faults_are_injected() or (os.path.lexists(self._path) and not _is_ours(self._path)):
            return False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                entries = self.read().with_entry(entry).entries[-MOST_ENTRIES:]
                kept = CalibrationFile(tightfit=find_installed("tightfit") or "", entries=entries)
                replace_file(self._path, record_text(kept).encode(), sync=True)
        except OSError:
            return False
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two runs that end together must not lose each other's lesson."""
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flock(lock)
            yield
        finally:
            os.close(lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    SCHEMA: ClassVar[int] = 1

    tightfit: str
    """The version whose predictions these are held against."""
    entries: tuple[Any, ...]
    """Each an `Entry`; one that is none counts for nothing, and the others stay."""


def _is_ours(path: Path) -> bool:
    """A file of that name in somebody's folder stays as it is."""
    tree = find_json(path)
    if tree is None:
        return path.is_file() and not path.is_symlink() and path.stat().st_size == 0
    return isinstance(tree, dict) and {"schema", "entries"} <= set(tree)


def _entries(path: Path) -> tuple[Entry, ...]:
    kept = find_record(path, CalibrationFile)
    if kept is None or kept.tightfit != (find_installed("tightfit") or ""):
        return ()
    return tuple(entry for tree in kept.entries if (entry := _entry(tree)) is not None)


def _entry(tree: object) -> Entry | None:
    """None: not one of ours."""
    try:
        entry = as_record(tree, Entry)
    except ValueError:
        return None
    counts = [entry.sequence]
    for each in entry.measured:
        counts += [each.predicted_bytes, each.measured_bytes, each.runs]
    return entry if min(counts) >= 1 and _DAY.fullmatch(entry.day) else None
