"""AdamW over flat states on the host, against torch's own over parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tightfit.train import host_states
from tightfit.train.engines import MASTER
from tightfit.train.host_states import HostStates
from tightfit.train.optimizers import BETAS, BLOCK, EPS, clip

SHAPES = {(64, 48): 0.1, (320,): 0.0, (40, 80): 0.1, (32,): 0.0}  # with their weight decay
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)
STEPS, RATE = 4, 3e-3


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "PIECE", 4 * BLOCK)  # several of them, across segments


def allocate(size: int) -> Tensor:
    return torch.full((size,), 77, dtype=torch.uint8)  # a state that nobody wrote would show


def make(*, master: bool = True) -> HostStates:
    decays = [(torch.Size(shape).numel(), decay) for shape, decay in SHAPES.items()]
    return HostStates(decays, "fp32", master=master, allocate=allocate)


def gradients_of(step: int) -> Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ELEMENTS, generator=made) * torch.logspace(-6, 1, ELEMENTS)


def weights_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99)).to(dtype)


def follow_torch(start: Tensor, *, most: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights, and the moments by kind, flat, after so many steps of torch's AdamW."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    params = [part.clone().view(shape) for part, shape in zip(start.float().split(sizes), SHAPES, strict=True)]
    groups = [{"params": [param], "weight_decay": decay} for param, decay in zip(params, SHAPES.values(), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)
    for step in range(1, STEPS + 1):
        for param, part in zip(params, gradients_of(step).split(sizes), strict=True):
            param.grad = part.view(param.shape)
        clip([param.grad for param in params if param.grad is not None], most, None)
        optimizer.step()
    kinds = {
        kind: torch.cat([optimizer.state[param][kind].view(-1) for param in params])
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return torch.cat([param.view(-1) for param in params]), kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("most", [0.0, 1.0])
def test_steps_are_torchs_bit_for_bit(dtype: torch.dtype, most: float) -> None:
    weights = weights_of(dtype)
    expected, expected_moments = follow_torch(weights, most=most)
    held = make(master=dtype != torch.float32)
    held.start(weights)
    for step in range(1, STEPS + 1):
        gradients = gradients_of(step)
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        norm = clip(list(gradients.split(sizes)), 0.0, None)
        factor = float((most / (norm + 1e-6)).clamp(max=1.0)) if most else 1.0
        held.update(gradients, weights, rate=RATE, step=step, factor=factor)
        assert torch.equal(gradients, gradients_of(step))  # they are read alone
    for kind, values in expected_moments.items():
        assert torch.equal(held.read(kind, 0, ELEMENTS), values)
    assert torch.equal(weights, expected.to(dtype))
    if dtype != torch.float32:
        assert torch.equal(held.read(MASTER, 0, ELEMENTS), expected)


@pytest.mark.parametrize("master", [True, False])
def test_ranges_make_up_the_whole(master: bool) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    whole, ranged = make(master=master), make(master=master)
    weights, apart = weights_of(dtype), weights_of(dtype)
    whole.start(weights)
    ranged.start(apart)
    cuts = [0, 3 * BLOCK, 4 * BLOCK, 11 * BLOCK, ELEMENTS]
    for step in range(1, STEPS + 1):
        whole.update(gradients_of(step), weights, rate=RATE, step=step, factor=0.5)
        for begin, end in reversed(list(pairwise(cuts))):
            ranged.update(gradients_of(step), apart, rate=RATE, step=step, factor=0.5, begin=begin, end=end)
    assert torch.equal(weights, apart)
    for kind in whole.kinds:
        assert torch.equal(whole.read(kind, 0, ELEMENTS), ranged.read(kind, 0, ELEMENTS))


def test_a_range_within_a_block_is_refused() -> None:
    held, weights = make(), weights_of(torch.bfloat16)
    held.start(weights)
    with pytest.raises(ValueError, match="no whole blocks"):
        held.update(gradients_of(1), weights, rate=RATE, step=1, factor=1.0, end=BLOCK + 1)


def test_a_training_goes_on_from_what_was_read() -> None:
    first, second = make(), make()
    weights = weights_of(torch.bfloat16)
    first.start(weights)
    for step in (1, 2):
        first.update(gradients_of(step), weights, rate=RATE, step=step, factor=1.0)
    moved = weights.clone()
    second.start(moved)
    for kind in first.kinds:
        for begin in range(0, ELEMENTS, 1000):
            second.write(kind, begin, first.read(kind, begin, min(begin + 1000, ELEMENTS)))
    for step in (3, 4):
        first.update(gradients_of(step), weights, rate=RATE, step=step, factor=1.0)
        second.update(gradients_of(step), moved, rate=RATE, step=step, factor=1.0)
    assert torch.equal(weights, moved)


def test_what_is_forgotten_is_as_before_the_first_step() -> None:
    held, weights = make(), weights_of(torch.bfloat16)
    held.start(weights)
    held.update(gradients_of(1), weights, rate=RATE, step=1, factor=1.0)
    after = weights.clone()
    held.forget()
    held.start(weights_of(torch.bfloat16))
    held.update(gradients_of(1), weights, rate=RATE, step=1, factor=1.0)
    assert torch.equal(weights, after)
