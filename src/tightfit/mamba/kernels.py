"""The scan for a GPU, in Triton: no build, CUDA and ROCm alike.

A program has a tile of channels with all their states in registers and goes through time step by step: one fused
multiply-add a state and step, where a parallel scan would need several. It reads B and C once for the whole tile. Time
is cut into segments so that a small batch still fills the card: the state at each segment's start comes from a first
pass over the segments before it (`_states`), put together by `_combine`.

What has no states (the time step, the input, the gate) is loaded and computed for four steps at once, a block of
(channels, steps), and then taken apart into its columns. A step past the end has a time step of zero: it changes
nothing.

Of the states only one every `BORDER` steps is kept, for the backward pass: see `backward_kernels`.

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
