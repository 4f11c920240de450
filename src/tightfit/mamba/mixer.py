"""The inside of a Mamba layer, from the output of its first projection to its own output, as one operator.

    x, z = xz                                            the two halves, (batch, channels, length)
    u = silu(conv(x))                                    0 where `keep` is
    dt, B, C = x_proj(u)                                 FalconMamba: each divided by its root mean square
    δ = softplus(dt_proj(dt) + bias)
    out = scan(u, δ, A, B, C, D) silu(z)
    y = out_proj(out)

Kept for the backward pass: `xz`, the narrow output of `x_proj`, and on a GPU the scan's states at its borders. All else
is as wide as `x` and is computed again. The convolution and the second projection are cheap; `out`, which the gradient
of `out_proj` needs, comes from the scan's backward pass on a GPU, and elsewhere from its forward pass once more.

Parameters are kept as they are, and never a cast or a view of them: an engine that shards them lets go of the memory
behind a parameter after its layer, but a copy of ours would stay. A, D and the bias of the time step are computed in
fp32, whatever they are kept in; matrices in the dtype of `xz`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba import chunked, operators
from tightfit.mamba.arguments import Gradients, Scan, ScanError, check_shapes
from tightfit.mamba.conv import Conv, conv_backward, conv_forward
from tightfit.mamba.scan import fitting
from tightfit.messages import text


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a mixer, the first projection aside. e: channels, n: states, r: rank of the time step, d: of the model."""

    conv: Tensor  # (e, 1, width), as nn.Conv1d has it
    conv_bias: Tensor | None
    x_proj: Tensor  # (r + 2n, e)
    dt_proj: Tensor  # (e, r)
    dt_bias: Tensor | None
    A_log: Tensor  # (e, n); A is -exp of it
    D: Tensor
    out_proj: Tensor  # (d, e)
    out_bias: Tensor | None


NAMES = tuple(field.name for field in fields(Weights))


def mamba_mixer(
    xz: Tensor,
    weights: Weights,
    *,
    norm_eps: float | None = None,
    keep: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """xz: (batch, 2 channels, length), with any strides; the output is (batch, length, model).

    `keep` (batch, length) is zero at padding; `starts` (batch, length) is true where a document starts.
    """
    channels, states = weights.A_log.shape
    rank = weights.dt_proj.shape[1]
    if xz.dim() != 3 or xz.shape[1] != 2 * channels or 0 in xz.shape:
        raise ScanError(text("scan.xz-shape", channels=2 * channels, shape=list(xz.shape)))
    check_shapes({"x_proj": weights.x_proj}, {"x_proj": (rank + 2 * states, channels)}, "scan.beside-a-log")
    tokens = xz.shape[0], xz.shape[2]
    check_shapes({"keep": keep, "starts": starts}, {"keep": tokens, "starts": tokens}, "scan.beside-xz")
    if starts is not None and starts.dtype != torch.bool:
        raise ScanError(text("scan.starts-dtype", dtype=starts.dtype))
    out: Tensor = _mixer(xz, *(getattr(weights, name) for name in NAMES), keep, starts, norm_eps)[0]
    return out


class _Inside:
    """What is between `xz` and `out_proj`, for both directions."""

    def __init__(self, xz: Tensor, weights: Weights, keep: Tensor | None, starts: Tensor | None) -> None:
        self.xz, (self.x, self.z) = xz, xz.chunk(2, dim=1)
        self.weights, self.keep, self.starts, self.dtype = weights, keep, starts, xz.dtype

    @property
    def conv(self) -> Conv:
        return Conv(self.x, self.weights.conv.squeeze(1), self.weights.conv_bias, None, self.starts, silu=True)

    def convolved(self) -> Tensor:
        """u; in memory the channels of a step stand together if those of xz do."""
        u = conv_forward(self.conv)
        return u if self.keep is None else u.mul_(self.keep[:, None])

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)

    def split(self, narrow: Tensor) -> list[Tensor]:
        """(batch, length, ·) → time step, B, C."""
        states = self.weights.A_log.shape[1]
        return list(torch.split(narrow, [self.weights.dt_proj.shape[1], states, states], dim=-1))

    def scan(self, u: Tensor, parts: list[Tensor]) -> Scan:
        """The time step's projection included."""
        dt, B, C = parts
        w = self.weights
        return Scan(
            u=u, delta=F.linear(dt, self.matrix(w.dt_proj)).transpose(1, 2), A=w.A_log, B=B.transpose(1, 2),
            C=C.transpose(1, 2), D=w.D, z=self.z, delta_bias=w.dt_bias, starts=self.starts, delta_softplus=True,
            log_rates=True,
        )  # fmt: skip


