"""Rows that ranks share give the losses and gradients of whole rows, whatever the model's attention looks like.

In float64: what remains is the order of sums, parts in 10^13 of the largest gradient. transformers computes the plain
loss itself in fp32, and the norms of some models.
"""

from __future__ import annotations

import pytest
from running import figures_of
from sharing import CASES

TOLERANCE, IN_FP32 = 1e-12, 1e-6
PARTLY_FP32 = ("plain loss", "windows and caps")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far four ranks are from a single one, by what was compared."""
    return figures_of("sharing.py", 4, tmp_path_factory.mktemp("cache"))


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["the exchange", *CASES])
def test_parts_add_up_to_the_whole(apart: dict[str, float], case: str) -> None:
    assert apart[case] < (IN_FP32 if case in PARTLY_FP32 else TOLERANCE)
