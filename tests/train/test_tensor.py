"""Layers that ranks share give the losses and gradients of whole ones, with adapters too, for the families with a plan.

In float64: what remains is the order of sums. transformers computes the plain loss itself in fp32, and the norms of
some models.
"""

from __future__ import annotations

import pytest
from layer_sharing import CASES
from running import figures_of

TOLERANCE, IN_FP32 = 1e-12, 1e-5
PARTLY_FP32 = ("plain loss", "windows", "norms on both sides")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far four ranks are from a single one, by what was compared."""
    return figures_of("layer_sharing.py", 4, tmp_path_factory.mktemp("cache"))


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["columns", *CASES])
def test_shares_of_layers_add_up_to_whole_ones(apart: dict[str, float], case: str) -> None:
    assert apart[case] < (IN_FP32 if any(word in case for word in PARTLY_FP32) else TOLERANCE)
