"""The scan on a CPU: by its definition, a step at a time, which every other path is held against; and in chunks.

For each channel d and state n, with a time step δ that may get a bias and a softplus first:

    h[t] = exp(δ[t] A) h[t-1] + δ[t] B[t] u[t]          h before the first step is the initial state, or zero
    y[t] = Σₙ C[t] h[t] + D u[t]                        times silu(z[t]), where there is a gate

A step that starts a document forgets what was before it.

Of the states only those between chunks are kept. Within a chunk everything but the recurrence itself is one operation
on (steps, batch, channels, states); the recurrence is one fused multiply-add a step. The backward pass computes a
chunk's states again from the one before it, then goes through the steps the other way round:

    g[t] = ∂y[t] C[t] + exp(δ[t+1] A) g[t+1]            what the loss wants of h[t]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba.arguments import Gradients, Scan, make_room

CHUNK_ELEMENTS = 1 << 18  # of one temporary: a handful of them should stay in the processor's cache
SHORTEST, LONGEST = 8, 128


def reference_scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """The output, and the state after the last step. In float64 if an input is, else in float32."""
    wide = scan.wide
    u, delta, A, B, C = (each.to(wide) for each in (scan.u, scan.delta, scan.A, scan.B, scan.C))
    if scan.delta_bias is not None:
        delta = delta + scan.delta_bias.to(wide)[:, None]
    if scan.delta_softplus:
        delta = F.softplus(delta)
    batch, channels, length = u.shape
    h = u.new_zeros(batch, channels, A.shape[1]) if scan.initial_state is None else scan.initial_state.to(wide)
    outputs = []
    for t in range(length):
        if scan.starts is not None:
            h = torch.where(scan.starts[:, t, None, None], torch.zeros_like(h), h)
        step = delta[:, :, t, None]
        h = torch.exp(step * A) * h + step * B[:, None, :, t] * u[:, :, t, None]
        outputs.append((h * C[:, None, :, t]).sum(-1))
    y = torch.stack(outputs, dim=-1)
    if scan.D is not None:
        y = y + scan.D.to(wide)[:, None] * u
    if scan.z is not None:
        y = y * F.silu(scan.z.to(wide))
    return y.to(scan.u.dtype), h


def chunk_length(batch: int, channels: int, states: int) -> int:
    return max(SHORTEST, min(LONGEST, CHUNK_ELEMENTS // (batch * channels * states)))


class _Chunk:
    """Some steps of a scan in the precision that it is computed in, time first, and the states after each."""

    def __init__(self, scan: Scan, rates: Tensor, begin: int, end: int, before: Tensor) -> None:
        self.scan, self.begin, self.end = scan, begin, end
        self.x, self.B, self.C, self.raw = (self.cut(each) for each in (scan.u, scan.B, scan.C, scan.delta))
        if scan.delta_bias is not None:
            self.raw = self.raw + scan.delta_bias.to(scan.wide)
        self.step = F.softplus(self.raw) if scan.delta_softplus else self.raw
        self.driven = self.step * self.x
        self.decay = torch.exp_(self.step[..., None] * rates)  # zero where a document starts
        if scan.starts is not None:
            self.decay.masked_fill_(scan.starts[:, begin:end].t()[..., None, None], 0)
        self.states = self.driven[..., None] * self.B[:, :, None, :]
        for state, kept in zip(self.states.unbind(0), self.decay.unbind(0), strict=True):
            before = state.addcmul_(kept, before)

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self.begin : self.end].permute(2, 0, 1).to(self.scan.wide)

    def put(self, target: Tensor, values: Tensor) -> None:
        target[:, :, self.begin : self.end] = values.permute(1, 2, 0)

    def out(self) -> Tensor:
        """Before the gate."""
        y = (self.states @ self.C[..., None]).squeeze(-1)
        return y if self.scan.D is None else y.addcmul_(self.scan.D.to(self.scan.wide), self.x)


def make_places(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """For what `run_forward` returns."""
    batch, channels, states, length = scan.sizes
    one_state = batch, channels, states
    borders = scan.u.new_empty(-(-length // chunk_length(*one_state)), *one_state, dtype=scan.wide)
    out = scan.u.new_empty(batch, length, channels).transpose(1, 2)
    return out, scan.u.new_empty(one_state, dtype=scan.wide), borders


def run_forward(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the last state, and the states at the borders, which the backward pass needs."""
    batch, channels, states, length = scan.sizes
    size, rates = chunk_length(batch, channels, states), scan.rates
    out, state, borders = make_places(scan)
    state = state.zero_() if scan.initial_state is None else state.copy_(scan.initial_state)
    for number, begin in enumerate(range(0, length, size)):
        borders[number] = state
        chunk = _Chunk(scan, rates, begin, min(begin + size, length), state)
        state = chunk.states[-1].clone()
        chunk.put(out, chunk.out() if scan.z is None else chunk.out().mul_(F.silu(chunk.cut(scan.z))))
    return out, state, borders


