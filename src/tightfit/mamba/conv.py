"""Mamba's short convolution: each channel by itself, looking back only, with the SiLU that follows it.

    pre[t] = bias + Σₛ w[width-1-s] x[t-s]              s steps back; before the first step stands `initial`, or zero
    y[t] = silu(pre[t])

A step that starts a document sees nothing before it, nor do the steps after it. Sums are in fp32 whatever the dtype.
Only the inputs are kept: `pre` costs less to compute again than to read back. The two halves, `conv_forward` and
`conv_backward`, can be called one by one: the mixer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tightfit.mamba import operators
from tightfit.mamba.arguments import ScanError, as_bytes, check_shapes, check_tensors, strides
from tightfit.mamba.scan import has_triton
from tightfit.messages import text

Path = Literal["torch", "triton"]


STEPS, TILE = 16, 128  # steps and channels of a program
SEGMENT, SEGMENT_TILE = 32, 256  # the same of one that goes through time in order
FINISH_TILE = 64


@dataclass(frozen=True, slots=True)
class Conv:
    """b: batch, d: channels, l: length, w: width."""

    x: Tensor  # (b, d, l), with any strides
    weight: Tensor  # (d, w)
    bias: Tensor | None  # (d)
    initial: Tensor | None  # (b, d, w - 1): the inputs before the first step
    starts: Tensor | None  # (b, l), true where a document starts
    silu: bool
    path: Path | None = None  # None: what fits the tensors

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def wide(self) -> torch.dtype:
        """What sums are computed in."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    @property
    def on_triton(self) -> bool:
        if self.path is not None:
            return self.path == "triton"
        return self.x.is_cuda and self.wide == torch.float32 and has_triton()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvGradients:
    """That of x has the dtype of x; the sums have that of the parameter, or that in which they were computed."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    initial: Tensor | None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    initial: Tensor | None = None,
    starts: Tensor | None = None,
    path: Path | None = None,
) -> Tensor:
    """x: (batch, channels, length) with any strides; weight: (channels, width); bias: (channels). The output has x's
    shape, dtype and order in memory.

    `initial` (batch, channels, width - 1) stands before the first step, and has a gradient; `starts` (batch, length) is
    true where a document starts.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "initial": initial, "starts": starts}
    check_tensors(tensors, ("x", "weight"), "scan.conv-dtype")
    if x.dim() != 3 or 0 in x.shape:
        raise ScanError(text("scan.x-shape", shape=list(x.shape)))
    batch, channels, length = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ScanError(text("scan.weight-shape", channels=channels, shape=list(weight.shape)))
    before = (batch, channels, weight.shape[1] - 1)
    wanted = {"bias": (channels,), "initial": before, "starts": (batch, length)}
    check_shapes(tensors, wanted, "scan.beside-x", x=x)
    out: Tensor = _conv(*tensors.values(), silu, path)
    return out


def conv_forward(conv: Conv) -> Tensor:
    if conv.on_triton:
        return triton_forward(conv)
    pre = _before_silu(conv)
    return (torch.nn.functional.silu(pre, inplace=True) if conv.silu else pre).to(conv.x.dtype)


