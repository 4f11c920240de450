"""The scan on a GPU: Triton's kernels behind autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.mamba import kernels
from tightfit.mamba.arguments import Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How the kernels are cut; chosen outside of them, so that they can be tried one by one."""

    tile: int = 32
    """Channels of a program."""
    border: int = 256
    """Steps between two states that are kept."""
    inner: int = 16
    """Steps that the backward pass holds at once."""
    segment: int | None = None
    """Steps of a program; a multiple of `border`. None: as many as fill the card."""
    warps: int = 1


FULL = 2048
"""Programs that fill a large card."""


def triton_scan(scan: Scan, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the state after the last step."""
    out, last = _Triton.apply(  # type: ignore[no-untyped-call]
        scan.u, scan.delta, scan.A, scan.B, scan.C, scan.D, scan.z, scan.delta_bias, scan.initial_state, scan.starts,
        scan.delta_softplus, config or Config(),
    )  # fmt: skip
    return out, last


class _Cut:
    """Sizes of a launch."""

    def __init__(self, scan: Scan, config: Config) -> None:
        self.batch, self.channels, self.states, self.length = scan.sizes
        self.config, self._device = config, scan.u.device
        self.tiles = -(-self.channels // config.tile)
        self.borders = -(-self.length // config.border)
        wanted = max(1, FULL // (self.batch * self.tiles))
        self.segment = config.segment or -(-self.borders // min(wanted, self.borders)) * config.border
        self.segments = -(-self.length // self.segment)
        self.wide = max(1, 1 << (self.states - 1).bit_length())

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles, self.segments, self.batch

    @property
    def shapes(self) -> dict[str, Any]:
        return {"N": self.states, "TILE": self.config.tile, "WIDE": self.wide, "num_warps": self.config.warps}


def _three(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd's way
        ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        bias: Tensor | None, initial: Tensor | None, starts: Tensor | None, softplus: bool, config: Config,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scan = Scan(u=u, delta=delta, A=A.contiguous(), B=B, C=C, D=D, z=z, delta_bias=bias, delta_softplus=softplus,
                    initial_state=None if initial is None else initial.contiguous(), starts=starts)  # fmt: skip
        cut = _Cut(scan, config)
        out, last, borders = run_forward(scan, cut)
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, initial, starts, borders)
        ctx.softplus, ctx.cut = softplus, cut
        return out, last

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, D, z, bias, initial, starts, borders = ctx.saved_tensors
        scan = Scan(u=u, delta=delta, A=A.contiguous(), B=B, C=C, D=D, z=z, delta_bias=bias,
                    delta_softplus=ctx.softplus, initial_state=initial, starts=starts)  # fmt: skip
        grads = run_backward(scan, ctx.cut, borders, dout, dlast)
        return (
            grads["u"], grads["delta"], grads["A"].to(A.dtype), grads["B"].to(B.dtype), grads["C"].to(C.dtype),
            None if D is None else grads["D"].to(D.dtype), grads["z"],
            None if bias is None else grads["bias"].to(bias.dtype),
            None if initial is None else grads["initial"].to(initial.dtype), None, None, None,
        )  # fmt: skip


def run_forward(scan: Scan, cut: _Cut) -> tuple[Tensor, Tensor, Tensor]:
    u = scan.u
    begins = _segment_starts(scan, cut)
    out = torch.empty(cut.batch, cut.length, cut.channels, dtype=u.dtype, device=u.device).transpose(1, 2)
    borders = cut.new(cut.batch, cut.borders, cut.channels, cut.states)
    last = cut.new(cut.batch, cut.channels, cut.states)
    starts = None if scan.starts is None else scan.starts.view(torch.uint8)
    kernels._forward[cut.grid](
        u, scan.delta, scan.A, scan.B, scan.C, scan.D, scan.z, scan.delta_bias, starts, begins, out, borders, last,
        *_three(u), *_three(scan.delta), *_three(scan.B), *_three(scan.C), *_three(scan.z), *_two(starts), *_three(out),
        cut.channels, cut.length, cut.segment, cut.segments, cut.borders,
        SOFTPLUS=scan.delta_softplus, HAS_D=scan.D is not None, HAS_Z=scan.z is not None,
        HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None, BORDER=cut.config.border, **cut.shapes,
    )  # fmt: skip
    return out, last, borders


def _two(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()


def _segment_starts(scan: Scan, cut: _Cut) -> Tensor:
    """The state that each segment begins with."""
    begins = cut.new(cut.batch, cut.segments, cut.channels, cut.states).zero_()
    if cut.segments == 1:
        if scan.initial_state is not None:
            begins[:, 0] = scan.initial_state
        return begins
    ends = torch.empty_like(begins)
    spans = cut.new(cut.batch, cut.segments, cut.channels)
    starts = None if scan.starts is None else scan.starts.view(torch.uint8)
    kernels._states[cut.grid](
        scan.u, scan.delta, scan.A, scan.B, scan.delta_bias, starts, ends, spans,
        *_three(scan.u), *_three(scan.delta), *_three(scan.B), *_two(starts),
        cut.channels, cut.length, cut.segment, cut.segments,
        SOFTPLUS=scan.delta_softplus, HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None, **cut.shapes,
    )  # fmt: skip
    _combined(scan.A, ends, spans, scan.initial_state, begins, cut, backward=False)
    return begins


def _combined(
    A: Tensor, ends: Tensor, spans: Tensor, first: Tensor | None, begins: Tensor, cut: _Cut, *, backward: bool
) -> None:
    kernels._combine[(cut.tiles, cut.batch)](
        A, ends, spans, first, begins, cut.channels, cut.segments,
        HAS_FIRST=first is not None, BACKWARD=backward, **cut.shapes,
    )  # fmt: skip


def run_backward(scan: Scan, cut: _Cut, borders: Tensor, dout: Tensor, dlast: Tensor) -> dict[str, Any]:
    u, config = scan.u, cut.config
    carries = _segment_carries(scan, cut, dout, dlast.contiguous())
    programs = cut.tiles * cut.segments * cut.batch
    outer = cut.new(programs, config.border // config.inner, config.tile, cut.wide)
    inner = cut.new(programs, config.inner, config.tile, cut.wide)
    du, ddelta = torch.empty_like(u), torch.empty_like(scan.delta)
    dz = None if scan.z is None else torch.empty_like(scan.z)
    dA = cut.new(cut.batch, cut.segments, cut.channels, cut.states)
    dD, dbias = (cut.new(cut.batch, cut.segments, cut.channels) for _ in range(2))
    dB, dC = (cut.new(cut.tiles, cut.batch, cut.length, cut.states) for _ in range(2))
    dfirst = cut.new(cut.batch, cut.channels, cut.states)
    starts = None if scan.starts is None else scan.starts.view(torch.uint8)
    kernels._backward[cut.grid](
        u, scan.delta, scan.A, scan.B, scan.C, scan.D, scan.z, scan.delta_bias, starts, dout, borders, carries, outer,
        inner,
        du, ddelta, dz, dA, dB, dC, dD, dbias, dfirst,
        *_three(u), *_three(scan.delta), *_three(scan.B), *_three(scan.C), *_three(scan.z), *_two(starts),
        *_three(dout), *_three(du), *_three(ddelta), *_three(dz),
        cut.batch, cut.channels, cut.length, cut.segment, cut.segments, cut.borders,
        SOFTPLUS=scan.delta_softplus, HAS_D=scan.D is not None, HAS_Z=scan.z is not None,
        HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None, BORDER=config.border, INNER=config.inner,
        **cut.shapes,
    )  # fmt: skip
    return {
        "u": du, "delta": ddelta, "z": dz, "A": dA.sum((0, 1)), "B": dB.sum(0).transpose(1, 2),
        "C": dC.sum(0).transpose(1, 2), "D": dD.sum((0, 1)), "bias": dbias.sum((0, 1)), "initial": dfirst,
    }  # fmt: skip


def _segment_carries(scan: Scan, cut: _Cut, dout: Tensor, dlast: Tensor) -> Tensor:
    """What later segments want of each segment's last state."""
    carries = cut.new(cut.batch, cut.segments, cut.channels, cut.states)
    if cut.segments == 1:
        carries[:, 0] = dlast
        return carries
    ends = torch.empty_like(carries)
    spans = cut.new(cut.batch, cut.segments, cut.channels)
    starts = None if scan.starts is None else scan.starts.view(torch.uint8)
    kernels._wanted[cut.grid](
        scan.delta, scan.A, scan.C, scan.z, scan.delta_bias, starts, dout, ends, spans,
        *_three(scan.delta), *_three(scan.C), *_three(scan.z), *_two(starts), *_three(dout),
        cut.channels, cut.length, cut.segment, cut.segments,
        SOFTPLUS=scan.delta_softplus, HAS_Z=scan.z is not None, HAS_BIAS=scan.delta_bias is not None,
        HAS_STARTS=starts is not None, **cut.shapes,
    )  # fmt: skip
    _combined(scan.A, ends, spans, dlast, carries, cut, backward=True)
    return carries