def run_backward(scan: Scan, borders: Tensor, dout: Tensor, dlast: Tensor | None) -> Gradients:
    """All gradients, from the last chunk to the first."""
    batch, channels, states, length = scan.sizes
    size, A = chunk_length(batch, channels, states), scan.rates
    room = make_room(scan)
    du, ddelta, dz, dB, dC = room.u, room.delta, room.z, room.B, room.C
    dA, dD, dbias = torch.zeros_like(A), A.new_zeros(channels), A.new_zeros(channels)
    # What later steps want of a chunk's last state, and then the chunk itself of the one before.
    carry = torch.zeros_like(borders[0]) if dlast is None else dlast.to(scan.wide)
    with torch.autocast(scan.u.device.type, enabled=False):
        for number in reversed(range(len(borders))):
            chunk = _Chunk(scan, A, number * size, min((number + 1) * size, length), borders[number])
            x, step, decay, dy = chunk.x, chunk.step, chunk.decay, chunk.cut(dout)
            if scan.z is not None and dz is not None:
                z = chunk.cut(scan.z)
                share = torch.sigmoid(z)
                chunk.put(dz, dy * chunk.out() * share * (1 + z * (1 - share)))
                dy = dy * z * share
            wanted = dy[..., None] * chunk.C[:, :, None, :]
            later = wanted[-1].add_(carry)
            kept = decay.unbind(0)
            for t in range(len(kept) - 2, -1, -1):
                later = wanted[t].addcmul_(kept[t + 1], later)
            carry = kept[0] * later
            chunk.put(dC, (dy[:, :, None, :] @ chunk.states).squeeze(-2))
            chunk.put(dB, (chunk.driven[:, :, None, :] @ wanted).squeeze(-2))
            by_input = (wanted @ chunk.B[..., None]).squeeze(-1)
            decay.mul_(wanted)  # from here on: what the exponents want
            decay[0].mul_(borders[number])
            decay[1:].mul_(chunk.states[:-1])
            dA += torch.einsum("tbdn,tbd->dn", decay, step)
            dstep = (decay * A).sum(-1).addcmul_(by_input, x)
            if scan.delta_softplus:
                dstep.mul_(torch.sigmoid(chunk.raw))
            by_input.mul_(step)
            if scan.D is not None:
                by_input.addcmul_(dy, scan.D.to(scan.wide))
                dD += (dy * x).sum((0, 1))
            dbias += dstep.sum((0, 1))
            chunk.put(du, by_input)
            chunk.put(ddelta, dstep)
    return Gradients(
        u=du, delta=ddelta, z=dz, A=scan.grad_of_rates(dA, A), B=dB, C=dC, D=None if scan.D is None else dD,
        delta_bias=None if scan.delta_bias is None else dbias, initial_state=carry,
    )  # fmt: skip
