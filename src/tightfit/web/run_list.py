"""The list of runs: what is known of each, searched, filtered, sorted and grouped as the address says.

A run that has not changed is not read again, and one answer reads for so long at most: of a thousand runs all are named
at once, and what they have come to follows with the next answers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

from tightfit.diagnose.masks import masked
from tightfit.formats.worker.read import find_worker
from tightfit.runs.events import Ended, Step, events_of
from tightfit.runs.records import ATTEMPTS, RunFolder, read_attempts, read_run
from tightfit.runs.watching import QUIET_S, QUIET_STEPS
from tightfit.web.history import last_lines
from tightfit.web.places import Finder, FoundRun, FoundRuns
from tightfit.web.sight import state_of

FIRST_BYTES, EVENT_BYTES = 2 * 1024, 16 * 1024  # of the end of a run's events; the last step stands in the first mostly
PATIENCE_S = 0.4  # for reading what is new, in one answer
SLICE_S = 0.1  # for reading beside those who ask
SHOWN = 200  # runs in one answer, unless all are asked for
NEWS_S = 3600.0  # a run that ended longer ago is no news
SORTS = ("changed", "name", "state", "step", "loss", "pace")
FILTERS: Mapping[str, tuple[str, ...]] = {
    "running": ("running", "elsewhere"),
    "stalled": (),  # those of the running ones that have fallen silent
    "failed": ("failed", "gone"),
    "done": ("done",),
    "stopped": ("stopped", "interrupted", "ended"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run. None: nobody says."""

    word: str
    name: str
    group: str  # the folder that it lies in: an experiment
    state: str = "unknown"
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    pace: float | None = None
    changed: float | None = None  # when it last said something, in seconds since the epoch
    is_stalled: bool = False  # it runs, and was not heard of for long
    is_read: bool = False  # or only its name is known yet

    def is_in(self, filter_: str) -> bool:
        return self.is_stalled if filter_ == "stalled" else self.state in FILTERS[filter_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an address asks of the list."""

    search: str = ""
    state: str = ""  # one of `FILTERS`; empty: all
    sort: str = "changed"
    is_reversed: bool = False
    is_grouped: bool = False
    is_whole: bool = False  # all of them, however many

    @classmethod
    def read(cls, said: Mapping[str, str]) -> Asked:
        sort = said.get("sort", "").removeprefix("-")
        return cls(
            search=said.get("q", "")[:200].strip(),
            state=said["state"] if said.get("state") in FILTERS else "",
            sort=sort if sort in SORTS else "changed",
            is_reversed=said.get("sort", "").startswith("-"),
            is_grouped=said.get("group") == "1",
            is_whole=said.get("all") == "1",
        )

    def address(self, **changes: object) -> str:
        asked = replace(self, **changes)  # type: ignore[arg-type]
        sort = f"{'-' if asked.is_reversed else ''}{asked.sort}"
        said = {
            "q": asked.search,
            "state": asked.state,
            "sort": "" if sort == "changed" else sort,
            "group": "1" if asked.is_grouped else "",
            "all": "1" if asked.is_whole else "",
        }
        return urlencode({name: value for name, value in said.items() if value})

    def sorted_by(self, column: str) -> str:
        """The address of the same list by another column; by the same one, the other way round."""
        return self.address(sort=column, is_reversed=column == self.sort and not self.is_reversed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    groups: tuple[tuple[str, tuple[RunRow, ...]], ...]  # one without a name, where they are not grouped
    counts: Mapping[str, int]  # by state, of all that are found
    total: int
    found: int  # that the search and the filter let pass
    shown: int
    is_read: bool  # or some are only named yet
    is_all: bool  # or the search for runs was broken off


class RunList:
    def __init__(self, roots: Sequence[Path], finder: Finder) -> None:
        self._roots, self._finder = tuple(roots), finder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, RunRow]] = {}  # by word: the mark of its files, and what they said

    def look(self, asked: Asked, patience_s: float = PATIENCE_S) -> RunTable:
        rows, searched = self.rows(patience_s)
        found = [row for row in rows if not asked.state or row.is_in(asked.state)]
        for part in asked.search.casefold().split():
            found = [row for row in found if part in row.name.casefold()]
        found = _sort(found, asked)
        shown = found if asked.is_whole else found[:SHOWN]
        groups: dict[str, list[RunRow]] = {}
        for row in shown:
            groups.setdefault(row.group if asked.is_grouped else "", []).append(row)
        return RunTable(
            groups=tuple((name, tuple(members)) for name, members in groups.items()),
            counts={name: sum(row.is_in(name) for row in rows) for name in FILTERS},
            total=len(rows),
            found=len(found),
            shown=len(shown),
            is_read=searched.is_over and all(row.is_read for row in rows),
            is_all=searched.is_all,
        )

    def prepare(self) -> None:
        """Read all of them, before anybody asks, and let those who do go first."""
        is_read = False
        while not is_read:
            rows, searched = self.rows(SLICE_S)
            is_read = searched.is_over and all(row.is_read for row in rows)
            time.sleep(SLICE_S)

    def rows(self, patience_s: float = PATIENCE_S) -> tuple[list[RunRow], FoundRuns]:
        """All, the newest first, and how the search for them went."""
        found = self._finder.find()
        deadline = time.monotonic() + patience_s
        with self._lock:  # two that ask at once would read everything twice
            self._known = {run.word: self._known[run.word] for run in found.runs if run.word in self._known}
            rows = []
            for run in found.runs:
                mark, row = self._known.get(run.word, (None, None))
                now = _mark(run.path)
                if row is None or mark != now or row.state in ("running", "elsewhere"):
                    if time.monotonic() > deadline:
                        rows.append(row or _name(run, self._roots))
                        continue
                    row = read_row(run, self._roots)
                    self._known[run.word] = now, row
                rows.append(row)
        return rows, found

    def news(self) -> list[dict[str, object]]:
        """Those that run, and those that have ended lately: what an alert may be about."""
        since = time.time() - NEWS_S
        rows, _ = self.rows()
        return [
            {"run": row.word, "name": row.name, "state": row.state, "stalled": row.is_stalled}
            for row in rows
            if row.is_in("running") or (row.changed or 0.0) > since
        ]


def read_row(run: FoundRun, roots: Sequence[Path]) -> RunRow:
    events = RunFolder(run.path).events
    changed = None
    with suppress(OSError):
        changed = events.stat().st_mtime
    last, ended = _read_end(events, FIRST_BYTES)
    if last is None:
        last, ended = _read_end(events, EVENT_BYTES)
    state = state_of(read_run(run.path), ended, read_attempts(run.path))
    row = replace(_name(run, roots), state=state, changed=changed, is_read=True)
    if last is None:
        return row
    quiet_s = 0.0 if changed is None else time.time() - changed
    is_stalled = state in FILTERS["running"] and quiet_s > max(QUIET_S, QUIET_STEPS * (last.step_s or 0.0))
    loss = last.loss if last.loss is not None and math.isfinite(last.loss) else None
    return replace(row, step=last.step, steps=last.steps, loss=loss, pace=last.tokens_per_s, is_stalled=is_stalled)


PLANNED = ("model", "levers", "world", "effective_batch", "data", "training")
"""What of a plan is worth comparing; the rest follows from it, or is where things lie."""


def find_differences(runs: Sequence[Path]) -> list[tuple[str, list[str | None]]]:
    """The settings in which the plans of runs differ, and the value that each has. None: it has none."""
    plans = [_flatten(find_worker(RunFolder(run).plan)) for run in runs]
    names = dict.fromkeys(name for plan in plans for name in plan)
    values = [(name, [plan.get(name) for plan in plans]) for name in names]
    return [(name, each) for name, each in values if len(set(each)) > 1]


def _flatten(plan: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for block in PLANNED:
        value = plan.get(block)
        inside = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {
            f"{block}.{name}".rstrip("."): masked(str(each))[:200]
            for name, each in inside
            if each is not None and not isinstance(each, dict | list)
        }
    return flat


def _read_end(events: Path, most_bytes: int) -> tuple[Step | None, bool]:
    """The last step, and whether the end of the training came after it."""
    ended = False
    for line in reversed(last_lines(events, most_bytes)):
        (event,) = events_of([line])
        ended = ended or isinstance(event, Ended)
        if isinstance(event, Step):
            return event, ended
    return None, ended


def _name(run: FoundRun, roots: Sequence[Path]) -> RunRow:
    """What is known of a run that nobody has read."""
    number, _, below = run.word.partition("/")
    root = roots[int(number)]
    name = below or root.name or str(root)
    if below and len(roots) > 1:
        name = f"{root.name}/{below}"
    return RunRow(word=run.word, name=name, group=name.rpartition("/")[0])


def _mark(run: Path) -> object:
    """Changes with what is read of a run."""
    here = RunFolder(run)
    marks = []
    for path in (here.events, here.record, run / ATTEMPTS):
        try:
            found = path.stat()
            marks.append((found.st_mtime_ns, found.st_size))
        except OSError:
            marks.append((0, 0))
    return tuple(marks)


def _sort(rows: Iterable[RunRow], asked: Asked) -> list[RunRow]:
    """What is not known comes last, whichever way round."""
    values = {row: getattr(row, asked.sort) for row in rows}
    known = [row for row, value in values.items() if value is not None]
    if asked.sort in ("name", "state"):
        known.sort(key=lambda row: str(values[row]).casefold())
    else:  # the newest, the furthest and the fastest first; and the lowest loss
        known.sort(key=lambda row: values[row], reverse=asked.sort != "loss")
    if asked.is_reversed:
        known.reverse()
    return [*known, *(row for row, value in values.items() if value is None)]
