"""What a rank has started in a group of its own, as ninja does with each compiler, ends with the rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import patience
import warm_desk
from tightfit.inputs.surroundings import inherited
from tightfit.runs.launch import Ranks, RankStart
from tightfit.runs.processes import is_alive

RANK = """
import os, pathlib, subprocess, sys, time
from tightfit.runs.processes import PARENT_FD, end_with_parent
end_with_parent(int(os.environ[PARENT_FD]))
child = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
pathlib.Path(sys.argv[1] + ".new").write_text(str(child.pid))
os.replace(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
DESK = """
import sys, time
from pathlib import Path
sys.path[:0] = {here!r}
from test_run_sessions import ranks
with ranks(Path(sys.argv[1])):
    time.sleep(600)
"""


def ranks(folder: Path) -> Ranks:
    command = (sys.executable, "-c", RANK, str(folder / "child"))
    start = RankStart(name="rank-0", rank=0, command=command, environment=inherited({}), log=folder / "log")
    return Ranks([start], folder)


def child_of(folder: Path) -> int:
    deadline = patience.now() + 20
    while not (folder / "child").exists():
        assert patience.now() < deadline
        time.sleep(0.02)
    return int((folder / "child").read_text(encoding="ascii"))


def is_gone(pid: int) -> bool:
    deadline = patience.now() + 10
    while is_alive(pid, None) and patience.now() < deadline:
        time.sleep(0.02)
    return not is_alive(pid, None)


@pytest.mark.thorough
def test_when_the_desk_ends_the_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path) as group:
        child = child_of(tmp_path)
        group.end(grace_s=0.5)
    assert is_gone(child)


@pytest.mark.thorough
def test_when_the_desk_is_killed(tmp_path: Path) -> None:
    text = DESK.format(here=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    desk = warm_desk.Process(str(tmp_path), code=text)
    try:
        child = child_of(tmp_path)
    finally:
        desk.kill()
    assert is_gone(child)
