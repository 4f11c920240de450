"""The scan for a GPU, in Triton: no build, CUDA and ROCm alike.

A program has a tile of channels with all their states in registers and goes through time step by step: one fused
multiply-add a state and step, where a parallel scan would need several. It reads B and C once for the whole tile. Time
is cut into segments so that a small batch still fills the card: the state at each segment's start comes from a first
pass over the segments before it (`_states`), put together by `_combine`.

Of the states only one every `BORDER` steps is kept. The backward pass starts from there, twice: once to find a state
every `INNER` steps, and again within these, where every state is written to a scratch that stays in the cache. Sums
over the channels of a tile go to a place of their own, and are added up afterwards in a fixed order: no atomics.

Nothing assumes a warp of 32. Offsets have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Everything is computed in fp32; exponents of two are what the hardware has.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softplus(x):
    """log(1 + eˣ) without losing what is far below one."""
    e = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + e
    near = tl.where(one_more == 1.0, e, tl.log(one_more) * (e / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def _time_step(pointer, mask, bias, SOFTPLUS: tl.constexpr):
    """δ of a tile's channels at one step, before and after the softplus. Channels past the last stand still."""
    raw = tl.load(pointer, mask=mask, other=0.0).to(tl.float32) + bias
    step = _softplus(raw) if SOFTPLUS else raw
    return raw, tl.where(mask, step, 0.0)


