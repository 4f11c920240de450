"""The short convolution for a GPU, in Triton: forward, and backward with sums per tile.

A program has a tile of steps × channels. It reads each input once a tap; neighbours' reads come from the cache. In the
backward pass, what the loss wants of an input comes from the `WIDTH` steps that see it, and each of these needs its sum
before the SiLU again: reads repeat, memory traffic does not. Sums over time for the weight go to a place of each tile's
own and are added up afterwards in a fixed order: no atomics. Offsets have 64 bits, and nothing assumes a warp of 32.

`back` is always how many steps a tap looks back; its weight stands at `WIDTH - 1 - back`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _input(x, initial, t, wide_d, in_d, b, x_b, x_d, x_l, i_b, i_d, i_l, length,
           WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr):  # fmt: skip
    """x at steps t; before the first of them, what was given to stand there."""
    inside = ((t >= 0) & (t < length))[:, None] & in_d[None, :]
    value = tl.load(x + b * x_b + t[:, None] * x_l + wide_d[None, :] * x_d, mask=inside, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        early = ((t < 0) & (t >= 1 - WIDTH))[:, None] & in_d[None, :]
        place = initial + b * i_b + (t + WIDTH - 1)[:, None] * i_l + wide_d[None, :] * i_d
        value += tl.load(place, mask=early, other=0.0).to(tl.float32)
    return value


@triton.jit
def _cut_at(starts, t, b, s_b, s_l, length):
    """Whether a document starts at steps t."""
    return tl.load(starts + b * s_b + t * s_l, mask=(t >= 0) & (t < length), other=0) != 0


@triton.jit
def _before_silu(x, weight, bias, initial, starts, t, wide_d, in_d, b, x_b, x_d, x_l, w_d, w_w, i_b, i_d, i_l, s_b, s_l,
                 length, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
                 HAS_STARTS: tl.constexpr):  # fmt: skip
    tap = tl.load(weight + wide_d * w_d + (WIDTH - 1) * w_w, mask=in_d, other=0.0).to(tl.float32)
    pre = tap[None, :] * _input(
        x, initial, t, wide_d, in_d, b, x_b, x_d, x_l, i_b, i_d, i_l, length, WIDTH, HAS_INITIAL
    )
    if HAS_BIAS:
        pre += tl.load(bias + wide_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    visible = t < length
    for back in tl.static_range(1, WIDTH):
        tap = tl.load(weight + wide_d * w_d + (WIDTH - 1 - back) * w_w, mask=in_d, other=0.0).to(tl.float32)
        value = _input(x, initial, t - back, wide_d, in_d, b, x_b, x_d, x_l, i_b, i_d, i_l, length, WIDTH, HAS_INITIAL)
        if HAS_STARTS:
            visible = visible & (_cut_at(starts, t - back + 1, b, s_b, s_l, length) == 0)
            value = tl.where(visible[:, None], value, 0.0)
        pre += tap[None, :] * value
    return pre


@triton.jit
def _wanted_before_silu(x, weight, bias, initial, starts, dout, t, wide_d, in_d, b, x_b, x_d, x_l, w_d, w_w, i_b, i_d,
                        i_l, s_b, s_l, g_b, g_d, g_l, length, WIDTH: tl.constexpr, SILU: tl.constexpr,
                        HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_STARTS: tl.constexpr):  # fmt: skip
    """What the loss wants of the sums at steps t; nothing outside the sequence."""
    inside = ((t >= 0) & (t < length))[:, None] & in_d[None, :]
    wanted = tl.load(dout + b * g_b + t[:, None] * g_l + wide_d[None, :] * g_d, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        pre = _before_silu(x, weight, bias, initial, starts, t, wide_d, in_d, b, x_b, x_d, x_l, w_d, w_w, i_b, i_d, i_l,
                           s_b, s_l, length, WIDTH, HAS_BIAS, HAS_INITIAL, HAS_STARTS)  # fmt: skip
        share = tl.sigmoid(pre)
        wanted = tl.where(inside, wanted * share * (1.0 + pre * (1.0 - share)), 0.0)
    return wanted


@triton.jit
def _forward(
    x, weight, bias, initial, starts, out, x_b, x_d, x_l, w_d, w_w, i_b, i_d, i_l, s_b, s_l, o_b, o_d, o_l,
    channels, length, WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    t = tl.program_id(1).to(tl.int64) * STEPS + tl.arange(0, STEPS)
    b = tl.program_id(2).to(tl.int64)
    in_d, wide_d = d < channels, d.to(tl.int64)
    y = _before_silu(x, weight, bias, initial, starts, t, wide_d, in_d, b, x_b, x_d, x_l, w_d, w_w, i_b, i_d, i_l,
                     s_b, s_l, length, WIDTH, HAS_BIAS, HAS_INITIAL, HAS_STARTS)  # fmt: skip
    if SILU:
        y = y * tl.sigmoid(y)
    place = out + b * o_b + t[:, None] * o_l + wide_d[None, :] * o_d
    tl.store(place, y.to(out.dtype.element_ty), mask=(t < length)[:, None] & in_d[None, :])


@triton.jit
def _backward(
    x, weight, bias, initial, starts, dout, dx, dweight, dbias, dinitial,
    x_b, x_d, x_l, w_d, w_w, i_b, i_d, i_l, s_b, s_l, g_b, g_d, g_l, dx_b, dx_d, dx_l,
    channels, length, WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of dx, and its share of dweight (tiles, width, channels), dbias (tiles, channels); tiles: batch × time.

    With inputs before the first step, time starts with these: their gradients are found the same way.
    """
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    t = tl.program_id(1).to(tl.int64) * STEPS + tl.arange(0, STEPS)
    if HAS_INITIAL:
        t -= WIDTH - 1
    b = tl.program_id(2).to(tl.int64)
    in_d, wide_d = d < channels, d.to(tl.int64)
    sums = (b * tl.num_programs(1) + tl.program_id(1)) * channels
    wanted = _wanted_before_silu(x, weight, bias, initial, starts, dout, t, wide_d, in_d, b, x_b, x_d, x_l, w_d, w_w,
                                 i_b, i_d, i_l, s_b, s_l, g_b, g_d, g_l, length, WIDTH, SILU, HAS_BIAS, HAS_INITIAL,
                                 HAS_STARTS)  # fmt: skip
    if HAS_BIAS:
        tl.store(dbias + sums + wide_d, tl.sum(wanted, axis=0), mask=in_d)
    seen = wanted
    for back in tl.static_range(WIDTH):
        if HAS_STARTS and back > 0:
            cut = _cut_at(starts, t - back + 1, b, s_b, s_l, length)
            seen = tl.where(cut[:, None], 0.0, seen)
        value = _input(x, initial, t - back, wide_d, in_d, b, x_b, x_d, x_l, i_b, i_d, i_l, length, WIDTH, HAS_INITIAL)
        place = dweight + (sums * WIDTH + (WIDTH - 1 - back) * channels) + wide_d
        tl.store(place, tl.sum(seen * value, axis=0), mask=in_d)
    tap = tl.load(weight + wide_d * w_d + (WIDTH - 1) * w_w, mask=in_d, other=0.0).to(tl.float32)
    grad = wanted * tap[None, :]
    visible = t < length
    for back in tl.static_range(1, WIDTH):
        tap = tl.load(weight + wide_d * w_d + (WIDTH - 1 - back) * w_w, mask=in_d, other=0.0).to(tl.float32)
        later = _wanted_before_silu(x, weight, bias, initial, starts, dout, t + back, wide_d, in_d, b, x_b, x_d, x_l,
                                    w_d, w_w, i_b, i_d, i_l, s_b, s_l, g_b, g_d, g_l, length, WIDTH, SILU, HAS_BIAS,
                                    HAS_INITIAL, HAS_STARTS)  # fmt: skip
        if HAS_STARTS:
            visible = visible & (_cut_at(starts, t + back, b, s_b, s_l, length) == 0)
            later = tl.where(visible[:, None], later, 0.0)
        grad += tap[None, :] * later
    place = dx + b * dx_b + t[:, None] * dx_l + wide_d[None, :] * dx_d
    tl.store(place, grad.to(dx.dtype.element_ty), mask=((t >= 0) & (t < length))[:, None] & in_d[None, :])
    if HAS_INITIAL:
        before = dinitial + (b * channels + wide_d)[None, :] * (WIDTH - 1) + (t + WIDTH - 1)[:, None]
        tl.store(before, grad, mask=((t < 0) & (t >= 1 - WIDTH))[:, None] & in_d[None, :])


