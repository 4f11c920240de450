"""The desk is asked to stop: ranks save and leave by themselves, and whoever will not is ended.

The desk is a process of its own here, so that it can be sent real signals, alone or with its whole group.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import patience
import warm_desk
from tightfit.runs.processes import is_alive

pytestmark = pytest.mark.thorough

STOPPABLE = Path(__file__).with_name("stoppable.py")
DESK = """
import json, sys
from pathlib import Path
from tightfit.inputs.surroundings import inherited
from tightfit.runs.records import RunFolder
from tightfit.runs.launch import RankStart
from tightfit.runs import run as runs
from tightfit.train import stop

stoppable, mode, path, name, grace_s, patience_s, again_s, shows = sys.argv[1:]
runs.AGAIN_S, stop.SAME_S = float(again_s), float(again_s) / 2
folder = RunFolder(Path(path))
starts = [
    RankStart(
        name=f"{name}-{rank}",
        rank=rank,
        command=(sys.executable, stoppable, mode, path),
        environment=inherited({"RANK": str(rank)}),
        log=folder.log(f"rank-{rank}"),
    )
    for rank in (0, 1)
]
seen = []


def show(event):
    if shows == "terminal gone" and type(event).__name__ == "Stopping":
        raise OSError(5, "Input/output error")
    seen.append(f"{type(event).__name__} {getattr(event, 'text', '')}".strip())


