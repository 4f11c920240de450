"""The scan on a GPU: how Triton's kernels are launched, where `scan.cu` is not written for what is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightfit.mamba import cuda_scan, kernels
from tightfit.mamba.arguments import Gradients, Scan, as_bytes, strides
from tightfit.mamba.cuda import CompilerError

BORDER = 64  # steps between two states that are kept
STEPS = 4  # of a block, as the kernels take it apart
PACK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How the kernels of one direction are cut; chosen outside of them, so that they can be tried one by one."""

    cells: int = 512  # channels times states of a program
    border: int = BORDER
    segment: int | None = None  # steps of a program; a multiple of `border`. None: as many as fill the card.
    warps: int = 1
    programs: int = 4096
    """Wanted at least: several times what a large card runs at once, so that none of it waits long for the last."""
    sums_bytes: int | None = None
    """Room for the backward pass's sums over the channels of each tile: where they need more, the channels are taken in
    parts. None: all at once."""
    registers: int | None = None
    """The most that a thread may have, on NVIDIA's cards: fewer let more programs run at once."""


FORWARD = Config()
FORWARD_BY_CUDA = False  # measured on an H200: Triton's forward kernels take 0.32 ms where those of scan.cu take 0.42
BACKWARD = Config(cells=256, programs=5000, sums_bytes=64 << 20)


