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
DEEPEST, MOST_FOLDERS, MOST_RUNS = 6, 20_000, 500
PATIENCE_S = 2.0  # how far, and how long, runs are searched for
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
    """Whether what is read of a run lies below the root as well. A pipe or a device would not end when it is read."""
    here = RunFolder(place)
    files = [here.record, here.events, here.plan / WORKER_FILE, *(place / ATTEMPTS).glob("*.json")]
    if any(file.exists() and not file.is_file() for file in files):
        return False
    folders = [here.plan, place / ATTEMPTS, place / CHECKPOINTS, place / "logs", here.errors]
    return all(each.resolve().is_relative_to(root) for each in (*files, *folders))


def find_runs(roots: Sequence[Path]) -> tuple[list[FoundRun], bool]:
    """The runs below the roots, the newest first, and whether these are all: a search may be broken off."""
    deadline = time.monotonic() + PATIENCE_S
    found: list[tuple[float, FoundRun]] = []
    seen: set[Path] = set()
    places = ((number, root, place) for number, root in enumerate(roots) for place in _find_folders(root))
    is_all = True
    for looked_at, (number, root, place) in enumerate(places):
        if looked_at >= MOST_FOLDERS or time.monotonic() > deadline or len(found) >= MOST_RUNS:
            is_all = False
            break
        if place not in seen and _is_safe_run(place, root):
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
    return [run for _, run in found], is_all


class Finder:
    """Searches again when the last search is old, and the older the longer it took: it may be a whole disk."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._found: tuple[list[FoundRun], bool] = [], True
        self._until = -math.inf

    def find(self) -> tuple[list[FoundRun], bool]:
        with self._lock:
            began = time.monotonic()
            if began >= self._until:
                self._found = find_runs(self._roots)
                now = time.monotonic()
                self._until = now + max(AGAIN_S, PATIENTLY * (now - began))
            return self._found


def _is_safe_run(place: Path, root: Path) -> bool:
    with suppress(OSError, RuntimeError):
        return is_run(place) and _stays_below(place, root)
    return False


def _find_folders(root: Path) -> Iterator[Path]:
    """Breadth first, without links; what is within a run belongs to it."""
    level = [root]
    for depth in range(DEEPEST + 1):
        below: list[Path] = []
        for place in level:
            yield place
            if depth < DEEPEST and not _is_safe_run(place, root):
                with suppress(OSError), os.scandir(place) as entries:
                    below += sorted(
                        place / entry.name
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False)
                        and entry.name[0] != "."
                        and entry.name not in _PASSED_OVER
                    )
        level = below
