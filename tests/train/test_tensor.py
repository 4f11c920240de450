"""Layers that ranks share give the losses and gradients of whole ones, with adapters too, for the families with a plan.

In float64: what remains is the order of sums. transformers computes the plain loss itself in fp32, and the norms of
some models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from layer_sharing import CASES
from running import LIMIT_S, start_ranks

TOLERANCE, IN_FP32 = 1e-12, 1e-5
PARTLY_FP32 = ("plain loss", "windows", "norms on both sides")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far four ranks are from a single one, by what was compared."""
    script = str(Path(__file__).with_name("layer_sharing.py"))
    ranks = start_ranks([sys.executable, script], 4, tmp_path_factory.mktemp("cache"))
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(stderr for _, stderr in said)
    found: dict[str, float] = json.loads(said[0][0].splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["columns", *CASES])
def test_shares_of_layers_add_up_to_whole_ones(apart: dict[str, float], case: str) -> None:
    assert apart[case] < (IN_FP32 if any(word in case for word in PARTLY_FP32) else TOLERANCE)
