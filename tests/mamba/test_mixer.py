"""The fused mixer against the same steps one by one in float64, by the definition of the scan, with all gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba import mixer
from tightfit.mamba.arguments import ScanError
from tightfit.mamba.conv import Conv, causal_conv1d
from tightfit.mamba.mixer import Weights, mamba_mixer
from tightfit.mamba.scan import selective_scan

NAMES = tuple(field.name for field in fields(Weights))
BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 0.04}
"""Relative error in the norm. Rounding units are 1e-16, 6e-8 and 4e-3; a gradient at the start of the chain has been
through some ten roundings, and the softplus and the exponential of a large time step multiply what comes in."""


def random_weights(channels: int = 24, states: int = 4, rank: int = 3, model: int = 12) -> Weights:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64)

    return Weights(
        conv=normal(channels, 1, 4) / 2,
        conv_bias=normal(channels) / 2,
        x_proj=normal(rank + 2 * states, channels) / channels**0.5,
        dt_proj=normal(channels, rank) / rank**0.5,
        dt_bias=normal(channels) - 2,
        A_log=torch.log(torch.arange(1.0, states + 1, dtype=torch.float64)).expand(channels, -1) + normal(1, 1) / 4,
        D=normal(channels),
        out_proj=normal(model, channels) / channels**0.5,
        out_bias=normal(model),
    )


def one_by_one(xz: Tensor, w: Weights, norm_eps: float | None, keep: Tensor | None, starts: Tensor | None) -> Tensor:
    x, z = xz.chunk(2, dim=1)
    u = causal_conv1d(x, w.conv.squeeze(1), w.conv_bias, starts=starts)
    u = u if keep is None else u * keep[:, None]
    states, rank = w.A_log.shape[1], w.dt_proj.shape[1]
    parts = F.linear(u.transpose(1, 2), w.x_proj).split([rank, states, states], dim=-1)
    if norm_eps is not None:
        parts = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norm_eps) for part in parts]
    delta, B, C = F.linear(parts[0], w.dt_proj), parts[1], parts[2]
    out = selective_scan(
        u, delta.transpose(1, 2), -torch.exp(w.A_log), B.transpose(1, 2), C.transpose(1, 2), w.D, z, w.dt_bias, True,
        starts=starts, path="reference",
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return F.linear(out.transpose(1, 2), w.out_proj, w.out_bias)


def leaves(weights: Weights, dtype: torch.dtype) -> Weights:
    made = {name: getattr(weights, name) for name in NAMES}
    return Weights(**{
        name: None if each is None else each.detach().to(dtype).clone().requires_grad_() for name, each in made.items()
    })  # fmt: skip


def given(weights: Weights) -> list[Tensor]:
    return [each for name in NAMES if (each := getattr(weights, name)) is not None]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def errors(weights: Weights, xz: Tensor, dtype: torch.dtype, **settings: Any) -> dict[str, float]:
    """Of the output and of each gradient. xz: (batch, length, 2 channels)."""
    xz = xz.to(dtype)
    ours, theirs = leaves(weights, dtype), leaves(leaves(weights, dtype), torch.float64)
    xz_ours, xz_theirs = xz.clone().requires_grad_(), xz.double().requires_grad_()
    y = mamba_mixer(xz_ours.transpose(1, 2), ours, **settings)
    wanted = one_by_one(
        xz_theirs.transpose(1, 2), theirs, settings.get("norm_eps"), settings.get("keep"), settings.get("starts")
    )
    dy = torch.randn_like(wanted).to(dtype)
    names = ["xz", *(name for name in NAMES if getattr(ours, name) is not None)]
    got = torch.autograd.grad(y, [xz_ours, *given(ours)], dy)
    right = torch.autograd.grad(wanted, [xz_theirs, *given(theirs)], dy.double())
    found = {name: error(a, b) for name, a, b in zip(names, got, right, strict=True)}
    assert all(a.dtype == dtype for a in got)
    return found | {"y": error(y, wanted)}


@pytest.mark.thorough
@pytest.mark.parametrize("norm_eps", [None, 1e-6], ids=["mamba", "falcon"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "padded and packed"])
@pytest.mark.parametrize("length", [1, 3, 37])
def test_the_output_and_every_gradient(norm_eps: float | None, cut: bool, length: int) -> None:
    torch.manual_seed(length)
    weights, xz = random_weights(), torch.randn(2, length, 48, dtype=torch.float64)
    keep = torch.arange(length)[None] >= torch.tensor([[0], [length // 3]]) if cut else None
    starts = torch.rand(2, length) < 0.2 if cut else None
    for dtype, bound in BOUNDS.items():
        found = errors(weights, xz, dtype, norm_eps=norm_eps, keep=keep, starts=starts)
        assert max(found.values()) <= bound, (dtype, found)


def test_biases_may_be_missing() -> None:
    torch.manual_seed(0)
    weights = replace(random_weights(), conv_bias=None, dt_bias=None, out_bias=None)
    found = errors(weights, torch.randn(2, 9, 48, dtype=torch.float64), torch.float64)
    assert len(found) == len(NAMES) - 3 + 2
    assert max(found.values()) <= BOUNDS[torch.float64], found


def test_time_may_be_the_last_in_memory() -> None:
    torch.manual_seed(0)
    weights, xz = leaves(random_weights(), torch.float64), torch.randn(2, 48, 9, dtype=torch.float64)
    last, first = xz.clone().requires_grad_(), xz.clone().requires_grad_()
    channels_last = first.transpose(1, 2).contiguous().transpose(1, 2)
    y, again = mamba_mixer(last, weights), mamba_mixer(channels_last, weights)
    assert error(y, again) < 1e-14
    assert error(torch.autograd.grad(y.sum(), last)[0], torch.autograd.grad(again.sum(), first)[0]) < 1e-13


def test_what_is_kept_is_xz_and_the_narrow_projection_and_no_copy_of_a_weight() -> None:
    torch.manual_seed(0)
    batch, length, channels, states, rank = 2, 64, 96, 4, 3
    weights = leaves(random_weights(channels, states, rank, 48), torch.bfloat16)
    xz = torch.randn(batch, length, 2 * channels, dtype=torch.bfloat16, requires_grad=True)
    parameters = {each.data_ptr() for each in given(weights)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mamba_mixer(xz.transpose(1, 2), weights, norm_eps=1e-6)
    assert sum(kept.values()) == batch * length * (2 * channels + rank + 2 * states) * 2
    y = mamba_mixer(xz.transpose(1, 2), weights, norm_eps=1e-6)
    saved = y.grad_fn.saved_tensors
    assert all(any(each is parameter for each in saved) for parameter in given(weights))


def test_frozen_weights_get_no_gradient_and_the_input_does() -> None:
    torch.manual_seed(0)
    weights = leaves(random_weights(), torch.float64)
    for each in given(weights):
        each.requires_grad_(False)
    weights.A_log.requires_grad_()
    xz = torch.randn(1, 9, 48, dtype=torch.float64, requires_grad=True)
    mamba_mixer(xz.transpose(1, 2), weights).sum().backward()
    assert xz.grad is not None
    assert [name for name in NAMES if getattr(weights, name).grad is not None] == ["A_log"]


def test_the_same_inputs_twice_are_the_same_bits() -> None:
    def once() -> list[Tensor]:
        torch.manual_seed(0)
        weights = leaves(random_weights(), torch.bfloat16)
        xz = torch.randn(2, 50, 48).to(torch.bfloat16).requires_grad_()
        y = mamba_mixer(xz.transpose(1, 2), weights, norm_eps=1e-6)
        return [y, *torch.autograd.grad(y.float().square().sum(), [xz, *given(weights)])]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_fp32_weights_under_autocast() -> None:
    """As mixed precision has it: the stream in bf16, the weights and their gradients in fp32."""
    torch.manual_seed(0)
    weights, xz = leaves(random_weights(), torch.float32), torch.randn(2, 20, 48, dtype=torch.float64)
    narrow = xz.to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mamba_mixer(narrow.transpose(1, 2), weights)
    wanted = one_by_one(narrow.detach().double().transpose(1, 2), leaves(weights, torch.float64), None, None, None)
    assert y.dtype == torch.bfloat16
    assert error(y, wanted) < BOUNDS[torch.bfloat16]
    y.float().sum().backward()
    assert all(each.grad.dtype == torch.float32 for each in given(weights))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"xz": torch.ones(2, 47, 5)}, r"xz must be \(batch, 48, length\)"),
        ({"keep": torch.ones(2, 4)}, r"keep must be \[2, 5\] beside xz, not \[2, 4\]"),
        ({"starts": torch.ones(2, 5)}, "starts must be bool"),
    ],
)
def test_mistakes_are_named(change: dict[str, Tensor], says: str) -> None:
    settings: dict[str, Any] = {"xz": torch.ones(2, 48, 5)} | change
    with pytest.raises(ScanError, match=says):
        mamba_mixer(settings.pop("xz"), leaves(random_weights(), torch.float32), **settings)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernels_under_the_interpreter() -> None:
    """Triton decides at import whether to interpret: another process."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm_eps", [None, 1e-6], ids=["mamba", "falcon"])
