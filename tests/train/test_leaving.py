"""How the worker leaves: with the code of what happened, whatever the libraries or the disk do at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from running import run_ranks, write_plan

import warm_desk

pytestmark = pytest.mark.thorough

SMALL = {"model": "tiny_llama", "seq": 64, "effective_batch": 4, "max_steps": 2, "engine": "fsdp2"}
INTO_A_FULL_DISK = """
import os, sys
from tightfit.train.__main__ import main
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1), os.dup2(full, 2)
sys.exit(main(sys.argv[1:]))
"""
ABORT_AT_THE_END = "import atexit, os\natexit.register(os.abort)\n"


@pytest.mark.slow
def test_a_library_that_aborts_at_the_end_spoils_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORT_AT_THE_END)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    ran = run_ranks(write_plan(tmp_path, 2, **SMALL), fresh=True)
    assert ran.codes == [0, 0], ran.stderr
    assert ran.events[-1]["event"] == "end"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_users_to_mend(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, 1, **SMALL)
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").symlink_to("/dev/full")
    worker = warm_desk.Process(str(plan / "worker.json"), worker=True)
    _, said = worker.communicate()
    worker.kill()
    assert (worker.returncode, said.count("\n")) == (2, 1), said
    assert "the disk is full: make room" in said
    silent = warm_desk.python(INTO_A_FULL_DISK, str(plan / "worker.json"), ranks=True)
    assert silent.returncode == 2