class _Cut:
    """Sizes of a launch."""

    def __init__(self, scan: Scan, config: Config) -> None:
        self.batch, self.channels, self.states, self.length = scan.sizes
        self.config, self._device = config, scan.u.device
        self.wide = 1 << (self.states - 1).bit_length()
        self.tile = max(1, min(config.cells // self.wide, 1 << (self.channels - 1).bit_length()))
        self.tiles = -(-self.channels // self.tile)
        self.borders = -(-self.length // config.border)
        self.padded = -(-self.length // STEPS) * STEPS
        sums = self.tiles * self.batch * self.padded * 2 * self.wide * 4
        self.part = self.tiles  # tiles whose sums are held at once
        if config.sums_bytes is not None and sums > config.sums_bytes:
            # A multiple of 16, so that one compiled kernel serves every part.
            self.part = min(self.tiles, max(16, self.tiles * config.sums_bytes // sums // 16 * 16))
        wanted = max(1, config.programs // (self.batch * self.part))
        self.segment = config.segment or -(-self.borders // min(wanted, self.borders)) * config.border
        self.segments = -(-self.length // self.segment)
        self.slots = -(-self.segments // 4) * 4  # places for what each segment leaves; `_combine` takes four at once

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles, self.segments, self.batch

    @property
    def shapes(self) -> dict[str, Any]:
        shapes = {"N": self.states, "TILE": self.tile, "WIDE": self.wide, "num_warps": self.config.warps}
        if self.config.registers is not None and torch.version.hip is None:
            shapes["maxnreg"] = self.config.registers
        return shapes


def make_places(scan: Scan, border: int = BORDER) -> tuple[Tensor, Tensor, Tensor]:
    """For what `run_forward` returns."""
    batch, channels, states, length = scan.sizes
    if scan.u.stride(2) == 1 and length > 1:  # time last, as it came
        out = scan.u.new_empty(batch, channels, length)
    else:
        out = scan.u.new_empty(batch, length, channels).transpose(1, 2)
    borders = scan.u.new_empty(batch, -(-length // border), channels, states, dtype=torch.float32)
    return out, scan.u.new_empty(batch, channels, states, dtype=torch.float32), borders


def run_forward(scan: Scan, config: Config | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the last state, and the states at the borders, which the backward pass needs. Whoever says how it is
    cut gets Triton's kernels."""
    if config is None and FORWARD_BY_CUDA and cuda_scan.fits(scan):
        return cuda_scan.run_forward(scan, partial(make_places, scan))
    config = config or FORWARD
    u, cut, rates = scan.u, _Cut(scan, config), scan.rates.contiguous()
    packed, starts = _pack(scan, cut), as_bytes(scan.starts)

    def states(ends: Tensor, spans: Tensor) -> None:
        kernels._states[cut.grid](
            u, scan.delta, rates, packed, scan.delta_bias, starts, ends, spans,
            *strides(u), *strides(scan.delta), *strides(starts, 2),
            cut.channels, cut.length, cut.padded, cut.segment, cut.slots,
            SOFTPLUS=scan.delta_softplus, HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None,
            **cut.shapes,
        )  # fmt: skip

    begins = _segment_states(cut, rates, scan.initial_state, states, backward=False)
    out, last, borders = make_places(scan, config.border)
    kernels._forward[cut.grid](
        u, scan.delta, rates, packed, scan.D, scan.z, scan.delta_bias, starts, begins, out, borders, last,
        *strides(u), *strides(scan.delta), *strides(scan.z), *strides(starts, 2), *strides(out),
        cut.channels, cut.length, cut.padded, cut.segment, cut.slots, cut.borders,
        SOFTPLUS=scan.delta_softplus, HAS_D=scan.D is not None, HAS_Z=scan.z is not None,
        HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None, BORDER=config.border, **cut.shapes,
    )  # fmt: skip
    return out, last, borders


def _pack(scan: Scan, cut: _Cut) -> Tensor:
    """B and C, small beside the rest, as the kernels read them."""
    packed = cut.new(cut.batch, cut.padded, 2, cut.wide)
    kernels._pack[-(-cut.padded // PACK_ROWS), cut.batch](
        scan.B, scan.C, packed, *strides(scan.B), *strides(scan.C), cut.length, cut.padded,
        N=cut.states, WIDE=cut.wide, ROWS=PACK_ROWS,
    )  # fmt: skip
    return packed


def _segment_states(
    cut: _Cut, rates: Tensor, first: Tensor | None, launch: Callable[[Tensor, Tensor], None], *, backward: bool
) -> Tensor:
    """The state that each segment begins with, from what `launch` says that each adds to it, and for how long."""
    first = None if first is None else first.contiguous()
    begins = cut.new(cut.batch, cut.slots, cut.channels, cut.states)
    if cut.segments == 1:
        return begins.zero_() if first is None else begins.copy_(first[:, None])
    ends, spans = torch.zeros_like(begins), cut.new(cut.batch, cut.slots, cut.channels).zero_()
    launch(ends, spans)
    kernels._combine[(cut.tiles, cut.batch)](
        rates, ends, spans, first, begins, cut.channels, cut.slots,
        HAS_FIRST=first is not None, BACKWARD=backward, **cut.shapes,
    )  # fmt: skip
    return begins


def run_backward(
    scan: Scan, borders: Tensor, dout: Tensor, dlast: Tensor | None, config: Config | None = None, *,
    places: Mapping[str, Tensor] | None = None, overwrite: bool = False,
) -> Gradients:  # fmt: skip
    """All gradients. `places`: where those of z, B and C go that have a place already.

    `overwrite`: delta and dout are needed by nobody else. The gradient of delta then takes delta's place, and the
    output, computed again, that of dout: a program has read a block before it writes there, and none reads another's.
    """
    places = dict(places or {})
    if config is None and cuda_scan.fits(scan, dout):
        taken = places | ({"delta": scan.delta} if overwrite else {})
        with suppress(CompilerError):  # then Triton's have to do
            return cuda_scan.run_backward(scan, borders, dout, dlast, taken, dout if overwrite else None)
    config = config or BACKWARD
    u, cut, rates = scan.u, _Cut(scan, config), scan.rates.contiguous()
    packed, starts = _pack(scan, cut), as_bytes(scan.starts)

    def carry(ends: Tensor, spans: Tensor) -> None:
        kernels._wanted[cut.grid](
            scan.delta, rates, packed, scan.z, scan.delta_bias, starts, dout, ends, spans,
            *strides(scan.delta), *strides(scan.z), *strides(starts, 2), *strides(dout),
            cut.channels, cut.length, cut.padded, cut.segment, cut.slots,
            SOFTPLUS=scan.delta_softplus, HAS_Z=scan.z is not None, HAS_BIAS=scan.delta_bias is not None,
            HAS_STARTS=starts is not None, **cut.shapes,
        )  # fmt: skip

    carries = _segment_states(cut, rates, dlast, carry, backward=True)
    du, ddelta = torch.empty_like(u), scan.delta if overwrite else torch.empty_like(scan.delta)
    dz = None if scan.z is None else places["z"] if "z" in places else torch.empty_like(scan.z)
    out = dout if overwrite else None
    dA = cut.new(cut.batch, cut.slots, cut.channels, cut.states)
    dD, dbias = (cut.new(cut.batch, cut.slots, cut.channels) for _ in range(2))
    dfirst = cut.new(cut.batch, cut.channels, cut.states)
    scratch = cut.new(cut.part * cut.segments * cut.batch, config.border // STEPS, cut.tile, cut.wide)
    sums = cut.new(cut.part, cut.batch, cut.padded, 2, cut.wide)
    added: Tensor | None = None
    for first in range(0, cut.tiles, cut.part):
        tiles = min(cut.part, cut.tiles - first)
        kernels._backward[tiles, cut.segments, cut.batch](
            u, scan.delta, rates, packed, scan.D, scan.z, scan.delta_bias, starts, dout, borders, carries, scratch,
            du, ddelta, dz, out, dA, sums, dD, dbias, dfirst,
            *strides(u), *strides(scan.delta), *strides(scan.z), *strides(starts, 2), *strides(dout),
            *strides(du), *strides(ddelta), *strides(dz), *strides(out),
            cut.batch, cut.channels, cut.length, cut.padded, cut.segment, cut.slots, cut.borders, first,
            SOFTPLUS=scan.delta_softplus, HAS_D=scan.D is not None, HAS_Z=scan.z is not None,
            HAS_BIAS=scan.delta_bias is not None, HAS_STARTS=starts is not None, HAS_OUT=overwrite,
            BORDER=config.border, **cut.shapes,
        )  # fmt: skip
        added = sums[:tiles].sum(0) if added is None else added.add_(sums[:tiles].sum(0))
    assert added is not None
    # (batch, blocks, B and C, states, steps) → B and C: (batch, states, length)
    added = added.view(cut.batch, cut.padded // STEPS, 2, cut.wide, STEPS).permute(2, 0, 3, 1, 4)
    dB, dC = added.reshape(2, cut.batch, cut.wide, cut.padded)[:, :, : cut.states, : cut.length].contiguous()
    dB, dC = (places[name].copy_(each) if name in places else each for name, each in (("B", dB), ("C", dC)))
    dA, dD, dbias = (each[:, : cut.segments].sum((0, 1)) for each in (dA, dD, dbias))
    return Gradients(
        u=du, delta=ddelta, z=dz, A=scan.grad_of_rates(dA, rates), B=dB, C=dC, D=None if scan.D is None else dD,
        delta_bias=None if scan.delta_bias is None else dbias, initial_state=dfirst,
    )  # fmt: skip
