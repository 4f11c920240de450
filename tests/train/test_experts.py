"""Ranks that share the experts of a layer compute what a layer with all of them does, however tokens are routed.

In float64: what remains is the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from running import figures_of, run_ranks, write_plan
from sharing_experts import RANKS, WAYS
from small_models import QWEN3_MOE

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far the ranks are from a single one, by how tokens are routed."""
    return figures_of("sharing_experts.py", RANKS, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("way", WAYS)
def test_rows_come_back_from_the_owners_of_their_experts(apart: dict[str, float], way: str) -> None:
    assert apart[way] < TOLERANCE


@pytest.mark.slow
def test_a_rehearsed_rank_computes_rows_of_others(tmp_path: Path) -> None:
    """Under the fake group, where more arrive than are sent: what it makes of them is finite, no step is skipped."""
    flags = {"model": QWEN3_MOE, "engine": "fsdp2", "expert_parallel": 4, "precision": "bf16", "seq": 64}
    folder = write_plan(tmp_path, 8, **flags, effective_batch=8, max_steps=2, checkpointing="full")
    ran = run_ranks(folder, "--rehearse", "--steps", "2", world=1)
    assert ran.codes == [0], ran.stderr[0]
    assert [each["skipped"] for each in ran.of("step")] == [False, False]
    assert all(0 < each["grad_norm"] < float("inf") for each in ran.of("step"))
