"""A run from its first process to its last, with a worker that behaves well and one that does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import patience
import warm_desk
from tightfit.inputs.surroundings import inherited
from tightfit.runs.events import Event, Step
from tightfit.runs.launch import Exit, RankStart
from tightfit.runs.processes import is_alive
from tightfit.runs.records import RunFolder
from tightfit.runs.run import Outcome, first_failure, run
from tightfit.types import ConfigError

pytestmark = pytest.mark.thorough

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Of a run whose ranks are forked, with nothing left to import."""
    monkeypatch.setattr(subprocess, "Popen", warm_desk.Forking)
    made = RunFolder(tmp_path / "run")
    made.plan.mkdir(parents=True)
    (made.plan / "worker.json").write_text(json.dumps({"saving": {"folder": str(made.path)}}))
    return made


def starts(folder: RunFolder, mode: str, ranks: int = 2) -> list[RankStart]:
    command = (sys.executable, str(STAND_IN), mode, str(folder.plan / "worker.json"))
    return [
        RankStart(
            name=f"rank-{rank}",
            rank=rank,
            command=command,
            environment=inherited({"RANK": str(rank)}),
            log=folder.log(f"rank-{rank}"),
        )
        for rank in range(ranks)
    ]


def ran(folder: RunFolder, mode: str, *, grace_s: float = 5.0) -> tuple[Outcome, list[Event]]:
    events: list[Event] = []
    return run(starts(folder, mode), folder, events.append, grace_s=grace_s), events


def wait_for(*paths: Path) -> None:
    deadline = patience.now() + 20
    while not all(path.exists() and path.read_text() for path in paths):
        assert patience.now() < deadline, f"{paths} never came"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    deadline = patience.now() + 10
    while is_alive(pid, None):
        if patience.now() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_good_run(folder: RunFolder) -> None:
    outcome, events = ran(folder, "good")
    assert (outcome.state, outcome.exit_code, outcome.failure) == ("done", 0, None)
    assert len([event for event in events if isinstance(event, Step)]) == 6
    tally = outcome.tally
    assert tally.first_loss == 4.9
    assert tally.last is not None
    assert tally.last.step == 6
    assert tally.step_s == 0.5
    assert tally.tokens_per_s == 1004.5
    assert [mark.milestone for mark in tally.marks] == ["init", "forward", "backward", "step"]


def test_torn_lines_are_read_when_they_are_whole(folder: RunFolder) -> None:
    outcome, events = ran(folder, "torn")
    assert outcome.state == "done"
    found = [event for event in events if isinstance(event, Step)]
    assert [event.step for event in found] == [1, 3]
    assert found[0].loss is not None
    assert found[0].loss != found[0].loss
    assert found[1].loss == 1.5


@pytest.mark.parametrize("mode", ["user", "user_one", "user_echo"])
def test_a_users_mistake_is_said_once_and_ends_all(folder: RunFolder, mode: str) -> None:
    outcome, _ = ran(folder, mode)
    assert (outcome.state, outcome.exit_code) == ("user error", 2)
    assert outcome.failure is not None
    assert str(outcome.failure.sentence).endswith(": mend it")
    assert not outcome.tally.began


def test_a_rank_that_dies_ends_the_others_quickly(folder: RunFolder) -> None:
    began = patience.now()
    outcome, _ = ran(folder, "die")
    assert patience.now() - began < 5
    assert (outcome.state, outcome.exit_code) == ("failed", 3)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.sentence) == (1, "RuntimeError: no such tensor")
    assert outcome.failure.tail[-1] == "RuntimeError: no such tensor"


def test_a_rank_that_leaves_without_a_word_is_named_with_its_code(folder: RunFolder) -> None:
    outcome, _ = ran(folder, "silent")
    assert outcome.failure is not None
    assert str(outcome.failure.sentence) == "rank 1 ended with exit code 7"
    assert outcome.failure.tail == ("the last thing that rank 1 said",)


def test_a_killed_rank_is_named_and_not_the_one_that_missed_it(folder: RunFolder) -> None:
    outcome, _ = ran(folder, "killed")
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert "SIGKILL" in str(outcome.failure.sentence)
    assert "RAM" in str(outcome.failure.sentence)


def test_what_will_not_end_is_ended(folder: RunFolder) -> None:
    began, busy = time.monotonic(), patience.now()
    outcome, _ = ran(folder, "stubborn", grace_s=1.0)
    assert time.monotonic() - began >= 1.0
    assert patience.now() - busy < 6
    assert outcome.failure is not None
    assert str(outcome.failure.sentence) == "gone"


def test_no_process_of_a_rank_is_left(folder: RunFolder) -> None:
    ran(folder, "children", grace_s=1.0)
    for rank in (0, 1):
        assert gone(int((folder.path / f"child-{rank}").read_text()))


def test_megabytes_of_output_go_to_the_log(folder: RunFolder) -> None:
    outcome, _ = ran(folder, "chatty")
    assert outcome.state == "done"
    assert folder.log("rank-1").stat().st_size >= 4_000_000


def test_a_program_that_is_not_there(folder: RunFolder) -> None:
    start = RankStart(name="rank-0", rank=0, command=("/no/such",), environment={}, log=folder.log("rank-0"))
    with pytest.raises(ConfigError, match="/no/such cannot be started"):
        run([start], folder, lambda event: None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_rank(folder: RunFolder, number: signal.Signals, code: int) -> None:
    pids = [folder.path / f"pid-{rank}" for rank in (0, 1)]

    def interrupt() -> None:
        wait_for(*pids)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    outcome, _ = ran(folder, "running")
    assert (outcome.state, outcome.exit_code) == ("interrupted", code)
    assert outcome.tally.began
    assert all(gone(int(path.read_text())) for path in pids)


def test_ranks_end_with_a_desk_that_was_killed(folder: RunFolder) -> None:
    desk = (
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "from test_run import RunFolder, run, starts\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "run(starts(folder, 'running'), folder, lambda event: None)\n"
    )
    process = warm_desk.Process(str(folder.path), code=desk)
    pids = [folder.path / f"pid-{rank}" for rank in (0, 1)]
    wait_for(*pids)
    process.kill()
    assert all(gone(int(path.read_text())) for path in pids)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without room")
def test_a_rank_that_could_not_write_its_last_words() -> None:
    start = RankStart(name="rank-0", rank=0, command=("x",), environment={}, log=Path("/proc/self/rank-0.log"))
    failure = first_failure([Exit(start=start, code=2, at=1.0)], [start], ())
    assert str(failure.sentence) == "rank 0 could not go on, as the disk of /proc is full: make room"
    assert failure.is_users
