"""Which folders may be looked at: those below the roots, with every link followed to its end first.

A run is named by the number of its root and its path below it, as in `0/exp/first`. Whatever leads out of the roots, is
no run, or cannot be read is answered alike, so that nobody learns what else there is.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException

from tightfit.formats.worker.read import WORKER_FILE
from tightfit.runs.checkpoints import CHECKPOINTS
from tightfit.runs.records import ATTEMPTS, RunFolder

NO_RUN = 404
DEEPEST, MOST_FOLDERS, MOST_RUNS = 6, 50_000, 10_000
PATIENCE_S = 10.0  # how far, and how long, runs are searched for
FIRST_WAIT_S, WAIT_S = 2.0, 0.5  # for a search, before what is known already is shown
AGAIN_S, PATIENTLY = 1.0, 20  # a search is repeated after so long, and takes no more than this part of the time
_PASSED_OVER = frozenset({"node_modules", "__pycache__", "site-packages", "venv", "earlier", CHECKPOINTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    word: str  # how the page names it
    path: Path


def run_at(roots: Sequence[Path], word: str) -> Path:
    """The folder that a word names, or 404."""
    number, _, below = word.partition("/")
    if not (number.isascii() and number.isdecimal() and len(number) < 5 and int(number) < len(roots)):
        raise HTTPException(NO_RUN)
    root = roots[int(number)]
    with suppress(OSError, ValueError, RuntimeError):
        place = (root / below).resolve(strict=True)
        if place.is_relative_to(root) and place.is_dir() and _is_safe_run(place, root):
            return place
    raise HTTPException(NO_RUN)


def file_at(run: Path, name: str) -> Path | None:
    """A plain file within a run's folder; None: it is none, or leads out of it."""
    with suppress(OSError, ValueError, RuntimeError):
        place = (run / name).resolve(strict=True)
        return place if place.is_relative_to(run) and place.is_file() else None
    return None


def is_run(place: Path) -> bool:
    here = RunFolder(place)
    if here.record.is_file() or here.events.is_file() or (here.plan / WORKER_FILE).is_file():
        return True
    return any(path.stem.isdigit() for path in (place / ATTEMPTS).glob("*.json"))


def _stays_below(place: Path, root: Path) -> bool:
    """Whether what is read of a run lies below the root, as the run itself does. A pipe or a device would not end when
    it is read."""
    here = RunFolder(place)
    folders = [here.plan, place / ATTEMPTS, place / CHECKPOINTS, place / "logs", here.errors]
    if not all(_leads_below(each, root) for each in folders):
        return False
    files = [here.record, here.events, here.plan / WORKER_FILE, *(place / ATTEMPTS).glob("*.json")]
    return all(_leads_below(each, root) and (each.is_file() or not each.exists()) for each in files)


def _leads_below(path: Path, root: Path) -> bool:
    """Only a link leads elsewhere, and following every path to its end takes most of the time of a search."""
    return not path.is_symlink() or path.resolve().is_relative_to(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRuns:
    runs: Sequence[FoundRun]  # the newest first
    is_all: bool  # or the search was broken off
    is_over: bool  # or it goes on


def find_runs(roots: Sequence[Path]) -> FoundRuns:
    """The runs below the roots."""
    deadline = time.monotonic() + PATIENCE_S
    found: list[tuple[float, FoundRun]] = []
    seen: set[Path] = set()
    places = ((number, root, *each) for number, root in enumerate(roots) for each in _find_folders(root))
    is_all = True
    for looked_at, (number, root, place, is_safe_run) in enumerate(places):
        if looked_at >= MOST_FOLDERS or time.monotonic() > deadline or len(found) >= MOST_RUNS:
            is_all = False
            break
        if is_safe_run and place not in seen:
            seen.add(place)
            below = place.relative_to(root).as_posix()
            word = f"{number}/{'' if below == '.' else below}"
            here = RunFolder(place)
            times = [0.0]
            for path in (here.events, here.record, place):
                with suppress(OSError):
                    times.append(path.stat().st_mtime)
            found.append((max(times), FoundRun(word=word, path=place)))
    found.sort(key=lambda each: (-each[0], each[1].word))
    return FoundRuns(runs=[run for _, run in found], is_all=is_all, is_over=True)


class Finder:
    """Searches again when the last search is old, and the older the longer it took: it may be a whole disk. A search
    goes on beside whoever asked for it, who waits for a moment and then takes what the last one has found."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._found = FoundRuns(runs=(), is_all=True, is_over=False)
        self._search: threading.Thread | None = None
        self._until = -math.inf

    def find(self) -> FoundRuns:
        with self._lock:
            if self._search is None and time.monotonic() >= self._until:
                self._search = threading.Thread(target=self._look, name="tightfit-search", daemon=True)
                self._search.start()
            search = self._search
        if search is not None:
            search.join(WAIT_S if self._found.is_over else FIRST_WAIT_S)
        return self._found

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self._found = find_runs(self._roots)
        finally:
            now = time.monotonic()
            self._until, self._search = now + max(AGAIN_S, PATIENTLY * (now - began)), None


def is_listed(name: str) -> bool:
    """Whether runs are looked for in a folder of this name."""
    return name[0] != "." and name not in _PASSED_OVER


def _is_safe_run(place: Path, root: Path) -> bool:
    with suppress(OSError, RuntimeError):
        return is_run(place) and _stays_below(place, root)
    return False


def _find_folders(root: Path) -> Iterator[tuple[Path, bool]]:
    """Breadth first, without links, each with whether it is a run: what is within one belongs to it."""
    level = [root]
    for depth in range(DEEPEST + 1):
        below: list[Path] = []
        for place in level:
            is_safe_run = _is_safe_run(place, root)
            yield place, is_safe_run
            if depth < DEEPEST and not is_safe_run:
                with suppress(OSError), os.scandir(place) as entries:
                    below += sorted(
                        place / entry.name
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False) and is_listed(entry.name)
                    )
        level = below
