"""The mixer's backward pass, written by hand, against differences of its forward pass in float64."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tightfit.mamba.mixer import Weights, mamba_mixer

BATCH, LENGTH, CHANNELS, STATES, RANK, MODEL, WIDTH = 2, 6, 4, 3, 2, 3, 4
SIZES = {
    "conv": (CHANNELS, 1, WIDTH),
    "conv_bias": (CHANNELS,),
    "x_proj": (RANK + 2 * STATES, CHANNELS),
    "dt_proj": (CHANNELS, RANK),
    "dt_bias": (CHANNELS,),
    "A_log": (CHANNELS, STATES),
    "D": (CHANNELS,),
    "out_proj": (MODEL, CHANNELS),
    "out_bias": (MODEL,),
}


@pytest.mark.thorough
@pytest.mark.parametrize("norm_eps", [None, 1e-6], ids=["mamba", "falcon"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "padded and packed"])
def test_of_the_mixer(norm_eps: float | None, cut: bool) -> None:
    assert set(SIZES) == {each.name for each in fields(Weights)}
    drawn = torch.Generator().manual_seed(0)

    def leaf(*size: int) -> Tensor:
        return (0.5 * torch.randn(*size, generator=drawn, dtype=torch.float64)).requires_grad_()

    keep = torch.arange(LENGTH)[None] >= torch.tensor([[0], [2]]) if cut else None
    starts = torch.arange(LENGTH)[None] == torch.tensor([[3], [4]]) if cut else None

    def run(xz: Tensor, *weights: Tensor) -> Tensor:
        own = Weights(**dict(zip(SIZES, weights, strict=True)))
        return mamba_mixer(xz, own, norm_eps=norm_eps, keep=keep, starts=starts)

    leaves = [leaf(*size) for size in SIZES.values()]
    assert torch.autograd.gradcheck(run, (leaf(BATCH, 2 * CHANNELS, LENGTH), *leaves))