@triton.jit
def _states(
    u, delta, A, B, bias, starts, ends, spans,
    u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, s_b, s_l,
    channels, length, segment, segments,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STARTS: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of a segment that begins with nothing: its last state, and the sum of its time steps.

    A document that starts in it is told by an infinite sum, after which nothing of an earlier state is left.
    """
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    in_d, in_n = d < channels, n < N
    both = in_d[:, None] & in_n[None, :]
    wide_d = d.to(tl.int64)
    A2 = tl.load(A + wide_d[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E
    offset = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([TILE], tl.float32)
    h = tl.zeros([TILE, WIDE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    for t in range(first, last):
        raw, step = _time_step(delta + b * t_b + wide_d * t_d + t * t_l, in_d, offset, SOFTPLUS)
        x = tl.load(u + b * u_b + wide_d * u_d + t * u_l, mask=in_d, other=0.0).to(tl.float32)
        into = tl.load(B + b * B_b + n * B_n + t * B_l, mask=in_n, other=0.0).to(tl.float32)
        decay = tl.exp2(step[:, None] * A2)
        if HAS_STARTS:
            begins = tl.load(starts + b * s_b + t * s_l) != 0
            decay = tl.where(begins, 0.0, decay)
            total = tl.where(begins, float("inf"), total)
        h = decay * h + (step * x)[:, None] * into[None, :]
        total += step
    place = (b * segments + s) * channels
    tl.store(ends + (place + wide_d)[:, None] * N + n[None, :], h, mask=both)
    tl.store(spans + place + wide_d, total, mask=in_d)


@triton.jit
def _combine(
    A, ends, spans, first, starts_at, channels, segments,
    N: tl.constexpr, HAS_FIRST: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From what each segment adds, what each begins with; `BACKWARD`: from the last segment to the first."""
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    in_d = d < channels
    both = in_d[:, None] & (n < N)[None, :]
    wide_d = d.to(tl.int64)
    A2 = tl.load(A + wide_d[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E
    h = tl.zeros([TILE, WIDE], tl.float32)
    if HAS_FIRST:
        h = tl.load(first + (b * channels + wide_d)[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32)
    for k in range(segments):
        s = segments - 1 - k if BACKWARD else k
        place = (b * segments + s) * channels + wide_d
        tl.store(starts_at + place[:, None] * N + n[None, :], h, mask=both)
        span = tl.load(spans + place, mask=in_d, other=0.0)
        left = tl.where(
            (span == float("inf"))[:, None], 0.0, tl.exp2(tl.where(span == float("inf"), 0.0, span)[:, None] * A2)
        )
        h = left * h + tl.load(ends + place[:, None] * N + n[None, :], mask=both, other=0.0)


@triton.jit
def _forward(
    u, delta, A, B, C, D, z, bias, starts, starts_at, out, borders, final,
    u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, C_b, C_n, C_l, z_b, z_d, z_l, s_b, s_l, o_b, o_d, o_l,
    channels, length, segment, segments, border_count,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr, BORDER: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Outputs of a segment, the states at its borders, and of the last one the state after it."""
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    in_d, in_n = d < channels, n < N
    both = in_d[:, None] & in_n[None, :]
    wide_d = d.to(tl.int64)
    A2 = tl.load(A + wide_d[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E
    offset = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([TILE], tl.float32)
    skip = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32) if HAS_D else tl.zeros([TILE], tl.float32)
    h = tl.load(starts_at + ((b * segments + s) * channels + wide_d)[:, None] * N + n[None, :], mask=both, other=0.0)
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    for t in range(first, last):
        if t % BORDER == 0:
            place = (b * border_count + t // BORDER) * channels + wide_d
            tl.store(borders + place[:, None] * N + n[None, :], h, mask=both)
        raw, step = _time_step(delta + b * t_b + wide_d * t_d + t * t_l, in_d, offset, SOFTPLUS)
        x = tl.load(u + b * u_b + wide_d * u_d + t * u_l, mask=in_d, other=0.0).to(tl.float32)
        into = tl.load(B + b * B_b + n * B_n + t * B_l, mask=in_n, other=0.0).to(tl.float32)
        outof = tl.load(C + b * C_b + n * C_n + t * C_l, mask=in_n, other=0.0).to(tl.float32)
        decay = tl.exp2(step[:, None] * A2)
        if HAS_STARTS:
            decay = tl.where(tl.load(starts + b * s_b + t * s_l) != 0, 0.0, decay)
        h = decay * h + (step * x)[:, None] * into[None, :]
        y = tl.sum(h * outof[None, :], axis=1) + skip * x
        if HAS_Z:
            gate = tl.load(z + b * z_b + wide_d * z_d + t * z_l, mask=in_d, other=0.0).to(tl.float32)
            y = y * gate * tl.sigmoid(gate)
        tl.store(out + b * o_b + wide_d * o_d + t * o_l, y.to(out.dtype.element_ty), mask=in_d)
    if s == segments - 1:
        tl.store(final + (b * channels + wide_d)[:, None] * N + n[None, :], h, mask=both)


@triton.jit
def _wanted(
    delta, A, C, z, bias, starts, dout, ends, spans,
    t_b, t_d, t_l, C_b, C_n, C_l, z_b, z_d, z_l, s_b, s_l, g_b, g_d, g_l,
    channels, length, segment, segments,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STARTS: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The mirror of `_states`: what a segment wants of the state before it, if later ones want nothing."""
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    in_d, in_n = d < channels, n < N
    both = in_d[:, None] & in_n[None, :]
    wide_d = d.to(tl.int64)
    A2 = tl.load(A + wide_d[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E
    offset = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([TILE], tl.float32)
    carry = tl.zeros([TILE, WIDE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    for back in range(last - first):
        t = last - 1 - back
        raw, step = _time_step(delta + b * t_b + wide_d * t_d + t * t_l, in_d, offset, SOFTPLUS)
        outof = tl.load(C + b * C_b + n * C_n + t * C_l, mask=in_n, other=0.0).to(tl.float32)
        dy = tl.load(dout + b * g_b + wide_d * g_d + t * g_l, mask=in_d, other=0.0).to(tl.float32)
        if HAS_Z:
            gate = tl.load(z + b * z_b + wide_d * z_d + t * z_l, mask=in_d, other=0.0).to(tl.float32)
            dy = dy * gate * tl.sigmoid(gate)
        decay = tl.exp2(step[:, None] * A2)
        if HAS_STARTS:
            begins = tl.load(starts + b * s_b + t * s_l) != 0
            decay = tl.where(begins, 0.0, decay)
            total = tl.where(begins, float("inf"), total)
        carry = decay * (carry + dy[:, None] * outof[None, :])
        total += step
    place = (b * segments + s) * channels
    tl.store(ends + (place + wide_d)[:, None] * N + n[None, :], carry, mask=both)
    tl.store(spans + place + wide_d, total, mask=in_d)


@triton.jit
def _replayed(
    h, u, delta, B, starts, A2, offset, in_d, in_n, wide_d, n, b, begin, end,
    u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, s_b, s_l, scratch,
    EVERY: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_STARTS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Go from `begin` to `end`, and write the state before every `EVERY`-th step to the scratch."""
    cell = tl.arange(0, TILE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for t in range(begin, end):
        k = t - begin
        if k % EVERY == 0:
            tl.store(scratch + (k // EVERY) * TILE * WIDE + cell, h)
        raw, step = _time_step(delta + b * t_b + wide_d * t_d + t * t_l, in_d, offset, SOFTPLUS)
        x = tl.load(u + b * u_b + wide_d * u_d + t * u_l, mask=in_d, other=0.0).to(tl.float32)
        into = tl.load(B + b * B_b + n * B_n + t * B_l, mask=in_n, other=0.0).to(tl.float32)
        decay = tl.exp2(step[:, None] * A2)
        if HAS_STARTS:
            decay = tl.where(tl.load(starts + b * s_b + t * s_l) != 0, 0.0, decay)
        h = decay * h + (step * x)[:, None] * into[None, :]
    return h


@triton.jit
def _backward(
    u, delta, A, B, C, D, z, bias, starts, dout, borders, carries, outer_scratch, inner_scratch,
    du, ddelta, dz, dA, dB, dC, dD, dbias, dfirst,
    u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, C_b, C_n, C_l, z_b, z_d, z_l, s_b, s_l, g_b, g_d, g_l,
    du_b, du_d, du_l, dt_b, dt_d, dt_l, dz_b, dz_d, dz_l,
    batch, channels, length, segment, segments, border_count,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr, BORDER: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, s, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tile * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDE)
    in_d, in_n = d < channels, n < N
    both = in_d[:, None] & in_n[None, :]
    wide_d = d.to(tl.int64)
    cell = tl.arange(0, TILE)[:, None] * WIDE + n[None, :]
    A2 = tl.load(A + wide_d[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E
    offset = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([TILE], tl.float32)
    skip = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32) if HAS_D else tl.zeros([TILE], tl.float32)
    here = (b * segments + s) * channels + wide_d
    carry = tl.load(carries + here[:, None] * N + n[None, :], mask=both, other=0.0)
    grad_A = tl.zeros([TILE, WIDE], tl.float32)
    grad_D, grad_bias = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    program = (b * segments + s) * tl.num_programs(0) + tile
    outer = outer_scratch + program * (BORDER // INNER) * TILE * WIDE
    inner = inner_scratch + program * INNER * TILE * WIDE
    summed = (tile * batch + b) * length  # where sums over this tile's channels go
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    for border_back in range((last - first + BORDER - 1) // BORDER):
        border = first + ((last - first + BORDER - 1) // BORDER - 1 - border_back) * BORDER
        border_end = tl.minimum(border + BORDER, last)
        place = (b * border_count + border // BORDER) * channels + wide_d
        h = tl.load(borders + place[:, None] * N + n[None, :], mask=both, other=0.0)
        _replayed(
            h, u, delta, B, starts, A2, offset, in_d, in_n, wide_d, n, b, border, border_end,
            u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, s_b, s_l, outer, INNER, SOFTPLUS, HAS_STARTS, TILE, WIDE,
        )  # fmt: skip
        tl.debug_barrier()
        inners = (border_end - border + INNER - 1) // INNER
        for inner_back in range(inners):
            k = inners - 1 - inner_back
            begin = border + k * INNER
            end = tl.minimum(begin + INNER, border_end)
            h = tl.load(outer + k * TILE * WIDE + cell)
            _replayed(
                h, u, delta, B, starts, A2, offset, in_d, in_n, wide_d, n, b, begin, end,
                u_b, u_d, u_l, t_b, t_d, t_l, B_b, B_n, B_l, s_b, s_l, inner, 1, SOFTPLUS, HAS_STARTS, TILE, WIDE,
            )  # fmt: skip
            tl.debug_barrier()
            for back in range(end - begin):
                t = end - 1 - back
                raw, step = _time_step(delta + b * t_b + wide_d * t_d + t * t_l, in_d, offset, SOFTPLUS)
                x = tl.load(u + b * u_b + wide_d * u_d + t * u_l, mask=in_d, other=0.0).to(tl.float32)
                into = tl.load(B + b * B_b + n * B_n + t * B_l, mask=in_n, other=0.0).to(tl.float32)
                outof = tl.load(C + b * C_b + n * C_n + t * C_l, mask=in_n, other=0.0).to(tl.float32)
                dy = tl.load(dout + b * g_b + wide_d * g_d + t * g_l, mask=in_d, other=0.0).to(tl.float32)
                before = tl.load(inner + (t - begin) * TILE * WIDE + cell)
                decay = tl.exp2(step[:, None] * A2)
                if HAS_STARTS:
                    decay = tl.where(tl.load(starts + b * s_b + t * s_l) != 0, 0.0, decay)
                driven = step * x
                h = decay * before + driven[:, None] * into[None, :]
                if HAS_Z:
                    gate = tl.load(z + b * z_b + wide_d * z_d + t * z_l, mask=in_d, other=0.0).to(tl.float32)
                    share = tl.sigmoid(gate)
                    y = tl.sum(h * outof[None, :], axis=1) + skip * x
                    grad_z = dy * y * share * (1.0 + gate * (1.0 - share))
                    tl.store(dz + b * dz_b + wide_d * dz_d + t * dz_l, grad_z.to(dz.dtype.element_ty), mask=in_d)
                    dy = dy * gate * share
                wanted = carry + dy[:, None] * outof[None, :]
                sums = (summed + t) * N + n
                tl.store(dC + sums, tl.sum(dy[:, None] * h, axis=0), mask=in_n)
                tl.store(dB + sums, tl.sum(wanted * driven[:, None], axis=0), mask=in_n)
                by_input = tl.sum(wanted * into[None, :], axis=1)
                carry = decay * wanted
                exponent = carry * before
                grad_A += exponent * step[:, None]
                grad_step = tl.sum(exponent * A2, axis=1) * LN_2 + by_input * x
                if SOFTPLUS:
                    grad_step = grad_step * tl.sigmoid(raw)
                grad_bias += grad_step
                grad_D += dy * x
                grad_u = by_input * step + skip * dy
                tl.store(du + b * du_b + wide_d * du_d + t * du_l, grad_u.to(du.dtype.element_ty), mask=in_d)
                tl.store(ddelta + b * dt_b + wide_d * dt_d + t * dt_l, grad_step.to(ddelta.dtype.element_ty), mask=in_d)
            tl.debug_barrier()
    tl.store(dA + here[:, None] * N + n[None, :], grad_A, mask=both)
    if HAS_D:
        tl.store(dD + here, grad_D, mask=in_d)
    if HAS_BIAS:
        tl.store(dbias + here, grad_bias, mask=in_d)
    if s == 0:
        tl.store(dfirst + (b * channels + wide_d)[:, None] * N + n[None, :], carry, mask=both)
