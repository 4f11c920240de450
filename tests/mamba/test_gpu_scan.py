"""The kernels on a GPU against the CPU's path in float64, which test_scan holds to the definition. Bounds as there."""

from __future__ import annotations

import pytest
import torch
from scans import Shape, error, make, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LENGTHS = (1, 2, 63, 64, 65, 255, 1000, 4097)
SIZES = [(1, 1, 16), (3, 31, 1), (3, 31, 16), (1, 64, 8), (3, 64, 16), (1, 1536, 16), (1, 64, 64)]
"""Batch, channels, states."""


@pytest.mark.parametrize("channels_last", [False, True], ids=["time last", "channels last"])
@pytest.mark.parametrize("size", SIZES)
def test_every_length(size: tuple[int, int, int], channels_last: bool) -> None:
    batch, channels, states = size
    for number, length in enumerate(LENGTHS):
        dtype = list(BOUNDS)[number % 3]
        inputs = make(Shape(batch, channels, length, states), dtype, seed=number)
        starts = torch.rand(batch, length) < 0.02 if number % 2 else None
        expected = results(inputs, "chunked", wide=True, starts=starts)
        given = {name: tensor.cuda() for name, tensor in inputs.items()}
        if channels_last:
            given |= {
                name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("u", "delta", "B", "C", "z")
            }
        there = None if starts is None else starts.cuda()
        ours, again = (results(given, "triton", starts=there) for _ in range(2))
        errors = {name: error(ours[name].cpu(), tensor) for name, tensor in expected.items()}
        # A sum over one channel may nearly cancel: what rounding alone does to it, the CPU's path in this dtype shows.
        rounded = results(inputs, "chunked", starts=starts)
        bounds = {name: max(BOUNDS[dtype], 2 * error(rounded[name], tensor)) for name, tensor in expected.items()}
        assert {name: each for name, each in errors.items() if not each < bounds[name]} == {}, (length, dtype)
        assert all(torch.equal(ours[name], again[name]) for name in ours)


def test_not_a_number_stays_one() -> None:
    inputs = {name: tensor.cuda() for name, tensor in make(Shape(1, 40, 200, 16)).items()}
    inputs["delta"][0, 3, 50] = float("nan")
    out = results(inputs, "triton")["out"]
    assert out[0, 3, 50:].isnan().all()
    assert not out[0, 3, :50].isnan().any()
    assert not out[0, 4].isnan().any()
