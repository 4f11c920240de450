"""The short convolution against its definition in float64, with all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba.arguments import ScanError
from tightfit.mamba.conv import causal_conv1d

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}
"""Relative error in the norm. Sums are in fp32, so the half precisions have one rounding, at the end."""


def definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial: Tensor | None, starts: Tensor | None
) -> Tensor:
    """One document at a time, and for each step the steps that it sees."""
    width = weight.shape[1]
    before = x.new_zeros(x.shape[0], x.shape[1], width - 1) if initial is None else initial
    rows = []
    for row in range(x.shape[0]):
        cuts = [] if starts is None else [t for t in range(x.shape[2]) if starts[row, t]]
        parts, begin, seen = [], 0, before[row]
        for end in [*cuts, x.shape[2]]:
            if end > begin:
                windows = torch.cat([seen, x[row, :, begin:end]], dim=-1).unfold(-1, width, 1)
                parts.append((windows * weight[:, None]).sum(-1))
            begin, seen = end, torch.zeros_like(before[row])
        rows.append(torch.cat(parts, dim=-1))
    out = torch.stack(rows)
    out = out if bias is None else out + bias[:, None]
    return F.silu(out) if silu else out


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def case(batch: int, channels: int, length: int, width: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        # As transformers hands it over: half of a projection, channels last in memory.
        "x": torch.randn(batch, length, 2 * channels).to(dtype)[:, :, :channels].transpose(1, 2),
        "weight": torch.randn(channels, width).to(dtype),
        "bias": torch.randn(channels).to(dtype),
        "initial": torch.randn(batch, channels, width - 1).to(dtype),
        "starts": torch.rand(batch, length) < 0.3,
        "dout": torch.randn(batch, channels, length).to(dtype),
    }


def compare(inputs: dict[str, Tensor], silu: bool, drop: tuple[str, ...], path: str | None = None) -> dict[str, float]:
    """Errors of the output and of each gradient."""
    dout = inputs["dout"]
    given = {name: None if name in drop else each for name, each in inputs.items() if name != "dout"}

    def leaves(dtype: torch.dtype | None) -> dict[str, Tensor | None]:
        return {
            name: each if each is None or each.dtype == torch.bool else each.to(dtype or each.dtype).detach().clone()
            for name, each in given.items()
        }

    ours, theirs = leaves(None), leaves(torch.float64)
    ours["x"] = given["x"].detach()  # keeps its strides
    floats = [name for name, each in ours.items() if each is not None and each.dtype != torch.bool and each.numel()]
    for name in floats:
        ours[name].requires_grad_()
        theirs[name].requires_grad_()
    out = causal_conv1d(
        ours["x"], ours["weight"], ours["bias"], silu=silu, initial=ours["initial"], starts=ours["starts"], path=path
    )
    wanted = definition(theirs["x"], theirs["weight"], theirs["bias"], silu, theirs["initial"], theirs["starts"])
    assert out.dtype == dout.dtype
    errors = {"out": error(out, wanted.detach())}
    got_grads = torch.autograd.grad(out, [ours[name] for name in floats], dout)
    wanted_grads = torch.autograd.grad(wanted, [theirs[name] for name in floats], dout.double(), materialize_grads=True)
    for name, got, right in zip(floats, got_grads, wanted_grads, strict=True):
        errors[name] = error(got, right)
    return errors


SHAPES = [(1, 1, 1, 4), (2, 3, 2, 4), (1, 5, 3, 2), (3, 31, 17, 4), (2, 4, 9, 1), (1, 64, 65, 3)]


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drop", [(), ("initial", "starts"), ("bias", "starts"), ("initial",)])
@pytest.mark.parametrize("silu", [True, False])
def test_the_output_and_every_gradient(shape: tuple[int, int, int, int], drop: tuple[str, ...], silu: bool) -> None:
    for dtype, bound in ROUNDING.items():
        errors = compare(case(*shape, dtype), silu, drop)
        assert max(errors.values()) <= bound, (dtype, errors)


@pytest.mark.thorough
def test_the_gradient_by_differences() -> None:
    inputs = case(2, 3, 7, 4, torch.float64)

    def run(x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor) -> Tensor:
        return causal_conv1d(x, weight, bias, initial=initial, starts=inputs["starts"])

    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "bias", "initial")]
    assert torch.autograd.gradcheck(run, leaves)


def test_the_order_in_memory_stays() -> None:
    inputs = case(2, 8, 6, 4, torch.float32)
    assert causal_conv1d(inputs["x"], inputs["weight"]).stride(1) == 1
    assert causal_conv1d(inputs["x"].contiguous(), inputs["weight"]).stride(2) == 1


def test_what_is_before_the_first_step_is_a_longer_sequence_cut_in_two() -> None:
    inputs = case(2, 8, 20, 4, torch.float64)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    whole = causal_conv1d(x, weight, bias)
    later = causal_conv1d(x[:, :, 9:], weight, bias, initial=x[:, :, 6:9])
    assert error(later, whole[:, :, 9:]) < 1e-14


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.ones(3, 4)}, r"weight must be \(2 channels, width\), not \[3, 4\]"),
        ({"bias": torch.ones(3)}, r"bias must be \[2\] beside x \[1, 2, 5\], not \[3\]"),
        ({"x": torch.ones(2, 5)}, r"x must be \(batch, channels, length\)"),
        ({"x": torch.ones(1, 2, 5, dtype=torch.int32)}, "x is torch.int32"),
        ({"starts": torch.zeros(1, 5)}, "starts must be bool"),
    ],
)
def test_mistakes_are_named(change: dict[str, Tensor], says: str) -> None:
    given = {"x": torch.ones(1, 2, 5), "weight": torch.ones(2, 4), "bias": None, "starts": None} | change
    with pytest.raises(ScanError, match=says):
        causal_conv1d(given["x"], given["weight"], given["bias"], starts=given["starts"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1536, 1000, 4)])
def test_the_kernels_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for drop in ((), ("initial", "starts"), ("bias", "starts")):
            inputs = {name: each.cuda() for name, each in case(*shape, dtype).items()}
            errors = compare(inputs, True, drop, path="triton")
            assert max(errors.values()) <= ROUNDING[dtype], (dtype, drop, errors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_backward_pass_through_time_on_a_gpu() -> None:
    bounds = {dtype: ROUNDING[dtype] for dtype in (torch.float32, torch.bfloat16)}
    in_order(bounds, [(1, 3, 1, 4), (2, 1536, 1000, 4), (1, 300, 33, 4)], "cuda")


def interpreted() -> None:
    """Triton decides at import whether to interpret: called in another process, by `interpreted.py`."""
    bounds = ROUNDING | {torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off where a GPU rounds
    for shape, dtype, silu in (
        ((1, 1, 1, 4), torch.float32, True),
        ((2, 5, 3, 2), torch.float32, False),
        ((2, 5, 3, 2), torch.bfloat16, True),
        ((1, 2, 35, 4), torch.float32, True),  # a long one takes its time
    ):
        for drop in ((), ("initial", "starts"), ("bias", "starts")):
            errors = compare(case(*shape, dtype), silu, drop, path="triton")
            assert max(errors.values()) <= bounds[dtype], (shape, dtype, drop, silu, errors)
    in_order({torch.bfloat16: bounds[torch.bfloat16]}, [(1, 3, 1, 4)])
    in_order({torch.float32: bounds[torch.float32]}, [(1, 3, 66, 4)], drops=(("initial", "bias"),))


def in_order(
    bounds: dict[torch.dtype, float],
    shapes: list[tuple[int, int, int, int]],
    device: str = "cpu",
    drops: tuple[tuple[str, ...], ...] = (("initial",), ("initial", "starts"), ("initial", "bias")),
) -> None:
    """The backward pass that goes through time: four taps, and channels last in what comes back, too."""
    for shape in shapes:
        for dtype, bound in bounds.items():
            for drop in drops:
                inputs = {name: each.to(device) for name, each in case(*shape, dtype).items()}
                inputs["dout"] = inputs["dout"].transpose(1, 2).contiguous().transpose(1, 2)
                errors = compare(inputs, True, drop, path="triton")
                assert max(errors.values()) <= bound, (shape, dtype, drop, errors)
