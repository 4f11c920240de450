"""`tightfit train` in a process of its own, with `lingering.py` for a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import patience

LINGERING = Path(__file__).with_name("lingering.py")
TINY = ("--model", "tiny_mamba", "--seq", "64", "--max-steps", "6")
DESK = (
    "import sys\n"
    "from tightfit import cli\n"
    "from tightfit.cli import train\n"
    "train.WORKER = (sys.executable, sys.argv[1], sys.argv[2])\n"
    "sys.exit(cli.main(['train', *sys.argv[3:]]))\n"
)


def surroundings(cache: Path, **more: str) -> dict[str, str]:
    """An environment in which nothing of this user's is found."""
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", **more}


@contextmanager
def desk(mode: str, run: Path, cache: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The desk of a run; killed at the end, and whatever it started with it."""
    command = [sys.executable, "-c", DESK, str(LINGERING), mode, *TINY, "--output", str(run), *words]
    with (run.parent / f"{run.name}.out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=surroundings(cache))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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