outcome = runs.run(starts, folder, show, cwd=folder.path, grace_s=float(grace_s), patience_s=float(patience_s))
failure = None if outcome.failure is None else outcome.failure.sentence
print(json.dumps({"state": outcome.state, "code": outcome.exit_code, "failure": failure, "seen": seen}))
"""
SAVING = "Stopping saving a checkpoint at the next step; Ctrl-C again leaves at once"


@dataclass
class Desk:
    folder: Path
    process: warm_desk.Process
    pids: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> dict[str, Any]:
        """How it ended; none of its processes is left."""
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err
        assert not any(is_alive(pid, None) for pid in self.pids)
        found: dict[str, Any] = json.loads(out)
        return found

    @property
    def left(self) -> list[str]:
        """The codes of the ranks that left by themselves because of a signal; one that was killed is not among them."""
        return [file.read_text() for file in sorted(self.folder.glob("left-*"))]

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Start:
    folder: Path
    made: list[Desk] = field(default_factory=list)

    def __call__(
        self,
        mode: str,
        *,
        name: str = "rank",
        grace_s: float = 20.0,
        patience_s: float = 60.0,
        again_s: float = 1.0,
        shows: str = "all",
        waits: bool = True,
    ) -> Desk:
        words = [str(STOPPABLE), mode, str(self.folder), name, *map(str, (grace_s, patience_s, again_s)), shows]
        process = warm_desk.Process(*words, code=DESK)
        self.made.append(Desk(self.folder, process))
        files = [self.folder / f"pid-{rank}" for rank in (0, 1)]
        deadline = patience.now() + 20
        while waits and not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            assert patience.now() < deadline
            time.sleep(0.02)
        time.sleep(0.1 if waits else 0)  # the first step is shown
        self.made[-1].pids += [int(file.read_text()) for file in files] if waits else []
        return self.made[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begin = Start(tmp_path)
    yield begin
    for desk in begin.made:
        desk.process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_ranks_save_and_leave_by_themselves(start: Start, number: signal.Signals) -> None:
    desk = start("saves")
    desk.send(number)
    found = desk.end()
    assert (found["state"], found["code"], found["failure"]) == ("stopped", 4, None)
    assert found["seen"] == ["Step", SAVING, "Warned saved after SIGTERM"]


def test_a_save_has_all_the_time_that_it_needs(start: Start) -> None:
    """More than the ranks have that are ended after a failure."""
    desk = start("saves_slowly", grace_s=0.1)
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert desk.took_s > 1.0
    assert (found["state"], found["code"]) == ("stopped", 4)


def test_ctrl_c_reaches_the_ranks_once(start: Start) -> None:
    """A terminal sends it to the whole group; and a shell that dies says twice that it does."""
    desk = start("saves_slowly")
    os.killpg(desk.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(desk.process.pid, signal.SIGHUP)
    assert desk.end()["state"] == "stopped"


def test_whoever_asks_every_process_means_one_thing(start: Start) -> None:
    """As a machine that shuts down does."""
    desk = start("saves_slowly")
    for pid in (desk.process.pid, *desk.pids):
        os.kill(pid, signal.SIGTERM)
    assert desk.end()["state"] == "stopped"


def test_a_rank_that_was_asked_directly_stops_all(start: Start) -> None:
    desk = start("saves")
    for pid in desk.pids:
        os.kill(pid, signal.SIGUSR1)
    found = desk.end()
    assert (found["state"], found["code"]) == ("stopped", 4)
    assert found["seen"][-1] == "Warned saved after SIGUSR1"


def test_a_time_limit_needs_no_signal(start: Start) -> None:
    found = start("out_of_time", waits=False).end()
    assert (found["state"], found["code"], found["failure"]) == ("stopped", 4, None)


def test_a_training_that_ends_meanwhile_is_done(start: Start) -> None:
    desk = start("finishes")
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert (found["state"], found["code"]) == ("done", 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_before_the_first_step_all_leave_at_once(start: Start, number: signal.Signals, code: int) -> None:
    desk = start("starting")
    desk.send(number)
    found = desk.end()
    assert (found["state"], found["code"], found["failure"]) == ("interrupted", code, None)
    assert found["seen"] == ["Stopping every process is asked to end; Ctrl-C again leaves at once"]
    assert desk.left == ["143", "143"]


def test_one_rank_has_nothing_to_save_yet(start: Start) -> None:
    desk = start("one_starts")
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert (found["state"], found["code"], found["failure"]) == ("interrupted", 143, None)


def test_the_second_signal_ends_ranks_that_cannot_save(start: Start) -> None:
    desk = start("hangs", again_s=0.4)
    desk.send(signal.SIGINT)
    time.sleep(0.5)
    assert desk.process.poll() is None
    desk.send(signal.SIGINT)
    found = desk.end()
    assert (found["state"], found["code"]) == ("interrupted", 130)
    assert desk.left == ["143", "143"], "nobody waited for the grace to pass"


def test_ranks_that_hear_nothing_are_killed(start: Start) -> None:
    desk = start("deaf", grace_s=0.5, again_s=0.4)
    desk.send(signal.SIGTERM)
    time.sleep(0.5)
    assert desk.process.poll() is None
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert (found["state"], found["code"], desk.left) == ("interrupted", 143, [])


def test_the_third_signal_does_not_wait(start: Start) -> None:
    began = patience.now()
    desk = start("deaf", again_s=0.4)
    for pause_s in (0.5, 0.5, 0):
        desk.send(signal.SIGTERM)
        time.sleep(pause_s)
    assert desk.end()["state"] == "interrupted"
    assert patience.now() - began < 15


def test_patience_has_an_end(start: Start) -> None:
    desk = start("hangs", patience_s=0.5)
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert (found["state"], found["code"]) == ("interrupted", 143)


def test_a_rank_that_fails_instead_of_saving_is_a_failure(start: Start) -> None:
    desk = start("one_fails")
    desk.send(signal.SIGTERM)
    found = desk.end()
    assert (found["state"], found["code"], found["failure"]) == ("failed", 3, "RuntimeError: no such tensor")


def test_ranks_that_train_do_not_outstay_one_that_died(start: Start) -> None:
    """They take the first request for one to save, and nothing can be saved any more."""
    desk = start("one_dies", waits=False)
    found = desk.end()
    assert (found["state"], found["failure"]) == ("failed", "RuntimeError: no such tensor")
    assert desk.left == ["143"], "asked again, it left before the grace had passed"


def test_a_terminal_that_has_closed_costs_no_checkpoint(start: Start) -> None:
    desk = start("saves", shows="terminal gone")
    desk.send(signal.SIGHUP)
    found = desk.end()
    assert (found["state"], found["code"]) == ("stopped", 4)


def test_a_launcher_of_others_is_ended_not_failed(start: Start) -> None:
    """DeepSpeed's ends its ranks when it is asked to stop, and itself with a code that means nothing."""
    desk = start("one_fails", name="launcher")
    desk.send(signal.SIGINT)
    found = desk.end()
    assert (found["state"], found["code"], found["failure"]) == ("interrupted", 130, None)
    assert found["seen"][-1].startswith("Stopping every process is asked to end")