def conv_backward(conv: Conv, dout: Tensor, into: Tensor | None = None) -> ConvGradients:
    """`into`: where the gradient of x goes, if it has a place already."""
    into = torch.empty_like(conv.x) if into is None else into
    if conv.on_triton:
        return triton_backward(conv, dout, into)
    length, weight = conv.x.shape[2], conv.weight.to(conv.wide)
    x, dpre = conv.x.to(conv.wide), dout.to(conv.wide)
    if conv.silu:
        pre = _before_silu(conv)
        share = torch.sigmoid(pre)
        dpre = pre.mul_(1 - share).add_(1).mul_(share).mul_(dpre)
    dx = dpre * weight[:, -1:]
    dweight = weight.new_zeros(weight.shape)
    dweight[:, -1] = (dpre * x).sum((0, 2))
    dinitial = None if conv.initial is None else conv.initial.new_zeros(conv.initial.shape, dtype=conv.wide)
    for back in range(1, conv.width):
        tap, visible = weight[:, -1 - back, None], _visible(conv.starts, back)
        seen = dpre if visible is None else dpre * visible
        if back < length:
            dx[:, :, :-back].addcmul_(seen[:, :, back:], tap)
            dweight[:, -1 - back] += (seen[:, :, back:] * x[:, :, :-back]).sum((0, 2))
        if conv.initial is not None and dinitial is not None:
            early, first = min(back, length), conv.width - 1 - back
            dinitial[:, :, first : first + early].addcmul_(seen[:, :, :early], tap)
            dweight[:, -1 - back] += (seen[:, :, :early] * conv.initial[:, :, first : first + early]).sum((0, 2))
    into.copy_(dx)
    return ConvGradients(x=into, weight=dweight, bias=dpre.sum((0, 2)), initial=dinitial)


def _visible(starts: Tensor | None, back: int) -> Tensor | None:
    """(b, 1, l): whether a step sees the one `back` steps before it. None: all do."""
    if starts is None or back == 0:
        return None
    hidden = starts.clone()
    for nearer in range(1, back):
        hidden[:, nearer:] |= starts[:, :-nearer]
    return ~hidden[:, None]


def _before_silu(conv: Conv) -> Tensor:
    """In the order in memory that x has."""
    length, weight = conv.x.shape[2], conv.weight.to(conv.wide)
    x = conv.x.to(conv.wide)
    pre = x * weight[:, -1:]
    if conv.bias is not None:
        pre += conv.bias.to(conv.wide)[:, None]
    for back in range(1, conv.width):
        tap, visible = weight[:, -1 - back, None], _visible(conv.starts, back)
        if back < length:
            seen = tap if visible is None else tap * visible[:, :, back:]
            pre[:, :, back:].addcmul_(x[:, :, :-back], seen)
        if conv.initial is not None:
            early = min(back, length)  # steps that look so far back that they see what was before the first
            seen = tap if visible is None else tap * visible[:, :, :early]
            first = conv.width - 1 - back
            pre[:, :, :early].addcmul_(conv.initial[:, :, first : first + early].to(conv.wide), seen)
    return pre


