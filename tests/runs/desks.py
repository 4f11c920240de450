"""`tightfit train` in a process of its own, with `lingering.py` for a worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from train_shell import DESK, TINY

import patience
import warm_desk

LINGERING = Path(__file__).with_name("lingering.py")


def surroundings(cache: Path, **more: str) -> dict[str, str]:
    """An environment in which nothing of this user's is found."""
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", **more}


@contextmanager
def desk(mode: str, run: Path, cache: Path, *words: str) -> Iterator[warm_desk.Process]:
    """The desk of a run; killed at the end, and whatever it started with it."""
    asked = (str(LINGERING), mode, *TINY, "--output", str(run), *words)
    process = warm_desk.Process(*asked, env=surroundings(cache), code=DESK)
    try:
        yield process
    finally:
        process.kill()


def wait_until(there: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = patience.now() + seconds
    while not there():
        assert patience.now() < deadline, "it never came"
        time.sleep(0.05)


def steps_in(run: Path) -> int:
    try:
        return (run / "events.jsonl").read_text().count('"step", ')
    except OSError:
        return 0
