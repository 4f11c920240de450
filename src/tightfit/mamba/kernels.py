"""The scan for a GPU, in Triton: no build, CUDA and ROCm alike.

A program has a tile of channels with all their states in registers and goes through time step by step: one fused
multiply-add a state and step, where a parallel scan would need several. It reads B and C once for the whole tile. Time
is cut into segments so that a small batch still fills the card: the state at each segment's start comes from a first
pass over the segments before it (`_states`), put together by `_combine`.

What has no states (the time step, the input, the gate) is loaded and computed for four steps at once, a block of
(channels, steps), and then taken apart into its columns. A step past the end has a time step of zero: it changes
nothing.

Of the states only one every `BORDER` steps is kept. The backward pass starts from these twice: once to write a state
every four steps to a scratch that stays in the cache, and again within these four, with the states in registers. What
later segments want of a segment's last state comes from a first pass (`_wanted`), the mirror of `_states`. Sums over
the channels of a tile go to a place of their own, and are added up afterwards in a fixed order: no atomics. That they
need little room, the channels are taken in parts, one launch after the other.

How the compiler lays out a block over a warp decides half of the time, and two things steer it. Loads of states stand
before loads of blocks, so that what has no states is computed once, by one thread. And a time step looks at what stands
beside it (`_time_steps`): with one 16-bit input alone, Triton 3.6 would move the change of layout in front of its
conversion to fp32, and compute each softplus in every thread that needs it.

Nothing assumes a warp of 32. Offsets from a tensor's beginning have 64 bits; within a block 32 are enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Everything is computed in fp32; exponents of two are what the hardware has.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softplus(x):
    """log(1 + eˣ), to 2e-7 of its value wherever x is: max(x, 0) + log(1 + e⁻ˡˣˡ), and that logarithm as a polynomial
    of degree 9 without a constant term, which loses nothing of a small one."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    near = 0.005126102361828089
    near = near * e - 0.029074065387248993
    near = near * e + 0.0775160863995552
    near = near * e - 0.13602247834205627
    near = near * e + 0.19076880812644958
    near = near * e - 0.2483539879322052
    near = near * e + 0.3331812024116516
    near = near * e - 0.4999944567680359
    near = near * e + 0.9999999403953552
    return tl.where(x > 0.0, x, 0.0) + near * e


@triton.jit
def _sigmoid(x):
    """Also the slope of `_softplus`, whose exponential it shares."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    return tl.where(x > 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _columns(block, ROWS: tl.constexpr):
    """A block of (rows, 4) as four columns."""
    even, odd = tl.split(tl.reshape(block, [ROWS, 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _block(c0, c1, c2, c3, ROWS: tl.constexpr):
    """Four columns as a block of (rows, 4)."""
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [ROWS, 4])


@triton.jit
def _time_steps(raw, beside, mask, SOFTPLUS: tl.constexpr):
    """δ; not a number where `beside`, an input of the same step, is not."""
    step = _softplus(raw) if SOFTPLUS else raw
    return tl.where(mask, tl.where(beside != beside, beside, step), 0.0)


@triton.jit
def _rates(A, from_d, channels, N: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """A of the tile, for a power of two. Channels and states past the last stand still."""
    row, n = tl.arange(0, TILE), tl.arange(0, WIDE)
    both = (row < channels - from_d)[:, None] & (n < N)[None, :]
    return tl.load(A + from_d * N + row[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def _cells(N: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    return tl.arange(0, TILE)[:, None] * N + tl.arange(0, WIDE)[None, :]


@triton.jit
def _of_channels(pointer, from_d, channels, GIVEN: tl.constexpr, TILE: tl.constexpr):
    """One number a channel, as a column; zero where there is none."""
    row = tl.arange(0, TILE)
    if GIVEN:
        return tl.load(pointer + from_d + row, mask=row < channels - from_d, other=0.0).to(tl.float32)[:, None]
    else:
        return tl.zeros([TILE, 1], tl.float32)


@triton.jit
def _loaded(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _fetched(pointer, t, stride, cells, in_d, length):
    """A block of four steps from `t` on, as it lies in memory; zeros outside. Asked for one block ahead of its use."""
    at = t + tl.arange(0, 4)
    return tl.load(pointer + t * stride + cells, mask=in_d[:, None] & ((at >= 0) & (at < length))[None, :], other=0.0)


@triton.jit
def _left(step, A2, starts, t, s_l, length, HAS_STARTS: tl.constexpr):
    """What a step leaves of the state before it: nothing where a document starts."""
    left = tl.exp2(step[:, None] * A2)
    if HAS_STARTS:
        left = tl.where(tl.load(starts + t * s_l, mask=t < length, other=0) != 0, 0.0, left)
    return left


@triton.jit
def _pack(
    B, C, packed, B_b, B_n, B_l, C_b, C_n, C_l, length, padded,
    N: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """B and C side by side in fp32, a step's together, with zeros past the last state and the last step."""
    b = tl.program_id(1).to(tl.int64)
    row, n = tl.arange(0, ROWS), tl.arange(0, WIDE)
    from_t = (tl.program_id(0) * ROWS).to(tl.int64)
    inside = (row < length - from_t)[:, None] & (n < N)[None, :]
    at = packed + (b * padded + from_t + row[:, None]) * 2 * WIDE + n[None, :]
    stored = (row < padded - from_t)[:, None] & (n < WIDE)[None, :]
    into = _loaded(B + b * B_b + (from_t + row[:, None]) * B_l + n[None, :] * B_n, inside)
    tl.store(at, into, mask=stored)
    outof = _loaded(C + b * C_b + (from_t + row[:, None]) * C_l + n[None, :] * C_n, inside)
    tl.store(at + WIDE, outof, mask=stored)


