"""What of dead runs may go, and what of it does not, however it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stored import left_behind

from tightfit.runs.leftovers import Leftover, end, leftovers, remove, runs_below
from tightfit.runs.lock import FolderLock
from tightfit.runs.processes import is_alive, mark_of, this_host
from tightfit.runs.records import read_run

GONE = 2**22 + 7
"""No process has this number."""


def a_run(folder: Path, **said: object) -> Path:
    folder.mkdir(parents=True)
    record = {
        "command": ["tightfit", "train"], "pid": GONE, "host": this_host(), "started": "2026-02-03T04:05:06+00:00",
        "ended": None, "state": "running", "exit_code": None,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**record, **said}))
    return folder


def test_runs_are_found_three_levels_down_and_not_within_each_other(tmp_path: Path) -> None:
    found = [a_run(tmp_path / name) for name in ("one", "a/two", "a/b/three")]
    a_run(tmp_path / "a/b/c/far")
    a_run(tmp_path / "one/earlier")
    assert sorted(runs_below([tmp_path, tmp_path / "one"])) == sorted(found)


def test_a_loop_of_links_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path)
    assert runs_below([tmp_path]) == []


def test_a_number_that_was_given_out_again_is_not_the_run(tmp_path: Path) -> None:
    """The process of this test is far younger than the record."""
    run = a_run(tmp_path / "run", pid=os.getpid())
    record = read_run(run)
    assert record is not None
    assert record.lives is False
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    (run / "run.json").write_text((run / "run.json").read_text().replace("2026-02-03T04:05:06+00:00", now))
    record = read_run(run)
    assert record is not None
    assert record.lives is True


def test_what_somebody_took_meanwhile_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    half = left_behind(run, ".step-00000004.partial")
    (found,) = leftovers([tmp_path], tmp_path / "cache").leftovers
    lock = FolderLock.take(run)
    try:
        why = remove(found)
        assert why is not None
        assert "is in use by the run of process" in str(why)
        assert half.exists()
        again = leftovers([tmp_path], tmp_path / "cache")
        assert (again.leftovers, again.live) == ((), (run,))
    finally:
        lock.release()
    assert remove(found) is None
    assert not half.exists()
    assert not (run / "lock").exists()


def test_a_process_that_is_another_one_now_is_not_ended() -> None:
    process = subprocess.Popen([sys.executable, "-SE", "-c", "import time; time.sleep(600)"])
    try:
        assert end(process.pid, "another boot:1") is None
        assert process.poll() is None
        assert is_alive(process.pid, mark_of(process.pid))
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_a_process_that_does_not_listen_is_ended_all_the_same() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-SE", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end(process.pid, mark_of(process.pid), grace_s=0.3) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": 1}', "\x00", '{"pid": "x"}'])
def test_records_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_run(tmp_path) is None
    assert leftovers([tmp_path], tmp_path / "cache").leftovers == ()


def test_a_file_that_is_gone_already_is_no_failure(tmp_path: Path) -> None:
    gone = Leftover(kind="staging", what="x", because="", path=tmp_path / "x")
    assert remove(gone) is None
