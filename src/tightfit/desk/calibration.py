"""What earlier runs on this account have taught, kept in the user's cache; `--no-calibration` leaves it out.

A small JSON file, replaced whole. One that is torn, foreign or of another version of tightfit, whose predictions may
differ, counts for nothing; and a cache that cannot be written keeps nothing. A calibration is worth having and never
needed. What is done with it stands in `planner/calibration.py`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
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
MOST_ENTRIES = 256  # the newest that are kept


def calibration_of(request: Request, job: Job) -> Calibration | None:
    """None: it is not wanted, so nothing is written down at the end either."""
    return Calibrations(cache_folder()).read(job) if request.calibrates else None


class Calibrations:
    """The file in one folder: `inputs.surroundings.cache_folder()`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self, job: Job | None = None) -> Calibration:
        """All entries that are ours, for planning this job; never raises."""
        kept = find_record(self._path, CalibrationFile)
        entries = []
        for tree in kept.entries if kept is not None and kept.tightfit == (find_installed("tightfit") or "") else ():
            with suppress(ValueError):  # not one of ours
                entry = as_record(tree, Entry)
                counts = [entry.sequence]
                for each in entry.measured:
                    counts += [each.predicted_bytes, each.measured_bytes, each.runs]
                if min(counts) >= 1 and re.fullmatch(r"\d{4}-\d\d-\d\d", entry.day):
                    entries.append(entry)
        return Calibration(entries=tuple(entries), data=None if job is None else data_mark(job))

    def add(self, entry: Entry) -> bool:
        """Write an entry down; False: there is no place to write it to, or it was invented by a fault of the tests."""
        path = self._path
        if faults_are_injected():
            return False
        if os.path.lexists(path):  # a file of that name in somebody's folder stays as it is
            tree = find_json(path)
            is_empty = path.is_file() and not path.is_symlink() and path.stat().st_size == 0
            if not is_empty and not (isinstance(tree, dict) and {"schema", "entries"} <= set(tree)):
                return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                flock(lock)  # two runs that end together must not lose each other's lesson
                entries = self.read().with_entry(entry).entries[-MOST_ENTRIES:]
                kept = CalibrationFile(tightfit=find_installed("tightfit") or "", entries=entries)
                replace_file(path, record_text(kept).encode(), sync=True)
            finally:
                os.close(lock)
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    SCHEMA: ClassVar[int] = 1

    tightfit: str  # the version whose predictions these are held against
    entries: tuple[Any, ...]  # each an `Entry`; one that is none counts for nothing, and the others stay
