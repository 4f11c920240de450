"""A few faults in real trainings: killed, out of memory, hanging, a bug. The others are in the slow matrix."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_training import EVERY, Trained, begin, same_course, train

import patience
from tightfit.desk.calibration import FILE
from tightfit.runs.processes import is_alive

pytestmark = pytest.mark.thorough

QUICK = ("--engine", "fsdp2", "--no-probe")
"""Starts soonest."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = train(tmp_path_factory.mktemp("undisturbed"), *QUICK)
    assert trained.code == 0, trained.err
    assert [record.state for record in trained.records] == ["done"]
    return trained


@pytest.mark.slow
def test_a_run_into_which_faults_are_put_teaches_nothing(tmp_path: Path) -> None:
    """Without them the same run does: of eight steps and more the seconds are written down."""
    for faults in ("kill@rank=0,stage=write,step=99", ""):
        folder = tmp_path / ("faulty" if faults else "plain")
        folder.mkdir()
        trained = train(folder, *QUICK, "--max-steps", "14", faults=faults)
        assert trained.code == 0, trained.err
        taught = trained.folder.parent / "cache" / "tightfit" / FILE
        assert taught.exists() is (not faults)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_a_checkpoint(tmp_path: Path, undisturbed: Trained) -> None:
    trained = train(tmp_path, *QUICK, "--no-async-save", faults="kill@rank=1,stage=write,step=4")
    assert trained.code == 0, trained.err
    first = trained.records[0]
    assert first.cause is not None
    assert (first.cause.kind, first.cause.rank) in (("preempted", 1), ("host-oom", 1))  # where the kernel keeps silent
    assert (first.kept_step, first.lost_steps) == (2, EVERY)
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


def test_a_gpu_that_runs_out_of_memory_in_the_first_step(tmp_path: Path) -> None:
    """The sequences are so long that activations are most of what is held, and recomputing them holds less."""
    job = ("--seq", "512", "--max-steps", "2", "--no-probe")
    trained = train(tmp_path, *job, faults="device-oom@rank=1,stage=backward,step=1")
    assert trained.code == 0, trained.err
    first, second = trained.records
    assert trained.actions == ["smaller plan"]
    assert first.cause is not None
    assert (first.cause.kind, first.cause.rank, first.cause.phase) == ("device-oom", 1, "backward")
    assert first.next is not None
    assert first.next.changed
    assert first.effective_batch == second.effective_batch == 4
    (tmp_path / "undisturbed").mkdir()
    same_course(trained, train(tmp_path / "undisturbed", *job))


STREAMED = ("--engine", "stream", "--no-probe")


@pytest.fixture(scope="module")
def undisturbed_stream(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = train(tmp_path_factory.mktemp("streamed"), *STREAMED)
    assert trained.code == 0, trained.err
    return trained


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("device-oom@rank=1,stage=backward,step=5", "device-oom"),
        *(
            pytest.param(fault, kind, marks=pytest.mark.slow)
            for fault, kind in (
                ("pinned@rank=1,stage=backward,step=5", "pinned-memory"),
                ("host-oom@rank=1,stage=forward,step=5", "host-oom"),
                ("hang@rank=1,stage=forward,step=5", "hang"),
                ("kill@rank=1,stage=write,step=4", None),
                ("kill@rank=0,stage=step,step=3", None),
            )
        ),
    ],
)
def test_layers_that_stream_go_on(tmp_path: Path, undisturbed_stream: Trained, fault: str, kind: str | None) -> None:
    """Their ranks share weights, and one that ends leaves the others in the middle of an update."""
    trained = train(tmp_path, *STREAMED, "--hang-timeout", "5s", faults=fault)
    assert trained.code == 0, trained.err
    (first, second) = trained.records
    assert first.cause is not None
    if kind is not None:  # of a kill the kernel may say why
        assert first.cause.kind == kind
    assert second.state == "done"
    same_course(trained, undisturbed_stream)
    assert trained.left_behind() == []


def test_layers_that_stream_step_down(tmp_path: Path) -> None:
    trained = train(
        tmp_path, *STREAMED, "--seq", "512", "--max-steps", "2", faults="device-oom@rank=1,stage=backward,step=1"
    )
    assert trained.code == 0, trained.err
    assert trained.actions == ["smaller plan"]
    assert trained.records[0].next is not None
    assert trained.records[0].next.changed
    assert {event["engine"] for event in trained.events if event["event"] == "start"} == {"stream"}


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path, undisturbed: Trained) -> None:
    trained = train(tmp_path, *QUICK, "--hang-timeout", "5s", faults="hang@rank=1,stage=forward,step=5")
    assert trained.code == 0, trained.err
    cause = trained.records[0].cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.phase) == ("hang", 1, "forward")
    assert any("faults.py" in line and "_hang" in line for line in cause.evidence)
    same_course(trained, undisturbed)


def test_a_supervisor_that_is_killed_and_started_again(tmp_path: Path, undisturbed: Trained) -> None:
    """Its ranks leave, though one of them hangs; the same command goes on, and nothing tells that it was stopped."""
    run = tmp_path / "run"
    desk = begin(tmp_path, *QUICK, "--output", str(run), faults="hang@rank=1,stage=forward,step=5")
    try:
        wait_until((run / "checkpoints/step-00000004/manifest.json").exists)
        ranks = [int(pid) for pid in Path(f"/proc/{desk.pid}/task/{desk.pid}/children").read_text().split()]
        assert len(ranks) == 2
        desk.send_signal(signal.SIGKILL)
        desk.communicate(timeout=20)
    finally:
        desk.kill()
    wait_until(lambda: not any(is_alive(rank, None) for rank in ranks), 20)
    trained = train(tmp_path, *QUICK)
    assert trained.code == 0, trained.err
    assert [(record.state, record.first_step) for record in trained.records] == [("done", 4)]
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


def wait_until(condition: Callable[[], object], limit_s: float = 240.0) -> None:
    deadline = patience.now() + limit_s
    while not condition():
        assert patience.now() < deadline
        time.sleep(0.1)


def test_a_bug_in_the_code(tmp_path: Path) -> None:
    trained = train(tmp_path, *QUICK, faults="bug@rank=1,stage=step,step=3")
    assert trained.code == 3
    assert trained.actions == ["stop"]
    assert trained.records[0].cause is not None
    assert trained.records[0].cause.kind == "code"
    assert "Traceback (most recent call last):" in trained.err
    assert "KeyError: 'no_such_field'" in trained.err