def normalise(part: Tensor, eps: float | None) -> Tensor:
    """Divided by its root mean square; the weight is one."""
    if eps is None:
        return part
    wide = part if part.dtype == torch.float64 else part.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(part.dtype)


def _norm_backward(part: Tensor, wanted: Tensor, eps: float | None) -> Tensor:
    """`part` is what was to be normed."""
    if eps is None:
        return wanted
    wide = part if part.dtype == torch.float64 else part.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, wanted = wide * scale, wanted.to(wide.dtype)
    return scale * (wanted - normed * (wanted * normed).mean(-1, keepdim=True))


def _scan_forward(scan: Scan) -> tuple[Tensor, Tensor]:
    """The output, and on a GPU the states that the backward pass starts from."""
    if fitting(scan) != "triton":
        return chunked.run_forward(scan)[0], operators.absent(scan.u)
    from tightfit.mamba import gpu_scan

    out, _, borders = gpu_scan.run_forward(scan)
    return out, borders


def _scan_backward(
    scan: Scan, borders: Tensor, dout: Tensor, places: dict[str, Tensor]
) -> tuple[Gradients, Tensor]:  # fmt: skip
    """The gradients, those of `places` there, and the scan's output again. On a GPU delta and dout are overwritten."""
    if fitting(scan) != "triton":
        out, _, borders = chunked.run_forward(scan)
        grads = chunked.run_backward(scan, borders, dout, None)
        for name, place in places.items():
            place.copy_(getattr(grads, name))
        return grads, out
    from tightfit.mamba import gpu_scan

    return gpu_scan.run_backward(scan, borders, dout, None, places=places, overwrite=True), dout


def _rows(tensor: Tensor) -> Tensor:
    """(batch, length, ·) → (tokens, ·)."""
    return tensor.reshape(-1, tensor.shape[-1])


_ARGUMENTS = (
    "Tensor xz, Tensor conv, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, Tensor? dt_bias, Tensor A_log, "
    "Tensor D, Tensor out_proj, Tensor? out_bias, Tensor? keep, Tensor? starts, float? norm_eps"
)
_mixer = operators.Operator(f"mixer({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_mixer_backward = operators.Operator(
    f"mixer_backward(Tensor dy, Tensor narrow, Tensor borders, bool[] wanted, {_ARGUMENTS}) -> "
    f"({', '.join(['Tensor'] * (1 + len(NAMES)))})"
)


@_mixer.computes
def run_mixer(xz: Tensor, *given: Any) -> operators.Outputs:
    """The output, and what the backward pass needs: the narrow projection, and the scan's states."""
    w, (keep, starts, norm_eps) = Weights(*given[: len(NAMES)]), given[len(NAMES) :]
    with torch.autocast(xz.device.type, enabled=False):
        inside = _Inside(xz, w, keep, starts)
        u = inside.convolved()
        narrow = F.linear(u.transpose(1, 2), inside.matrix(w.x_proj))
        parts = [normalise(part, norm_eps) for part in inside.split(narrow)]
        out, borders = _scan_forward(inside.scan(u, parts))
        bias = None if w.out_bias is None else inside.matrix(w.out_bias)
        y = F.linear(out.transpose(1, 2), inside.matrix(w.out_proj), bias)
    return y, narrow, borders


@_mixer.shapes
def shape_mixer(xz: Tensor, *given: Any) -> operators.Outputs:
    w, (batch, _, length) = Weights(*given[: len(NAMES)]), xz.shape
    inside = _Inside(xz, w, None, None)
    narrow = xz.new_empty(batch, length, w.x_proj.shape[0])
    borders = operators.absent(xz)
    if fitting(scan := inside.scan(torch.empty_like(inside.x), inside.split(narrow))) == "triton":
        from tightfit.mamba import gpu_scan

        borders = gpu_scan.make_places(scan)[2]
    return xz.new_empty(batch, length, w.out_proj.shape[0]), narrow, borders


@_mixer_backward.computes
def run_mixer_backward(
    dy: Tensor, narrow: Tensor, borders: Tensor, wanted: list[bool], xz: Tensor, *given: Any
) -> operators.Outputs:
    """The gradients of xz and of each weight."""
    weights, (keep, starts, norm_eps) = given[: len(NAMES)], given[len(NAMES) :]
    named = dict(zip(("xz", *NAMES), wanted, strict=True))
    with torch.autocast(xz.device.type, enabled=False):
        inside = _Inside(xz, Weights(*weights), keep, starts)
        grads = _backward(inside, narrow, borders, dy, named, norm_eps)
    return tuple(
        grads[name].to(tensor.dtype) if named[name] else operators.absent(xz)
        for name, tensor in zip(named, (xz, *weights), strict=True)
    )


