"""The inside of a Mamba layer, from the output of its first projection to its own output, as one function of autograd.

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

from tightfit.mamba import chunked
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
    check_shapes({"x_proj": weights.x_proj}, {"x_proj": (rank + 2 * states, channels)}, text("scan.beside-a-log"))
    tokens = xz.shape[0], xz.shape[2]
    check_shapes({"keep": keep, "starts": starts}, {"keep": tokens, "starts": tokens}, text("scan.beside-xz"))
    if starts is not None and starts.dtype != torch.bool:
        raise ScanError(text("scan.starts-dtype", dtype=starts.dtype))
    given = (getattr(weights, name) for name in NAMES)
    out: Tensor = _Mixer.apply(norm_eps, keep, starts, xz, *given)  # type: ignore[no-untyped-call]
    return out


class _Inside:
    """What is between `xz` and `out_proj`, for both directions."""

    def __init__(self, xz: Tensor, weights: Weights, keep: Tensor | None, starts: Tensor | None) -> None:
        self.x, self.z = xz.chunk(2, dim=1)
        self.weights, self.keep, self.starts, self.dtype = weights, keep, starts, xz.dtype
        self._wide = torch.float64 if xz.dtype == torch.float64 else torch.float32

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
        w, wide = self.weights, self._wide
        return Scan(
            u=u, delta=F.linear(dt, self.matrix(w.dt_proj)).transpose(1, 2), A=-torch.exp(w.A_log.to(wide)),
            B=B.transpose(1, 2), C=C.transpose(1, 2), D=w.D.to(wide), z=self.z,
            delta_bias=None if w.dt_bias is None else w.dt_bias.to(wide), starts=self.starts, delta_softplus=True,
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


def _scan_forward(scan: Scan) -> tuple[Tensor, Tensor | None]:
    """The output, and on a GPU the states that the backward pass starts from."""
    if fitting(scan) != "triton":
        return chunked.run_forward(scan)[0], None
    from tightfit.mamba import gpu_scan

    out, _, borders = gpu_scan.run_forward(scan)
    return out, borders


def _scan_backward(scan: Scan, borders: Tensor | None, dout: Tensor, dz: Tensor) -> tuple[Gradients, Tensor]:
    """The gradients, that of the gate in `dz`, and the scan's output again. On a GPU delta and dout are overwritten."""
    if borders is None:
        out, _, borders = chunked.run_forward(scan)
        grads = chunked.run_backward(scan, borders, dout, None)
        assert grads.z is not None
        dz.copy_(grads.z)
        return grads, out
    from tightfit.mamba import gpu_scan

    return gpu_scan.run_backward(scan, borders, dout, None, dz=dz, overwrite=True), dout


def _rows(tensor: Tensor) -> Tensor:
    """(batch, length, ·) → (tokens, ·)."""
    return tensor.reshape(-1, tensor.shape[-1])


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm_eps: float | None, keep: Tensor | None, starts: Tensor | None, xz: Tensor, *given: Any
    ) -> Tensor:
        w = Weights(*given)
        with torch.autocast(xz.device.type, enabled=False):
            inside = _Inside(xz, w, keep, starts)
            u = inside.convolved()
            narrow = F.linear(u.transpose(1, 2), inside.matrix(w.x_proj))
            parts = [normalise(part, norm_eps) for part in inside.split(narrow)]
            out, borders = _scan_forward(inside.scan(u, parts))
            bias = None if w.out_bias is None else inside.matrix(w.out_bias)
            y = F.linear(out.transpose(1, 2), inside.matrix(w.out_proj), bias)
        ctx.save_for_backward(narrow, borders, keep, starts, xz, *given)
        ctx.norm_eps = norm_eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        narrow, borders, keep, starts, xz, *given = ctx.saved_tensors
        wanted = dict(zip(("xz", *NAMES), ctx.needs_input_grad[3:], strict=True))
        with torch.autocast(xz.device.type, enabled=False):
            inside = _Inside(xz, Weights(*given), keep, starts)
            grads = _backward(inside, narrow, borders, dy, wanted, ctx.norm_eps)
        cast = (
            grads[name].to(tensor.dtype) if wanted[name] else None
            for name, tensor in zip(wanted, (xz, *given), strict=True)
        )
        return (None, None, None, *cast)


def _backward(
    inside: _Inside, narrow: Tensor, borders: Tensor | None, dy: Tensor, wanted: dict[str, bool], eps: float | None
) -> dict[str, Tensor]:
    """Of everything that is wanted, by the names of Weights. What is as wide as `x` is let go as soon as may be."""
    w = inside.weights
    grads: dict[str, Tensor] = {}
    u = inside.convolved()
    raw = inside.split(narrow)
    parts = [normalise(part, eps) for part in raw]
    scan = inside.scan(u, parts)
    # Room for both halves, in the order in memory that x has.
    batch, channels, length = u.shape
    if inside.x.stride(1) == 1:
        dxz = inside.x.new_empty(batch, length, 2 * channels).transpose(1, 2)
    else:
        dxz = inside.x.new_empty(batch, 2 * channels, length)
    dx_half, dz_half = dxz.chunk(2, dim=1)
    dout = (dy @ inside.matrix(w.out_proj)).transpose(1, 2)
    scanned, out = _scan_backward(scan, borders, dout, dz_half)
    del dout
    if wanted["out_proj"]:
        grads["out_proj"] = _rows(dy).t() @ _rows(out.transpose(1, 2))
    if wanted["out_bias"]:
        grads["out_bias"] = _rows(dy).sum(0, dtype=scan.A.dtype)
    assert scanned.D is not None
    grads |= {"A_log": scanned.A * scan.A, "D": scanned.D}
    if scanned.delta_bias is not None:
        grads["dt_bias"] = scanned.delta_bias
    du, ddelta, dB, dC = scanned.u, scanned.delta, scanned.B, scanned.C
    del scanned, scan, out
    ddelta = ddelta.transpose(1, 2)
    if wanted["dt_proj"]:
        grads["dt_proj"] = _rows(ddelta).t() @ _rows(parts[0])
    wants = [ddelta @ inside.matrix(w.dt_proj), dB.transpose(1, 2), dC.transpose(1, 2)]
    del ddelta
    dnarrow = torch.cat(
        [_norm_backward(part, each, eps).to(narrow.dtype) for part, each in zip(raw, wants, strict=True)], dim=-1
    )
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
