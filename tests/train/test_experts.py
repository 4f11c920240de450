"""Ranks that share the experts of a layer compute what a layer with all of them does, however tokens are routed.

In float64: what remains is the order of sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from running import LIMIT_S, start_ranks
from sharing_experts import RANKS, WAYS

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far the ranks are from a single one, by how tokens are routed."""
    script = str(Path(__file__).with_name("sharing_experts.py"))
    ranks = start_ranks([sys.executable, script], RANKS, tmp_path_factory.mktemp("cache"))
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(stderr for _, stderr in said)
    found: dict[str, float] = json.loads(said[0][0].splitlines()[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_rows_come_back_from_the_owners_of_their_experts(apart: dict[str, float], way: str) -> None:
    assert apart[way] < TOLERANCE