@_mixer_backward.shapes
def shape_mixer_backward(
    dy: Tensor, narrow: Tensor, borders: Tensor, wanted: list[bool], xz: Tensor, *given: Any
) -> operators.Outputs:
    places = (_like(xz), *(None if each is None else each.new_empty(each.shape) for each in given[: len(NAMES)]))
    return tuple(
        place if wants and place is not None else operators.absent(xz)
        for place, wants in zip(places, wanted, strict=True)
    )


def _like(xz: Tensor) -> Tensor:
    """Room for both halves, in the order in memory that xz has."""
    batch, both, length = xz.shape
    if xz.stride(1) == 1:
        return xz.new_empty(batch, length, both).transpose(1, 2)
    return xz.new_empty(batch, both, length)


@_mixer.keeps
def keep_for_mixer(ctx: Any, inputs: tuple[Any, ...], outputs: operators.Outputs) -> None:
    *tensors, ctx.norm_eps = inputs
    _, narrow, borders = outputs
    ctx.save_for_backward(narrow, borders, *tensors)
    ctx.mark_non_differentiable(narrow, borders)


@_mixer.differentiates
def differentiate_mixer(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    count = 1 + len(NAMES)
    if dy is None:
        return (None,) * (count + 3)
    narrow, borders, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:count])
    grads = _mixer_backward(dy, narrow, borders, wanted, *tensors, ctx.norm_eps)
    return (*(grad if wants else None for grad, wants in zip(grads, wanted, strict=True)), None, None, None)


def _backward(
    inside: _Inside, narrow: Tensor, borders: Tensor, dy: Tensor, wanted: dict[str, bool], eps: float | None
) -> dict[str, Tensor]:
    """Of everything that is wanted, by the names of Weights. What is as wide as `x` is let go as soon as may be."""
    w = inside.weights
    grads: dict[str, Tensor] = {}
    u = inside.convolved()
    raw = inside.split(narrow)
    parts = [normalise(part, eps) for part in raw]
    scan = inside.scan(u, parts)
    batch, channels, length = u.shape
    dxz = _like(inside.xz)
    dx_half, dz_half = dxz.chunk(2, dim=1)
    dnarrow = torch.empty_like(narrow)
    places = inside.split(dnarrow)
    of_B_and_C = places[1:]
    if eps is not None:  # norms stand between B and C and their places
        of_B_and_C = [torch.empty_like(part, dtype=scan.wide) for part in of_B_and_C]
    into = {name: place.transpose(1, 2) for name, place in zip("BC", of_B_and_C, strict=True)}
    dout = (dy @ inside.matrix(w.out_proj)).transpose(1, 2)
    scanned, out = _scan_backward(scan, borders, dout, {"z": dz_half} | into)
    del dout
    if wanted["out_proj"]:
        grads["out_proj"] = _rows(dy).t() @ _rows(out.transpose(1, 2))
    if wanted["out_bias"]:
        grads["out_bias"] = _rows(dy).sum(0, dtype=scan.wide)
    assert scanned.D is not None
    grads |= {"A_log": scanned.A, "D": scanned.D}
    if scanned.delta_bias is not None:
        grads["dt_bias"] = scanned.delta_bias
    du, ddelta = scanned.u, scanned.delta
    del scanned, scan, out
    ddelta = ddelta.transpose(1, 2)
    if wanted["dt_proj"]:
        grads["dt_proj"] = _rows(ddelta).t() @ _rows(parts[0])
    if eps is None:
        torch.mm(_rows(ddelta), inside.matrix(w.dt_proj), out=_rows(dnarrow)[:, : parts[0].shape[-1]])
    else:
        wants = [ddelta @ inside.matrix(w.dt_proj), *of_B_and_C]
        for place, part, each in zip(places, raw, wants, strict=True):
            place.copy_(_norm_backward(part, each, eps))
    del ddelta
    if wanted["x_proj"]:
        grads["x_proj"] = _rows(dnarrow).t() @ _rows(u.transpose(1, 2))
    del u
    # Added before it is rounded; where time is last in memory, the rows are a copy.
    rows = _rows(du.transpose(1, 2)).addmm_(_rows(dnarrow), inside.matrix(w.x_proj))
    du = rows.view(batch, length, channels).transpose(1, 2)
    if inside.keep is not None:
        du *= inside.keep[:, None]
    conv = conv_backward(inside.conv, du, dx_half)
    return grads | {"xz": dxz, "conv": conv.weight[:, None], "conv_bias": conv.bias}
