"""A time limit of a test is no matter of what else the machine does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from patience import LEAST, Clock, count_in_subprocess, now, stolen_s


def test_time_in_which_others_have_the_processors_hardly_counts() -> None:
    wall: Iterator[float] = iter([100.0, 110.0, 120.0, 130.0])
    starved: Iterator[float] = iter([7.0, 7.0, 17.0, 20.0])
    clock = Clock(lambda: next(wall), lambda: next(starved))
    assert clock.now() == 10, "nobody waited"
    assert clock.now() == 10 + 10 * LEAST, "somebody waited all the time"
    assert clock.now() == pytest.approx(10 + 10 * LEAST + 7)


def test_what_a_host_gives_to_other_machines_is_not_ours() -> None:
    assert stolen_s("cpu  3547843 12 6174 900 1 0 7 486174 0 0\ncpu0 1 1 1 1", 100, 2) == 486174 / 100 / 2


def test_what_hangs_is_ended_all_the_same() -> None:
    count_in_subprocess()
    began = now()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], check=False, timeout=0.05)
    assert now() - began >= 0.05