@triton.jit
def _states(
    u, delta, A, packed, bias, starts, ends, spans,
    u_b, u_d, u_l, t_b, t_d, t_l, s_b, s_l,
    channels, length, padded, segment, segments,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STARTS: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of a segment that begins with nothing: its last state, and the sum of its time steps.

    A document that starts in it is told by an infinite sum, after which nothing of an earlier state is left.
    """
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    from_d = (tl.program_id(0) * TILE).to(tl.int64)
    row, col, n = tl.arange(0, TILE), tl.arange(0, 4), tl.arange(0, WIDE)
    in_d = row < channels - from_d
    A2, offset = _rates(A, from_d, channels, N, TILE, WIDE), _of_channels(bias, from_d, channels, HAS_BIAS, TILE)
    h = tl.zeros([TILE, WIDE], tl.float32)
    total = tl.zeros([TILE, 4], tl.float32)
    u_cells, t_cells = row[:, None] * u_d + col[None, :] * u_l, row[:, None] * t_d + col[None, :] * t_l
    u += b * u_b + from_d * u_d
    delta += b * t_b + from_d * t_d
    packed += b * padded * 2 * WIDE
    if HAS_STARTS:
        starts += b * s_b
    first = (s * segment).to(tl.int64)
    next_x, next_raw = (
        _fetched(u, first, u_l, u_cells, in_d, length),
        _fetched(delta, first, t_l, t_cells, in_d, length),
    )
    for t in range(first, tl.minimum(first + segment, length), 4):
        mask = in_d[:, None] & (col < length - t)[None, :]
        x, raw = next_x.to(tl.float32), next_raw.to(tl.float32) + offset
        next_x = _fetched(u, t + 4, u_l, u_cells, in_d, length)
        next_raw = _fetched(delta, t + 4, t_l, t_cells, in_d, length)
        step = _time_steps(raw, x, mask, SOFTPLUS)
        driven = _columns(step * x, TILE)
        steps = _columns(step, TILE)
        total += step
        for k in tl.static_range(4):
            into = tl.load(packed + (t + k) * 2 * WIDE + n)
            left = _left(steps[k], A2, starts, t + k, s_l, length, HAS_STARTS)
            h = left * h + driven[k][:, None] * into[None, :]
            if HAS_STARTS:
                begins = tl.load(starts + (t + k) * s_l, mask=t + k < length, other=0) != 0
                total = tl.where(begins, float("inf"), total)
    place = (b * segments + s) * channels + from_d
    both = in_d[:, None] & (n < N)[None, :]
    tl.store(ends + place * N + _cells(N, TILE, WIDE), h, mask=both)
    tl.store(spans + place + row, tl.sum(total, axis=1), mask=in_d)


@triton.jit
def _segment_part(
    ends, spans, A2, cells, both, b, k, segments, channels, from_d,
    N: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What a segment leaves of a state, and what it adds."""
    s = segments - 1 - k if BACKWARD else k
    place = (b * segments + s) * channels + from_d
    row = tl.arange(0, TILE)
    span = tl.load(spans + place + row, mask=row < channels - from_d, other=0.0)
    known = tl.exp2(tl.where(span == float("inf"), 0.0, span)[:, None] * A2)
    left = tl.where((span == float("inf"))[:, None], 0.0, known)
    return left, _loaded(ends + place * N + cells, both)


@triton.jit
def _segment_parts(
    ends, spans, A2, cells, both, b, k, segments, channels, from_d,
    N: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of four segments from `k` on."""
    l0, e0 = _segment_part(ends, spans, A2, cells, both, b, k, segments, channels, from_d, N, BACKWARD, TILE)
    l1, e1 = _segment_part(ends, spans, A2, cells, both, b, k + 1, segments, channels, from_d, N, BACKWARD, TILE)
    l2, e2 = _segment_part(ends, spans, A2, cells, both, b, k + 2, segments, channels, from_d, N, BACKWARD, TILE)
    l3, e3 = _segment_part(ends, spans, A2, cells, both, b, k + 3, segments, channels, from_d, N, BACKWARD, TILE)
    return l0, e0, l1, e1, l2, e2, l3, e3


@triton.jit
def _combine(
    A, ends, spans, first, starts_at, channels, segments,
    N: tl.constexpr, HAS_FIRST: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From what each segment adds, what each begins with; `BACKWARD`: from the last segment to the first.

    Their number is a multiple of four: those past the last change nothing.
    """
    b = tl.program_id(1).to(tl.int64)
    from_d = (tl.program_id(0) * TILE).to(tl.int64)
    row, n = tl.arange(0, TILE), tl.arange(0, WIDE)
    in_d = row < channels - from_d
    both = in_d[:, None] & (n < N)[None, :]
    A2, cells = _rates(A, from_d, channels, N, TILE, WIDE), _cells(N, TILE, WIDE)
    h = tl.zeros([TILE, WIDE], tl.float32)
    if HAS_FIRST:
        h = _loaded(first + (b * channels + from_d) * N + cells, both)
    for k in range(0, segments, 4):  # four at once are asked for, as one alone would be waited for
        parts = _segment_parts(ends, spans, A2, cells, both, b, k, segments, channels, from_d, N, BACKWARD, TILE)
        for j in tl.static_range(4):
            s = segments - 1 - k - j if BACKWARD else k + j
            place = (b * segments + s) * channels + from_d
            tl.store(starts_at + place * N + cells, h, mask=both)
            h = parts[2 * j] * h + parts[2 * j + 1]


@triton.jit
def _forward(
    u, delta, A, packed, D, z, bias, starts, starts_at, out, borders, final,
    u_b, u_d, u_l, t_b, t_d, t_l, z_b, z_d, z_l, s_b, s_l, o_b, o_d, o_l,
    channels, length, padded, segment, segments, border_count,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr, BORDER: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Outputs of a segment, the states at its borders, and of the last one the state after it."""
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    from_d = (tl.program_id(0) * TILE).to(tl.int64)
    row, col, n = tl.arange(0, TILE), tl.arange(0, 4), tl.arange(0, WIDE)
    in_d = row < channels - from_d
    both = in_d[:, None] & (n < N)[None, :]
    A2, cells = _rates(A, from_d, channels, N, TILE, WIDE), _cells(N, TILE, WIDE)
    offset = _of_channels(bias, from_d, channels, HAS_BIAS, TILE)
    skip = _of_channels(D, from_d, channels, HAS_D, TILE)
    h = _loaded(starts_at + ((b * segments + s) * channels + from_d) * N + cells, both)
    u_cells, t_cells = row[:, None] * u_d + col[None, :] * u_l, row[:, None] * t_d + col[None, :] * t_l
    z_cells, o_cells = row[:, None] * z_d + col[None, :] * z_l, row[:, None] * o_d + col[None, :] * o_l
    u += b * u_b + from_d * u_d
    delta += b * t_b + from_d * t_d
    if HAS_Z:
        z += b * z_b + from_d * z_d
    out += b * o_b + from_d * o_d
    packed += b * padded * 2 * WIDE
    if HAS_STARTS:
        starts += b * s_b
    borders += (b * border_count * channels + from_d) * N
    first = (s * segment).to(tl.int64)
    next_x, next_raw = (
        _fetched(u, first, u_l, u_cells, in_d, length),
        _fetched(delta, first, t_l, t_cells, in_d, length),
    )
    next_gate = _fetched(z, first, z_l, z_cells, in_d, length) if HAS_Z else next_x
    for t in range(first, tl.minimum(first + segment, length), 4):
        if t % BORDER == 0:
            tl.store(borders + (t // BORDER) * channels * N + cells, h, mask=both)
        mask = in_d[:, None] & (col < length - t)[None, :]
        x, raw, gate = next_x.to(tl.float32), next_raw.to(tl.float32) + offset, next_gate.to(tl.float32)
        next_x = _fetched(u, t + 4, u_l, u_cells, in_d, length)
        next_raw = _fetched(delta, t + 4, t_l, t_cells, in_d, length)
        next_gate = _fetched(z, t + 4, z_l, z_cells, in_d, length) if HAS_Z else next_x
        step = _time_steps(raw, x, mask, SOFTPLUS)
        steps, driven = _columns(step, TILE), _columns(step * x, TILE)
        h, y0 = _step_out(h, steps[0], driven[0], A2, packed, starts, t, s_l, length, HAS_STARTS, WIDE)
        h, y1 = _step_out(h, steps[1], driven[1], A2, packed, starts, t + 1, s_l, length, HAS_STARTS, WIDE)
        h, y2 = _step_out(h, steps[2], driven[2], A2, packed, starts, t + 2, s_l, length, HAS_STARTS, WIDE)
        h, y3 = _step_out(h, steps[3], driven[3], A2, packed, starts, t + 3, s_l, length, HAS_STARTS, WIDE)
        y = _block(y0, y1, y2, y3, TILE) + skip * x
        if HAS_Z:
            y = y * gate * _sigmoid(gate)
        tl.store(out + t * o_l + o_cells, y.to(out.dtype.element_ty), mask=mask)
    if s == tl.num_programs(1) - 1:
        tl.store(final + (b * channels + from_d) * N + cells, h, mask=both)


@triton.jit
def _step_out(h, step, driven, A2, packed, starts, t, s_l, length, HAS_STARTS: tl.constexpr, WIDE: tl.constexpr):
    """The state after a step, and what comes out."""
    n = tl.arange(0, WIDE)
    into, outof = tl.load(packed + t * 2 * WIDE + n), tl.load(packed + (t * 2 + 1) * WIDE + n)
    h = _left(step, A2, starts, t, s_l, length, HAS_STARTS) * h + driven[:, None] * into[None, :]
    return h, tl.sum(h * outof[None, :], axis=1)


@triton.jit
def _wanted(
    delta, A, packed, z, bias, starts, dout, ends, spans,
    t_b, t_d, t_l, z_b, z_d, z_l, s_b, s_l, g_b, g_d, g_l,
    channels, length, padded, segment, segments,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STARTS: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The mirror of `_states`: what a segment wants of the state before it, if later ones want nothing."""
    s, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    from_d = (tl.program_id(0) * TILE).to(tl.int64)
    row, col, n = tl.arange(0, TILE), tl.arange(0, 4), tl.arange(0, WIDE)
    in_d = row < channels - from_d
    A2, offset = _rates(A, from_d, channels, N, TILE, WIDE), _of_channels(bias, from_d, channels, HAS_BIAS, TILE)
    carry = tl.zeros([TILE, WIDE], tl.float32)
    total = tl.zeros([TILE, 4], tl.float32)
    t_cells, z_cells = row[:, None] * t_d + col[None, :] * t_l, row[:, None] * z_d + col[None, :] * z_l
    g_cells = row[:, None] * g_d + col[None, :] * g_l
    delta += b * t_b + from_d * t_d
    if HAS_Z:
        z += b * z_b + from_d * z_d
    dout += b * g_b + from_d * g_d
    packed += b * padded * 2 * WIDE
    if HAS_STARTS:
        starts += b * s_b
    first = (s * segment).to(tl.int64)
    blocks = (tl.minimum(first + segment, length) - first + 3) // 4
    t = first + (blocks - 1) * 4
    next_dy, next_raw = _fetched(dout, t, g_l, g_cells, in_d, length), _fetched(delta, t, t_l, t_cells, in_d, length)
    next_gate = _fetched(z, t, z_l, z_cells, in_d, length) if HAS_Z else next_dy
    for back in range(blocks):
        t = first + (blocks - 1 - back) * 4
        mask = in_d[:, None] & (col < length - t)[None, :]
        dy, raw, gate = next_dy.to(tl.float32), next_raw.to(tl.float32) + offset, next_gate.to(tl.float32)
        next_dy = _fetched(dout, t - 4, g_l, g_cells, in_d, length)
        next_raw = _fetched(delta, t - 4, t_l, t_cells, in_d, length)
        next_gate = _fetched(z, t - 4, z_l, z_cells, in_d, length) if HAS_Z else next_dy
        step = _time_steps(raw, dy, mask, SOFTPLUS)
        if HAS_Z:
            dy = dy * gate * _sigmoid(gate)
        steps, dys = _columns(step, TILE), _columns(dy, TILE)
        total += step
        for k in tl.static_range(3, -1, -1):
            outof = tl.load(packed + ((t + k) * 2 + 1) * WIDE + n)
            left = _left(steps[k], A2, starts, t + k, s_l, length, HAS_STARTS)
            carry = left * (carry + dys[k][:, None] * outof[None, :])
            if HAS_STARTS:
                begins = tl.load(starts + (t + k) * s_l, mask=t + k < length, other=0) != 0
                total = tl.where(begins, float("inf"), total)
    place = (b * segments + s) * channels + from_d
    both = in_d[:, None] & (n < N)[None, :]
    tl.store(ends + place * N + _cells(N, TILE, WIDE), carry, mask=both)
    tl.store(spans + place + row, tl.sum(total, axis=1), mask=in_d)


@triton.jit
def _step_on(h, step, driven, A2, into, starts, t, s_l, length, HAS_STARTS: tl.constexpr):
    """What the step leaves of a state, and the state after it."""
    left = _left(step, A2, starts, t, s_l, length, HAS_STARTS)
    return left, left * h + driven[:, None] * into[None, :]


@triton.jit
def _out_of(h, dy, outof):
    """What a state gives, and the gradient of C."""
    return tl.sum(h * outof[None, :], axis=1), tl.sum(dy[:, None] * h, axis=0)


@triton.jit
def _step_back(carry, grad_A, before, left, step, driven, dy, A2, packed, WIDE: tl.constexpr):
    """Of one step: what goes on to the step before it, the sums over the states, and the gradient of B."""
    into, outof = tl.load(packed), tl.load(packed + WIDE)
    wanted = carry + dy[:, None] * outof[None, :]
    by_input = tl.sum(wanted * into[None, :], axis=1)
    carry = left * wanted
    exponent = carry * before
    grad_A += exponent * step[:, None]
    return carry, grad_A, by_input, tl.sum(exponent * A2, axis=1), tl.sum(wanted * driven[:, None], axis=0)


@triton.jit
def _backward(
    u, delta, A, packed, D, z, bias, starts, dout, borders, carries, scratch,
    du, ddelta, dz, out, dA, sums, dD, dbias, dfirst,
    u_b, u_d, u_l, t_b, t_d, t_l, z_b, z_d, z_l, s_b, s_l, g_b, g_d, g_l,
    du_b, du_d, du_l, dt_b, dt_d, dt_l, dz_b, dz_d, dz_l, o_b, o_d, o_l,
    batch, channels, length, padded, segment, segments, border_count, first_tile,
    N: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_OUT: tl.constexpr, BORDER: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All gradients of a segment; `out` again, if it has a place. The first program has the tile `first_tile`."""
    tile, s, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    from_d = ((first_tile + tile) * TILE).to(tl.int64)
    row, col, n = tl.arange(0, TILE), tl.arange(0, 4), tl.arange(0, WIDE)
    in_d = row < channels - from_d
    both = in_d[:, None] & (n < N)[None, :]
    A2, cells = _rates(A, from_d, channels, N, TILE, WIDE), _cells(N, TILE, WIDE)
    offset = _of_channels(bias, from_d, channels, HAS_BIAS, TILE)
    skip = _of_channels(D, from_d, channels, HAS_D, TILE)
    here = (b * segments + s) * channels + from_d
    carry = _loaded(carries + here * N + cells, both)
    grad_A = tl.zeros([TILE, WIDE], tl.float32)
    grad_D, grad_bias = tl.zeros([TILE, 4], tl.float32), tl.zeros([TILE, 4], tl.float32)
    u_cells, t_cells = row[:, None] * u_d + col[None, :] * u_l, row[:, None] * t_d + col[None, :] * t_l
    z_cells, g_cells = row[:, None] * z_d + col[None, :] * z_l, row[:, None] * g_d + col[None, :] * g_l
    du_cells, dt_cells = row[:, None] * du_d + col[None, :] * du_l, row[:, None] * dt_d + col[None, :] * dt_l
    dz_cells, o_cells = row[:, None] * dz_d + col[None, :] * dz_l, row[:, None] * o_d + col[None, :] * o_l
    u += b * u_b + from_d * u_d
    delta += b * t_b + from_d * t_d
    if HAS_Z:
        z += b * z_b + from_d * z_d
    dout += b * g_b + from_d * g_d
    du += b * du_b + from_d * du_d
    ddelta += b * dt_b + from_d * dt_d
    if HAS_Z:
        dz += b * dz_b + from_d * dz_d
    if HAS_OUT:
        out += b * o_b + from_d * o_d
    packed += b * padded * 2 * WIDE
    sums += (tile * batch + b) * padded * 2 * WIDE
    if HAS_STARTS:
        starts += b * s_b
    borders += (b * border_count * channels + from_d) * N
    square = _cells(WIDE, TILE, WIDE)
    sum_cells = n[:, None] * 4 + col[None, :]
    program = (b * tl.num_programs(1) + s) * tl.num_programs(0) + tile
    scratch += program * (BORDER // 4) * TILE * WIDE
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    border_blocks = (last - first + BORDER - 1) // BORDER
    for border_back in range(border_blocks):
        border = first + (border_blocks - 1 - border_back) * BORDER
        blocks = (tl.minimum(border + BORDER, last) - border + 3) // 4
        h = _loaded(borders + (border // BORDER) * channels * N + cells, both)
        next_x = _fetched(u, border, u_l, u_cells, in_d, length)
        next_raw = _fetched(delta, border, t_l, t_cells, in_d, length)
        for block in range(blocks):
            t = border + block * 4
            tl.store(scratch + block * TILE * WIDE + square, h)
            mask = in_d[:, None] & (col < length - t)[None, :]
            x, raw = next_x.to(tl.float32), next_raw.to(tl.float32) + offset
            next_x = _fetched(u, t + 4, u_l, u_cells, in_d, length)
            next_raw = _fetched(delta, t + 4, t_l, t_cells, in_d, length)
            step = _time_steps(raw, x, mask, SOFTPLUS)
            driven = _columns(step * x, TILE)
            steps = _columns(step, TILE)
            for k in tl.static_range(4):
                into = tl.load(packed + (t + k) * 2 * WIDE + n)
                left, h = _step_on(h, steps[k], driven[k], A2, into, starts, t + k, s_l, length, HAS_STARTS)
        tl.debug_barrier()
        t = border + (blocks - 1) * 4
        next_h = tl.load(scratch + (blocks - 1) * TILE * WIDE + square)
        next_x = _fetched(u, t, u_l, u_cells, in_d, length)
        next_raw = _fetched(delta, t, t_l, t_cells, in_d, length)
        next_dy = _fetched(dout, t, g_l, g_cells, in_d, length)
        next_gate = _fetched(z, t, z_l, z_cells, in_d, length) if HAS_Z else next_dy
        for block_back in range(blocks):
            block = blocks - 1 - block_back
            t = border + block * 4
            h0 = next_h
            next_h = tl.load(scratch + tl.maximum(block - 1, 0) * TILE * WIDE + square)
            x, raw, dy = next_x.to(tl.float32), next_raw.to(tl.float32) + offset, next_dy.to(tl.float32)
            gate = next_gate.to(tl.float32)
            next_x = _fetched(u, t - 4, u_l, u_cells, in_d, length)
            next_raw = _fetched(delta, t - 4, t_l, t_cells, in_d, length)
            next_dy = _fetched(dout, t - 4, g_l, g_cells, in_d, length)
            next_gate = _fetched(z, t - 4, z_l, z_cells, in_d, length) if HAS_Z else next_dy
            mask = in_d[:, None] & (col < length - t)[None, :]
            step = _time_steps(raw, x, mask, SOFTPLUS)
            gated = dy
            if HAS_Z:
                share = _sigmoid(gate)
                gated = dy * gate * share
            steps, driven, dys = _columns(step, TILE), _columns(step * x, TILE), _columns(gated, TILE)
            at = packed + t * 2 * WIDE + n
            B0, B1, B2, B3 = tl.load(at), tl.load(at + 2 * WIDE), tl.load(at + 4 * WIDE), tl.load(at + 6 * WIDE)
            a0, h1 = _step_on(h0, steps[0], driven[0], A2, B0, starts, t, s_l, length, HAS_STARTS)
            y0, gC0 = _out_of(h1, dys[0], tl.load(at + 1 * WIDE))
            a1, h2 = _step_on(h1, steps[1], driven[1], A2, B1, starts, t + 1, s_l, length, HAS_STARTS)
            y1, gC1 = _out_of(h2, dys[1], tl.load(at + 3 * WIDE))
            a2, h3 = _step_on(h2, steps[2], driven[2], A2, B2, starts, t + 2, s_l, length, HAS_STARTS)
            y2, gC2 = _out_of(h3, dys[2], tl.load(at + 5 * WIDE))
            a3, h4 = _step_on(h3, steps[3], driven[3], A2, B3, starts, t + 3, s_l, length, HAS_STARTS)
            y3, gC3 = _out_of(h4, dys[3], tl.load(at + 7 * WIDE))
            tl.store(sums + (t * 2 + 4) * WIDE + sum_cells, _block(gC0, gC1, gC2, gC3, WIDE))
            if HAS_Z or HAS_OUT:
                y = _block(y0, y1, y2, y3, TILE) + skip * x
            if HAS_Z:
                grad_z = dy * y * share * (1.0 + gate * (1.0 - share))
                tl.store(dz + t * dz_l + dz_cells, grad_z.to(dz.dtype.element_ty), mask=mask)
                y = y * gate * share
            if HAS_OUT:
                tl.store(out + t * o_l + o_cells, y.to(out.dtype.element_ty), mask=mask)
            carry, grad_A, q3, p3, gB3 = _step_back(
                carry, grad_A, h3, a3, steps[3], driven[3], dys[3], A2, at + 6 * WIDE, WIDE
            )
            carry, grad_A, q2, p2, gB2 = _step_back(
                carry, grad_A, h2, a2, steps[2], driven[2], dys[2], A2, at + 4 * WIDE, WIDE
            )
            carry, grad_A, q1, p1, gB1 = _step_back(
                carry, grad_A, h1, a1, steps[1], driven[1], dys[1], A2, at + 2 * WIDE, WIDE
            )
            carry, grad_A, q0, p0, gB0 = _step_back(carry, grad_A, h0, a0, steps[0], driven[0], dys[0], A2, at, WIDE)
            tl.store(sums + t * 2 * WIDE + sum_cells, _block(gB0, gB1, gB2, gB3, WIDE))
            by_input, by_rate = _block(q0, q1, q2, q3, TILE), _block(p0, p1, p2, p3, TILE)
            grad_step = by_rate * LN_2 + by_input * x
            if SOFTPLUS:
                grad_step = grad_step * _sigmoid(raw)
            grad_bias += tl.where(mask, grad_step, 0.0)
            grad_D += gated * x
            grad_u = by_input * step + skip * gated
            tl.store(du + t * du_l + du_cells, grad_u.to(du.dtype.element_ty), mask=mask)
            tl.store(ddelta + t * dt_l + dt_cells, grad_step.to(ddelta.dtype.element_ty), mask=mask)
        tl.debug_barrier()
    tl.store(dA + here * N + cells, grad_A, mask=both)
    if HAS_D:
        tl.store(dD + here + row, tl.sum(grad_D, axis=1), mask=in_d)
    if HAS_BIAS:
        tl.store(dbias + here + row, tl.sum(grad_bias, axis=1), mask=in_d)
    if s == 0:
        tl.store(dfirst + (b * channels + from_d) * N + cells, carry, mask=both)