def test_the_kernels_on_a_gpu(norm_eps: float | None) -> None:
    torch.manual_seed(0)
    made, xz = random_weights(96, 16, 8, 48), torch.randn(2, 333, 192, dtype=torch.float64).cuda()
    weights = Weights(**{name: getattr(made, name).cuda() for name in NAMES})
    keep, starts = torch.rand(2, 333).cuda() > 0.1, torch.rand(2, 333).cuda() < 0.05
    for dtype in (torch.float32, torch.bfloat16):
        found = errors(weights, xz, dtype, norm_eps=norm_eps, keep=keep, starts=starts)
        assert max(found.values()) <= BOUNDS[dtype], (dtype, found)


def interpreted() -> None:
    """As on a GPU: the kernels of the scan and of the convolution, though the tensors are elsewhere."""
    mixer.fitting = lambda scan: "triton"  # type: ignore[assignment]
    Conv.on_triton = property(lambda conv: True)  # type: ignore[assignment, method-assign]
    torch.manual_seed(0)
    weights, xz = random_weights(8, 4, 3, 6), torch.randn(2, 9, 16, dtype=torch.float64)
    cut = {"keep": torch.rand(2, 9) > 0.2, "starts": torch.rand(2, 9) < 0.2}
    for norm_eps in (None, 1e-6):
        for more in ({}, cut):
            found = errors(weights, xz, torch.float32, norm_eps=norm_eps, **more)
            assert max(found.values()) <= BOUNDS[torch.float32], found


if __name__ == "__main__":
    interpreted()
