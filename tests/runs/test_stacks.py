"""Stack dumps of real processes, read from their logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import patience
from tightfit.runs.hang import read_stand
from tightfit.runs.heartbeat import DUMP

STUCK = """
import faulthandler, signal, sys, threading, time
from tightfit.runs.heartbeat import DUMP
faulthandler.register(DUMP, all_threads=True)
print("words before", flush=True)

def waits_in_another_thread():
    time.sleep(600)

def trains():
    time.sleep(600)

threading.Thread(target=waits_in_another_thread, daemon=True).start()
open(sys.argv[1], "w").close()
trains()
"""


@pytest.mark.thorough
def test_a_process_that_sleeps_says_where(tmp_path: Path) -> None:
    log, ready = tmp_path / "rank-0.log", tmp_path / "ready"
    script = tmp_path / "tightfit/train/__main__.py"  # how the thread that trains is known
    script.parent.mkdir(parents=True)
    script.write_text(STUCK)
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, str(script), str(ready)], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = patience.now() + 20
        while not ready.exists() and patience.now() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        before = log.stat().st_size
        assert read_stand(0, log, before) is None
        os.kill(process.pid, DUMP)
        found = None
        while found is None and patience.now() < deadline:
            time.sleep(0.1)
            found = read_stand(0, log, before)
        time.sleep(0.2)
        found = read_stand(0, log, before)
        assert process.poll() is None, "a dump ends nothing"
    finally:
        process.kill()
        process.wait()
    assert found is not None
    assert [frame.name for frame in found.main] == ["trains", "<module>"]
    assert found.place is not None
    assert found.place.words == f"{script}:11 in trains"
    assert not found.waits


def test_a_log_without_a_dump_says_nothing(tmp_path: Path) -> None:
    assert read_stand(0, tmp_path / "none.log", 0) is None
    (tmp_path / "some.log").write_bytes(b"\xff\xfe words\nFile x, line 3 in y\n")
    assert read_stand(0, tmp_path / "some.log", 0) is None
