"""What earlier runs on this account have taught, kept in the user's cache; `--no-calibration` leaves it out.

A small JSON file, replaced whole. One that is torn, foreign or of another version of tightfit, whose predictions may
differ, counts for nothing; and a cache that cannot be written keeps nothing. A calibration is worth having and never
needed. What is done with it stands in `planner/calibration.py`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tightfit.desk.request import Request
from tightfit.hardware.machine import processor_here
from tightfit.inputs.records import as_record, find_json, find_record, record_text
from tightfit.inputs.surroundings import cache_folder, faults_are_injected
from tightfit.inputs.versions import find_installed
from tightfit.job import Job
from tightfit.owned import flock, replace_file
from tightfit.planner.calibration import Calibration, Entry, TimedRun, data_mark

FILE = "calibration.json"
MOST_ENTRIES = 256  # the newest that are kept
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


def calibration_of(request: Request, job: Job) -> Calibration | None:
    """None: it is not wanted, so nothing is written down at the end either."""
    return known_here(job) if request.calibrates else None


def known_here(job: Job | None = None) -> Calibration:
    """All that runs of this account have taught, for planning on this machine."""
    processor = f"{os.cpu_count()} × {processor_here()}"
    return replace(Calibrations(cache_folder()).read(job), processor=processor)


class Calibrations:
    """The file in one folder: `inputs.surroundings.cache_folder()`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self, job: Job | None = None) -> Calibration:
        """All entries that are ours, for planning this job; never raises."""
        kept = find_record(self._path, CalibrationFile)
        if kept is None or kept.tightfit != (find_installed("tightfit") or ""):
            kept = CalibrationFile(tightfit="", entries=())
        entries, timed = [], []
        for tree in kept.entries:
            with suppress(ValueError):  # not one of ours
                entry = as_record(tree, Entry)
                counts = [entry.sequence]
                for each in entry.measured:
                    counts += [each.predicted_bytes, each.measured_bytes, each.runs]
                if min(counts) >= 1 and _DAY.fullmatch(entry.day):
                    entries.append(entry)
        for tree in kept.timed:
            with suppress(ValueError):
                run = as_record(tree, TimedRun)
                positive = [run.predicted_s, run.measured_s, *(share.spread for share in run.shares)]
                seconds = [0.0, *(size for share in run.shares for size in (share.slower_s, share.faster_s))]
                if min(positive) > 0 and min(seconds) == 0 and run.runs >= 1 and _DAY.fullmatch(run.day):
                    timed.append(run)
        data = None if job is None else data_mark(job)
        return Calibration(entries=tuple(entries), data=data, timed=tuple(timed))

    def add(self, entry: Entry | None, timed: TimedRun | None = None) -> bool:
        """Write down what a run has taught about bytes and about seconds; False: nothing, or there is no place to write
        it to, or it was invented by a fault of the tests."""
        path = self._path
        if (entry is None and timed is None) or faults_are_injected():
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
                known = self.read().with_entry(entry).with_timed(timed)
                kept = CalibrationFile(
                    tightfit=find_installed("tightfit") or "",
                    entries=known.entries[-MOST_ENTRIES:],
                    timed=known.timed[-MOST_ENTRIES:],
                )
                replace_file(path, record_text(kept).encode(), sync=True)
            finally:
                os.close(lock)
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    SCHEMA: ClassVar[int] = 2

    tightfit: str  # the version whose predictions these are held against
    entries: tuple[Any, ...]  # each an `Entry`; one that is none counts for nothing, and the others stay
    timed: tuple[Any, ...] = ()  # likewise each a `TimedRun`
