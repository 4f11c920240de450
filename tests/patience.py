"""How long a test waits: by a clock that hardly moves while the machine is busy with something else.

A time limit in a test is there to end what hangs, and a test that says "in seconds" means a machine that has them to
give. Both would fail beside other work if they counted by the clock on the wall. `now` counts the time in which nobody
waited for a processor (Linux keeps account of that, and of what a virtual machine's host gave to others; elsewhere the
load tells roughly) and, so that whatever hangs is ended on a busy machine too, a twentieth of the rest.

`subprocess` is told to count so as well (tests/conftest.py), so `timeout=` needs no further thought. Sleeps, and limits
that belong to the program under test, are by the wall's clock.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

PRESSURE, STAT = Path("/proc/pressure/cpu"), Path("/proc/stat")
LEAST = 1 / 20
"""Of the time on the wall, in which others have every processor, that counts all the same."""


class Clock:
    """`starved` tells for how many seconds so far somebody had to wait for a processor."""

    def __init__(self, wall: Callable[[], float], starved: Callable[[], float]) -> None:
        self._wall, self._starved, self._lock = wall, starved, threading.Lock()
        self._last = (wall(), starved())
        self._now = 0.0

    def now(self) -> float:
        with self._lock:
            at = (self._wall(), self._starved())
            passed, lost = at[0] - self._last[0], at[1] - self._last[1]
            self._last = at
            self._now += max(passed - max(lost, 0.0), passed * LEAST)
            return self._now


def starved_s() -> float:
    """Since the machine started: somebody here waited, or the host of this virtual machine ran another one."""
    found = re.search(r"^some .* total=([0-9]+)$", PRESSURE.read_text(), re.MULTILINE)
    waited = int(found[1]) / 1e6 if found else 0.0
    return waited + stolen_s(STAT.read_text(), os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1)


def stolen_s(stat: str, ticks_per_s: int, processors: int) -> float:
    """The eighth figure of all processors together, shared among them."""
    return int(stat.partition("\n")[0].split()[8]) / ticks_per_s / processors


class Load:
    """A guess where the system keeps no account: of each processor's time, each that wants it gets an equal share."""

    def __init__(self) -> None:
        self._last, self._lost = time.monotonic(), 0.0

    def __call__(self) -> float:
        at, wanted = time.monotonic(), max(os.getloadavg()[0], 1.0)
        self._lost += (at - self._last) * (1 - min(1.0, (os.cpu_count() or 1) / wanted))
        self._last = at
        return self._lost


now = Clock(time.monotonic, starved_s if PRESSURE.exists() else Load()).now


def count_in_subprocess() -> None:
    """From here on the time limits of `subprocess` are by this clock."""
    assert hasattr(subprocess, "_time"), "this Python's subprocess has no clock of its own to be set"
    subprocess._time = now
