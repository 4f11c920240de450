"""The scan on a CPU: a chunk of steps at a time, and of the states only those between chunks are kept.

Within a chunk everything but the recurrence itself is one operation on (steps, batch, channels, states); the recurrence
is one fused multiply-add a step. The backward pass computes a chunk's states again from the one before it, then goes
through the steps the other way round:

    g[t] = ∂y[t] C[t] + exp(δ[t+1] A) g[t+1]            what the loss wants of h[t]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba.arguments import Gradients, Scan, as_autograd_wants

CHUNK_ELEMENTS = 1 << 18
"""Of one temporary: a handful of them should stay in the processor's cache."""
SHORTEST, LONGEST = 8, 128


def chunked_scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """The output, and the state after the last step."""
    out, last = _Chunked.apply(  # type: ignore[no-untyped-call]
        scan.u, scan.delta, scan.A, scan.B, scan.C, scan.D, scan.z, scan.delta_bias, scan.initial_state, scan.starts,
        scan.delta_softplus,
    )  # fmt: skip
    return out, last


def chunk_length(batch: int, channels: int, states: int) -> int:
    return max(SHORTEST, min(LONGEST, CHUNK_ELEMENTS // (batch * channels * states)))


@dataclass(slots=True)
class _Inputs:
    """Of a scan, in the precision that it is computed in; time comes first in what is cut from them."""

    scan: Scan
    wide: torch.dtype

    def cut(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        return tensor[:, :, begin:end].permute(2, 0, 1).to(self.wide)

    def step(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """δ before and after the softplus."""
        raw = self.cut(self.scan.delta, begin, end)
        if self.scan.delta_bias is not None:
            raw = raw + self.scan.delta_bias.to(self.wide)
        return raw, F.softplus(raw) if self.scan.delta_softplus else raw

    def decay(self, delta: Tensor, begin: int, end: int) -> Tensor:
        """exp(δ A), and zero where a document starts."""
        decay = torch.exp_(delta[..., None] * self.scan.A.to(self.wide))
        if self.scan.starts is not None:
            decay.masked_fill_(self.scan.starts[:, begin:end].t()[..., None, None], 0)
        return decay

    def states(self, before: Tensor, decay: Tensor, driven: Tensor, B: Tensor) -> Tensor:
        """h of every step; `driven`: δ u."""
        states = driven[..., None] * B[:, :, None, :]
        previous = before
        for state, kept in zip(states.unbind(0), decay.unbind(0), strict=True):
            previous = state.addcmul_(kept, previous)
        return states


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd's way
        ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        bias: Tensor | None, initial: Tensor | None, starts: Tensor | None, softplus: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, last, borders = run_forward(_scan(u, delta, A, B, C, D, z, bias, initial, starts, softplus))
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, initial, starts, borders)
        ctx.softplus = softplus
        return out, last

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, D, z, bias, initial, starts, borders = ctx.saved_tensors
        scan = _scan(u, delta, A, B, C, D, z, bias, initial, starts, ctx.softplus)
        return (*as_autograd_wants(scan, run_backward(scan, borders, dout, dlast)), None, None)


def run_forward(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the last state, and the states at the borders, which the backward pass needs."""
    inputs, u = _Inputs(scan, _wide(scan)), scan.u
    batch, channels, states, length = scan.sizes
    chunk = chunk_length(batch, channels, states)
    borders = u.new_empty(-(-length // chunk), batch, channels, states, dtype=inputs.wide)
    state = u.new_zeros(batch, channels, states, dtype=inputs.wide)
    if scan.initial_state is not None:
        state = scan.initial_state.to(inputs.wide)
    out = torch.empty(batch, length, channels, dtype=u.dtype, device=u.device).transpose(1, 2)
    for number, begin in enumerate(range(0, length, chunk)):
        end = min(begin + chunk, length)
        borders[number] = state
        _, step = inputs.step(begin, end)
        x, C = inputs.cut(u, begin, end), inputs.cut(scan.C, begin, end)
        held = inputs.states(state, inputs.decay(step, begin, end), step * x, inputs.cut(scan.B, begin, end))
        state = held[-1].clone()
        y = (held @ C[..., None]).squeeze(-1)
        y = y if scan.D is None else y.addcmul_(scan.D.to(inputs.wide), x)
        y = y if scan.z is None else y.mul_(F.silu(inputs.cut(scan.z, begin, end)))
        out[:, :, begin:end] = y.permute(1, 2, 0)
    return out, state, borders


def run_backward(scan: Scan, borders: Tensor, dout: Tensor, dlast: Tensor | None) -> Gradients:
    """All gradients."""
    inputs = _Inputs(scan, _wide(scan))
    batch, channels, states, length = scan.sizes
    chunk = chunk_length(batch, channels, states)
    grads = _Sums(scan, inputs)
    carry = torch.zeros_like(borders[0]) if dlast is None else dlast.to(inputs.wide)
    with torch.autocast(scan.u.device.type, enabled=False):
        for number in reversed(range(len(borders))):
            begin = number * chunk
            carry = grads.chunk(begin, min(begin + chunk, length), borders[number], carry, dout)
    return Gradients(
        u=grads.u, delta=grads.delta, z=grads.z, A=grads.A, B=grads.B, C=grads.C,
        D=None if scan.D is None else grads.D, delta_bias=None if scan.delta_bias is None else grads.bias,
        initial_state=carry,
    )  # fmt: skip


def _wide(scan: Scan) -> torch.dtype:
    return torch.float64 if torch.float64 in (scan.u.dtype, scan.A.dtype) else torch.float32


def _scan(  # noqa: PLR0913 - as autograd hands them over
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    initial: Tensor | None, starts: Tensor | None, softplus: bool,
) -> Scan:  # fmt: skip
    return Scan(
        u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=bias, delta_softplus=softplus, initial_state=initial,
        starts=starts,
    )  # fmt: skip


class _Sums:
    """Filled from the last chunk to the first."""

    def __init__(self, scan: Scan, inputs: _Inputs) -> None:
        self._scan, self._inputs = scan, inputs
        channels = scan.u.shape[1]
        self.u, self.delta = torch.empty_like(scan.u), torch.empty_like(scan.delta)
        self.B, self.C = torch.empty_like(scan.B), torch.empty_like(scan.C)
        self.z = None if scan.z is None else torch.empty_like(scan.z)
        self.A = torch.zeros_like(scan.A, dtype=inputs.wide)
        self.D, self.bias = (torch.zeros(channels, dtype=inputs.wide, device=scan.u.device) for _ in range(2))

    def chunk(self, begin: int, end: int, before: Tensor, carry: Tensor, dout: Tensor) -> Tensor:
        """One chunk; `carry` is what later steps want of its last state, and what is returned, of the one before."""
        scan, inputs = self._scan, self._inputs
        A = scan.A.to(inputs.wide)
        raw, step = inputs.step(begin, end)
        x, B, C = (inputs.cut(each, begin, end) for each in (scan.u, scan.B, scan.C))
        decay, driven = inputs.decay(step, begin, end), step * x
        held = inputs.states(before, decay, driven, B)
        dy = self._gate(begin, end, inputs.cut(dout, begin, end), x, held, C)
        wanted = dy[..., None] * C[:, :, None, :]
        later = wanted[-1].add_(carry)
        kept = decay.unbind(0)
        for t in range(end - begin - 2, -1, -1):
            later = wanted[t].addcmul_(kept[t + 1], later)
        carry = kept[0] * later
        self._put(self.C, begin, end, (dy[:, :, None, :] @ held).squeeze(-2))
        self._put(self.B, begin, end, (driven[:, :, None, :] @ wanted).squeeze(-2))
        by_input = (wanted @ B[..., None]).squeeze(-1)
        decay.mul_(wanted)  # from here on: what the exponents want
        decay[0].mul_(before)
        decay[1:].mul_(held[:-1])
        self.A += torch.einsum("tbdn,tbd->dn", decay, step)
        dstep = (decay * A).sum(-1).addcmul_(by_input, x)
        if scan.delta_softplus:
            dstep.mul_(torch.sigmoid(raw))
        du = by_input.mul_(step)
        if scan.D is not None:
            du.addcmul_(dy, scan.D.to(inputs.wide))
            self.D += (dy * x).sum((0, 1))
        self.bias += dstep.sum((0, 1))
        self._put(self.u, begin, end, du)
        self._put(self.delta, begin, end, dstep)
        return carry

    def _gate(self, begin: int, end: int, dout: Tensor, x: Tensor, held: Tensor, C: Tensor) -> Tensor:
        """What the loss wants before the gate; and of the gate."""
        scan, inputs = self._scan, self._inputs
        if scan.z is None or self.z is None:
            return dout
        z = inputs.cut(scan.z, begin, end)
        y = (held @ C[..., None]).squeeze(-1)
        y = y if scan.D is None else y.addcmul_(scan.D.to(inputs.wide), x)
        share = torch.sigmoid(z)
        self._put(self.z, begin, end, dout * y * share * (1 + z * (1 - share)))
        return dout * z * share

    @staticmethod
    def _put(target: Tensor, begin: int, end: int, values: Tensor) -> None:
        target[:, :, begin:end] = values.permute(1, 2, 0)