def triton_forward(conv: Conv) -> Tensor:
    from tightfit.mamba import conv_kernels as kernels

    batch, channels, length = conv.x.shape
    out, starts = torch.empty_like(conv.x), as_bytes(conv.starts)
    kernels._forward[-(-channels // TILE), -(-length // STEPS), batch](
        conv.x, conv.weight, conv.bias, conv.initial, starts, out,
        *conv.x.stride(), *conv.weight.stride(), *strides(conv.initial), *strides(starts, 2), *out.stride(),
        channels, length, WIDTH=conv.width, HAS_INITIAL=conv.initial is not None, STEPS=STEPS, TILE=TILE, num_warps=4,
        **_switches(conv),
    )  # fmt: skip
    return out


def triton_backward(conv: Conv, dout: Tensor, into: Tensor) -> ConvGradients:
    """`into` takes the gradient of x."""
    from tightfit.mamba import conv_kernels as kernels

    batch, channels, length = conv.x.shape
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": conv.x.device}
    plain = conv.initial is None and conv.x.stride(1) == dout.stride(1) == into.stride(1) == 1
    in_order = conv.width == 4 and plain
    steps, tile = (SEGMENT, SEGMENT_TILE) if in_order else (STEPS, TILE)
    # Steps that stand before the first are in tiles of their own sequence: one that begins earlier.
    tiles = -(-(length if conv.initial is None else length + conv.width - 1) // steps)
    dweight = torch.empty(batch * tiles, conv.width, channels, **fp32)
    dbias = torch.empty(batch * tiles, channels, **fp32)
    dinitial = None if conv.initial is None else torch.empty(batch, channels, conv.width - 1, **fp32)
    starts, grid = as_bytes(conv.starts), (-(-channels // tile), tiles, batch)
    if in_order:
        kernels._backward_of_four[grid](
            conv.x, conv.weight, conv.bias, starts, dout, into, dweight, dbias,
            conv.x.stride(0), conv.x.stride(2), *conv.weight.stride(), *strides(starts, 2), dout.stride(0),
            dout.stride(2), into.stride(0), into.stride(2), channels, length, SEGMENT,
            TILE=tile, num_warps=1, **_switches(conv),
        )  # fmt: skip
    else:
        kernels._backward[grid](
            conv.x, conv.weight, conv.bias, conv.initial, starts, dout, into, dweight, dbias, dinitial,
            *conv.x.stride(), *conv.weight.stride(), *strides(conv.initial), *strides(starts, 2), *dout.stride(),
            *into.stride(), channels, length, WIDTH=conv.width, HAS_INITIAL=conv.initial is not None, STEPS=steps,
            TILE=tile, num_warps=4, **_switches(conv),
        )  # fmt: skip
    weight = conv.weight.new_empty(channels, conv.width)
    bias = operators.absent(dbias) if conv.bias is None else conv.bias.new_empty(channels)
    kernels._finish[-(-channels // FINISH_TILE), conv.width + (conv.bias is not None)](
        dweight, dbias, weight, bias, batch * tiles, channels,
        WIDTH=conv.width, HAS_BIAS=conv.bias is not None, ROWS=32, TILE=FINISH_TILE, num_warps=4,
    )  # fmt: skip
    return ConvGradients(x=into, weight=weight, bias=bias, initial=dinitial)


def _switches(conv: Conv) -> dict[str, bool]:
    return {"SILU": conv.silu, "HAS_BIAS": conv.bias is not None, "HAS_STARTS": conv.starts is not None}


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial, Tensor? starts, bool silu, str? path"
_conv = operators.Operator(f"conv({_ARGUMENTS}) -> Tensor")
_conv_backward = operators.Operator(f"conv_backward(Tensor dout, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")


@_conv.computes
def run_conv(*given: Any) -> Tensor:
    return conv_forward(Conv(*given))


@_conv.shapes
def shape_conv(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_conv_backward.computes
def run_conv_backward(dout: Tensor, *given: Any) -> operators.Outputs:
    conv = Conv(*given)
    return _outputs(conv, conv_backward(conv, dout))


@_conv_backward.shapes
def shape_conv_backward(dout: Tensor, *given: Any) -> operators.Outputs:
    conv = Conv(*given)
    sums = conv.weight.new_empty(conv.weight.shape), conv.weight.new_empty(conv.weight.shape[0])
    initial = None if conv.initial is None else conv.initial.new_empty(conv.initial.shape)
    return _outputs(conv, ConvGradients(x=torch.empty_like(conv.x), weight=sums[0], bias=sums[1], initial=initial))


def _outputs(conv: Conv, grads: ConvGradients) -> operators.Outputs:
    return (
        grads.x, grads.weight.to(conv.weight.dtype),
        operators.absent(conv.x) if conv.bias is None else grads.bias.to(conv.bias.dtype),
        operators.absent(conv.x) if conv.initial is None or grads.initial is None
        else grads.initial.to(conv.initial.dtype),
    )  # fmt: skip


@_conv.keeps
def keep_for_conv(ctx: Any, given: tuple[Any, ...], _: Tensor) -> None:
    *tensors, ctx.silu, ctx.path = given
    ctx.save_for_backward(*tensors)


@_conv.differentiates
def differentiate_conv(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 7
    grads = _conv_backward(dout, *ctx.saved_tensors, ctx.silu, ctx.path)
    found = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))
    return (*found, None, None, None)
