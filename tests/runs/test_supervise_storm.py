"""Faults of every kind over two hundred steps: the run finishes, as if nothing had happened, and leaves nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from faulty_training import Trained, remove_groups, same_course, train

pytestmark = pytest.mark.slow

STEPS, EVERY, FAULTS = 200, 10, 12
JOB = ("--max-steps", str(STEPS), "--save-every", str(EVERY), "--hang-timeout", "8s")
KINDS = {
    "kill": ("forward", "backward", "step", "vote", "write"),
    "hang": ("forward", "step"),
    "nccl": ("backward", "vote"),
    "nccl-timeout": ("step",),
    "device-oom": ("backward",),
    "host-oom": ("forward",),
    "shared-memory": ("forward",),
    "ecc": ("forward", "backward"),
    "cuda": ("backward", "save"),
    "pinned": ("backward",),
}


def storm(seed: int) -> str:
    """Faults at different steps; those that come while saving at a step that saves."""
    drawn = random.Random(seed)  # noqa: S311
    steps = sorted(drawn.sample(range(1, STEPS), FAULTS))
    faults = []
    for step in steps:
        what = drawn.choice(sorted(KINDS))
        stage = drawn.choice(KINDS[what])
        if stage in ("write", "save"):
            step = max(EVERY, step // EVERY * EVERY)  # noqa: PLW2901
        faults.append(f"{what}@rank={drawn.randrange(2)},stage={stage},step={step}")
    return ";".join(faults)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained = train(tmp_path_factory.mktemp("calm"), *JOB)
    assert trained.code == 0, trained.err
    return trained


@pytest.mark.parametrize("seed", [42])
def test_a_storm_passes(tmp_path: Path, calm: Trained, seed: int) -> None:
    trained = train(tmp_path, *JOB, faults=storm(seed))
    assert trained.code == 0, trained.err + trained.out
    assert len(trained.records) > FAULTS // 2
    assert {record.effective_batch for record in trained.records} == {4}
    assert all(record.lost_steps <= 2 * EVERY for record in trained.records[:-1])
    same_course(trained, calm)
    assert trained.left_behind() == []
    remove_groups()