@triton.jit
def _row(pointer, t, stride, length, in_d):
    """One step of a tile; zeros outside the sequence."""
    at = t + tl.zeros(in_d.shape, tl.int32)
    return tl.load(pointer + t * stride, mask=in_d & (at >= 0) & (at < length), other=0.0)


@triton.jit
def _begins(starts, t, stride, length, HAS_STARTS: tl.constexpr):
    """One where a document starts at step t, else zero."""
    if HAS_STARTS:
        return tl.load(starts + t * stride, mask=(length - t <= length) & (t < length), other=0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _backward_of_four(
    x, weight, bias, starts, dout, dx, dweight, dbias,
    x_b, x_l, w_d, w_w, s_b, s_l, g_b, g_l, dx_b, dx_l, channels, length, segment,
    SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The usual case: four taps, the channels of a step together in memory, nothing before the first step.

    A program goes through its steps in order and holds the last three inputs and the three gradients that later steps
    still add to, so that every number is read once. It begins where its segment does and goes three steps further.
    """
    b, s = tl.program_id(2).to(tl.int64), tl.program_id(1)
    d = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_d = d < channels
    x += b * x_b + d
    dout += b * g_b + d
    dx += b * dx_b + d
    if HAS_STARTS:
        starts += b * s_b
    w0 = tl.load(weight + d * w_d + 3 * w_w, mask=in_d, other=0.0).to(tl.float32)
    w1 = tl.load(weight + d * w_d + 2 * w_w, mask=in_d, other=0.0).to(tl.float32)
    w2 = tl.load(weight + d * w_d + w_w, mask=in_d, other=0.0).to(tl.float32)
    w3 = tl.load(weight + d * w_d, mask=in_d, other=0.0).to(tl.float32)
    offset = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros([TILE], tl.float32)
    first = (s * segment).to(tl.int64)
    last = tl.minimum(first + segment, length)
    # How far the step before the first one sees: 1 or 0 for one and two steps back.
    sees1 = 1.0 - _begins(starts, first - 1, s_l, length, HAS_STARTS)
    sees2 = sees1 * (1.0 - _begins(starts, first - 2, s_l, length, HAS_STARTS))
    x1 = _row(x, first - 1, x_l, length, in_d).to(tl.float32)
    x2 = _row(x, first - 2, x_l, length, in_d).to(tl.float32) * sees1
    x3 = _row(x, first - 3, x_l, length, in_d).to(tl.float32) * sees2
    d1, d2, d3 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    g0, g1 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    g2, g3 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE], tl.float32)
    next_x, next_wanted = _row(x, first, x_l, length, in_d), _row(dout, first, g_l, length, in_d)
    for t in range(first, last + 3):
        x0, wanted = next_x.to(tl.float32), next_wanted.to(tl.float32)
        next_x, next_wanted = _row(x, t + 1, x_l, length, in_d), _row(dout, t + 1, g_l, length, in_d)
        sees0 = 1.0 - _begins(starts, t, s_l, length, HAS_STARTS)
        if HAS_STARTS:
            x1, x2, x3 = x1 * sees0, x2 * sees0, x3 * sees0
        if SILU:
            pre = offset + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            share = tl.sigmoid(pre)
            wanted = wanted * share * (1.0 + pre * (1.0 - share))
        mine = tl.where(t < last, wanted, 0.0)  # the next segment has those after the last
        g0 += mine * x0
        g1 += mine * x1
        g2 += mine * x2
        g3 += mine * x3
        summed += mine
        # sees1 and sees2 are the last step's: whether this one sees two and three back goes through them.
        grad = d3 + w3 * wanted * (sees0 * sees2)
        tl.store(
            dx + (t - 3) * dx_l, grad.to(dx.dtype.element_ty), mask=in_d & (t + tl.zeros([TILE], tl.int32) >= first + 3)
        )
        d3 = d2 + w2 * wanted * (sees0 * sees1)
        d2 = d1 + w1 * wanted * sees0
        d1 = w0 * wanted
        sees2, sees1 = sees1 * sees0, sees0
        x3, x2, x1 = x2, x1, x0
    place = (b * tl.num_programs(1) + s) * channels
    tl.store(dweight + place * 4 + 3 * channels + d, g0, mask=in_d)
    tl.store(dweight + place * 4 + 2 * channels + d, g1, mask=in_d)
    tl.store(dweight + place * 4 + channels + d, g2, mask=in_d)
    tl.store(dweight + place * 4 + d, g3, mask=in_d)
    if HAS_BIAS:
        tl.store(dbias + place + d, summed, mask=in_d)


@triton.jit
def _finish(
    parts, parts_bias, weight, bias, rows, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums over the tiles, as the weight and the bias are kept. A program has one tap, or the bias."""
    d, tap = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    in_d, row = d < channels, tl.arange(0, ROWS)
    of_bias = tap == WIDTH
    at = parts_bias + d if of_bias else parts + tap * channels + d
    stride = channels if of_bias else WIDTH * channels
    total = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(0, rows, ROWS):
        place = at[None, :] + (first + row).to(tl.int64)[:, None] * stride
        total += tl.load(place, mask=(row < rows - first)[:, None] & in_d[None, :], other=0.0)
    found = tl.sum(total, axis=0)
    if of_bias:
        if HAS_BIAS:
            tl.store(bias + d, found.to(bias.dtype.element_ty), mask=in_d)
    else:
        tl.store(weight + d * WIDTH + tap, found.to(weight.dtype.element_ty), mask=in_d)
