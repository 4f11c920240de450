"""Measured against predicted, kept in the user's cache: what a run has taught, and where it is written down.

A small JSON file, replaced whole. One that is torn, foreign or of another version of tightfit, whose predictions may
differ, counts for nothing; and a cache that cannot be written keeps nothing. A calibration is worth having and never
needed. What is done with it stands in `planner/calibration.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from tightfit.inputs.records import as_record, find_json, find_record, write_record
from tightfit.inputs.surroundings import faults_are_injected
from tightfit.job import Job
from tightfit.owned import flock
from tightfit.planner.calibration import (
    COMPONENT,
    Calibration,
    Entry,
    Measured,
    data_mark,
    training_of,
    uncorrected_bytes,
    way_mark,
)
from tightfit.planner.plan import Plan, Way
from tightfit.planner.step_down import Shortfall
from tightfit.runs.events import Event, MemoryMark, Step
from tightfit.types import PhaseName

FILE = "calibration.json"
MOST_ENTRIES = 256
"""The newest that are kept."""

_DAY = re.compile(r"\d{4}-\d\d-\d\d")


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
                write_record(self._path, CalibrationFile(tightfit=_version(), entries=entries), sync=True)
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


# --- reading ------------------------------------------------------------------------------------


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
    if kept is None or kept.tightfit != _version():
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


def _version() -> str:
    try:
        return version("tightfit")
    except PackageNotFoundError:  # run from a folder that was never installed
        return ""


# --- learning -----------------------------------------------------------------------------------


def learned(events: Iterable[Event], plan: Plan) -> Entry | None:
    """What a run's events teach about its plan, whether it finished or not; None: nothing was measured.

    The events must be those of this plan alone, not of attempts before it.
    """
    way = plan.chosen
    if way is None:
        return None
    seen = _Seen()
    for event in events:
        seen.add(event)
    return _entry_of(plan, way, (*_on_gpu(seen, way), *_on_host(seen, way)))


def learned_from_failure(plan: Plan, shortfall: Shortfall, held_bytes: int) -> Entry | None:
    """What an out-of-memory on a GPU teaches: `held_bytes` (allocated + asked) were needed in that phase, at the least.

    None: no more than was predicted, so the prediction is not what was wrong.
    """
    way = plan.chosen
    if way is None or shortfall.where != "gpu":
        return None
    phase = shortfall.phase or way.footprint.gpu.peak_phase
    predicted = uncorrected_bytes(way.footprint.gpu.phases[phase])
    if held_bytes <= predicted:
        return None
    found = Measured(where="gpu", phase=phase, predicted_bytes=predicted, measured_bytes=held_bytes)
    return _entry_of(plan, way, (found,))


@dataclass(slots=True)
class _Seen:
    marks: dict[str, MemoryMark] = field(default_factory=dict)
    peak_bytes: int = 0
    host_bytes: int = 0

    def add(self, event: Event) -> None:
        if isinstance(event, MemoryMark):
            self.marks[event.milestone] = event
        elif isinstance(event, Step):
            self.peak_bytes = max(self.peak_bytes, event.peak_bytes or 0)
            self.host_bytes = max(self.host_bytes, event.host_bytes or 0)


def _entry_of(plan: Plan, way: Way, measured: tuple[Measured, ...]) -> Entry | None:
    known = tuple(each for each in measured if each.predicted_bytes > 0 and each.measured_bytes > 0)
    if not known:
        return None
    return Entry(
        training=training_of(way.shape, way.levers, way.hardware),
        way=way_mark(way.levers),
        data=data_mark(plan.job),
        sequence=way.levers.sequence,
        day=datetime.now(timezone.utc).date().isoformat(),
        measured=known,
    )


def _on_gpu(seen: _Seen, way: Way) -> Iterator[Measured]:
    """Milestones are peaks since the first pass began, so each is one of the phase that is largest up to there.

    With the plain loss the first forward pass ends before the loss is at its largest, so it says nothing.
    """
    gpu = way.footprint.gpu
    errors: dict[PhaseName, int] = {}
    forward: tuple[PhaseName, ...] = ("forward", "loss")
    for milestone, phases in (("init", ("init",)), ("forward", forward), ("backward", (*forward, "backward"))):
        mark = seen.marks.get(milestone)
        if mark is None or mark.measured_bytes is None or mark.predicted_bytes is None:
            continue
        if milestone != "forward" or way.levers.loss == "fused":
            phase = max(phases, key=lambda name: gpu.phases[name].total_bytes)
            errors[phase] = mark.measured_bytes - mark.predicted_bytes + gpu.phases[phase].components.get(COMPONENT, 0)
    last = seen.marks.get("step")
    probed = None if last is None else last.measured_bytes
    peak = max(probed or 0, seen.peak_bytes)
    if peak:
        errors[gpu.peak_phase] = peak - uncorrected_bytes(gpu.phases[gpu.peak_phase])
    for phase, error in errors.items():
        predicted = uncorrected_bytes(gpu.phases[phase])
        if error > 0 or phase == "init" or probed is not None:  # a largest batch that never passed proves nothing
            yield Measured(where="gpu", phase=phase, predicted_bytes=predicted, measured_bytes=predicted + error)


def _on_host(seen: _Seen, way: Way) -> Iterator[Measured]:
    """Of the steps: while the model is read, pages of its files count as resident. On the CPU it all is host memory."""
    if way.hardware.gpu.vendor != "cpu":
        predicted = uncorrected_bytes(way.footprint.host.phases["step"])
        yield Measured(where="host", phase="step", predicted_bytes=predicted, measured_bytes=seen.host_bytes)
