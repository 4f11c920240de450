"""Every fault that is worth another attempt, at the first step, in the middle and while saving: the run finishes by
itself, with the same batch, the same losses, and a record that tells the true cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_training import (
    EVERY,
    Trained,
    may_limit_memory,
    may_mount,
    remove_groups,
    same_course,
    small_disk,
    train,
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    kind: str
    stage: str
    saving: str = "save"
    """The stage that is `while saving`: `write` is in the middle of it, for what ends a process without a word."""
    words: tuple[str, ...] = ()


CASES = {
    "device-oom": Case("device-oom", "backward"),
    "fragmentation": Case("fragmentation", "backward"),
    "other-process": Case("other-process", "backward"),
    "pinned": Case("pinned-memory", "backward"),
    "shared-memory": Case("shared-memory", "forward"),
    "nccl": Case("communication", "backward"),
    "nccl-timeout": Case("communication", "step"),
    "ecc": Case("hardware", "forward"),
    "gpu-lost": Case("hardware", "forward"),
    "cuda": Case("unknown", "backward"),
    "host-oom": Case("host-oom", "forward"),
    "host-oom-killed": Case("host-oom", "forward", "write"),
    "kill": Case("preempted", "forward", "write"),
    "hang": Case("hang", "forward", "write", ("--hang-timeout", "5s")),
    "disk-full": Case("disk-full", "forward"),
}
PLACES = ("first step", "mid-run", "while saving")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = train(tmp_path_factory.mktemp("undisturbed"))
    assert trained.code == 0, trained.err
    return trained


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where the run's folder is; on a disk of its own, where it is to be filled."""
    name = request.node.callspec.params["name"]
    if name == "host-oom-killed" and not may_limit_memory():
        pytest.skip("no memory group can be made here")
    with ExitStack() as stack:
        if name != "disk-full":
            yield tmp_path
        elif may_mount():
            yield stack.enter_context(small_disk(tmp_path / "disk", 160))
        else:
            pytest.skip("no disk can be made here")
    remove_groups()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_it_finishes_by_itself(tmp_path: Path, undisturbed: Trained, place: Path, name: str, where: str) -> None:
    case = CASES[name]
    stage = case.saving if where == "while saving" else case.stage
    step = {"first step": 1, "mid-run": 5, "while saving": 4}[where]
    words = (*case.words, *(("--no-async-save",) if where == "while saving" else ()))
    trained = train(tmp_path, *words, faults=f"{name}@rank=1,stage={stage},step={step}", place=place)
    assert trained.code == 0, trained.err
    first, *others = trained.records
    assert len(others) == 1
    assert others[0].state == "done"
    assert first.cause is not None
    assert (first.cause.kind, first.cause.rank) == (case.kind, 1)
    assert first.cause.evidence
    assert {record.effective_batch for record in trained.records} == {4}
    assert first.lost_steps <= EVERY
    assert first.reached == {"first step": 0, "mid-run": 4, "while saving": 4}[where]
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


# --- numbers that are none ------------------------------------------------------------------------------


def test_a_window_that_ruins_the_numbers_is_left_out_where_that_is_allowed(tmp_path: Path) -> None:
    trained = train(tmp_path, "--allow", "skip-data", faults="nan@rank=1,stage=forward,step=5,repeat")
    assert trained.code == 0, trained.err
    assert trained.actions == ["skip data"]
    first = trained.records[0]
    assert first.cause is not None
    assert first.cause.kind == "not-finite"
    assert "look at samples" in str(first.cause.sentence)
    assert "step 5 is left out" in trained.out
    assert [step for step, loss in trained.losses.items() if loss is None] == [5]


def test_without_leave_it_stops_and_names_the_samples(tmp_path: Path) -> None:
    trained = train(tmp_path, faults="nan@rank=0,stage=forward,step=5,repeat")
    assert trained.code == 3
    assert trained.actions == ["stop"]
    assert "look at samples" in trained.err
    assert "--allow skip-data" in trained.err
    assert "there is a checkpoint of step 4" in trained.err


def test_fp16_that_overflows_for_good_goes_on_in_bf16(tmp_path: Path) -> None:
    """Thirteen steps in a row overflow, until the loss scale has reached its floor; bf16 has no such trouble."""
    faults = ";".join(f"nan@rank=1,stage=forward,step={step}" for step in range(3, 16))
    words = ("--precision", "fp16", "--engine", "fsdp2", "--allow", "precision", "--max-steps", "22")
    trained = train(tmp_path, *words, faults=faults)
    assert trained.code == 0, trained.err
    assert trained.actions == ["precision"]
    assert trained.records[0].cause is not None
    assert trained.records[0].cause.kind == "loss-scale"
    assert trained.records[0].next is not None
    assert trained.records[0].next.changed[0] == "precision fp16 → bf16"
    assert max(trained.losses) == 22


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(tmp_path: Path, undisturbed: Trained) -> None:
    """The training goes on without that checkpoint, and fails when the model finds no room; then there is some."""
    if not may_mount():
        pytest.skip("no disk can be made here")
    with small_disk(tmp_path / "disk", 160) as disk:
        trained = train(tmp_path, faults="disk-full@rank=1,stage=write,step=4", place=disk)
        assert trained.code == 0, trained.err
        assert trained.actions == ["make room"]
        assert trained.records[0].cause is not None
        assert trained.records[0].cause.kind == "disk-full"
        same_course(trained, undisturbed)
