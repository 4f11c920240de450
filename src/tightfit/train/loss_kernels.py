"""The fused loss's softmax for a GPU, in Triton: a chunk of logits becomes its gradient where it stands.

A program has one row. It reads the row once for the largest logit and the sum of exponentials, both kept up as it goes
(the sum by column of a block, so that only the maximum is shared at each step), and once more to put the gradient in
the logits' place. Everything between is in fp32 registers: no copy of the logits is made, in any precision. The second
reading goes backwards, since what was read last is still in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
"""Columns that a program has at a time. Measured on an H200: 3.2 TB/s with these, 2.7 to 3.1 with wider blocks; of
capped logits 2.1 against 1.6 to 1.9."""
PROGRAMS = 2048  # that scale gradients: several times what a large card runs at once


@triton.jit
def _tanh(x):
    """And its slope, which is no difference of near numbers; both from one exponential, which cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    part = 1.0 / (1.0 + e)
    size = (1.0 - e) * part
    return tl.where(x < 0.0, -size, size), 4.0 * e * part * part


@triton.jit
def _shape(logit, times, cap, CAPPED: tl.constexpr):
    """A logit as the softmax sees it, and the slope of that, but for `times`. With a cap, `times` is a share of it."""
    x = logit.to(tl.float32) * times
    slope = 1.0
    if CAPPED:
        x, slope = _tanh(x)
        x = x * cap
    return x, slope


@triton.jit
def _logits(row, column, vocab, times, cap, CAPPED: tl.constexpr):
    """Those of a block, -inf past the last, and their slopes."""
    inside = column < vocab
    x, slope = _shape(tl.load(row + column, mask=inside, other=0.0), times, cap, CAPPED)
    return tl.where(inside, x, float("-inf")), slope


@triton.jit
def _cross_entropy(
    logits, labels, losses, factor, stride, vocab, times, cap,
    CAPPED: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    label = tl.load(labels + at)
    column = tl.arange(0, BLOCK)
    blocks = tl.cdiv(vocab, BLOCK)
    if label == -100:
        tl.store(losses + at, 0.0)
        if GRADIENTS:
            for block in range(blocks):
                tl.store(row + block * BLOCK + column, 0.0, mask=block * BLOCK + column < vocab)
        return
    # A label that is none of the vocabulary's makes the loss not a number; it never reads past the row.
    known = (label >= 0) & (label < vocab)
    wanted = _shape(tl.load(row + label, mask=known, other=float("nan")), times, cap, CAPPED)[0]
    top = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(blocks):
        x = _logits(row, block * BLOCK + column, vocab, times, cap, CAPPED)[0]
        higher = tl.maximum(top, tl.max(x, 0))
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    total = tl.sum(sums, 0)
    tl.store(losses + at, tl.log(total) + top - wanted)
    if GRADIENTS:
        share = tl.load(factor) * times * cap
        each = share / total
        for back in range(blocks):
            here = (blocks - 1 - back) * BLOCK + column
            x, slope = _logits(row, here, vocab, times, cap, CAPPED)
            gradient = tl.exp(x - top) * each - tl.where(here == label, share, 0.0)
            tl.store(row + here, gradient * slope, mask=here < vocab)


@triton.jit
def _scale(tensor, factor, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """By 1 most often, which costs nothing; not known before, as the factor is on the GPU."""
    by = tl.load(factor)
    if by != 1.0:
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, BLOCK), PROGRAMS):
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(tensor + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(tensor + at, x * by, mask=at < size)


def scale_in_place(tensor: Tensor, factor: Tensor) -> Tensor:
    """The same as that of `loss.py`."""
    launch: Any = _scale[PROGRAMS,]
    launch(tensor, factor, tensor.numel(), PROGRAMS=PROGRAMS, BLOCK=BLOCK)
    return tensor


def losses_in_place(
    logits_CV: Tensor,
    labels_C: Tensor,
    factor: Tensor,
    shaping: tuple[float, float | None],
    *,
    gradients: bool,
) -> Tensor:
    """The same as that of `loss.py`, which says what it computes."""
    (rows, vocab), (times, cap) = logits_CV.shape, shaping
    losses_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    launch: Any = _cross_entropy[rows,]
    launch(
        logits_CV, labels_C, losses_C, factor, logits_CV.stride(0), vocab, times / (cap or 1.0), cap or 1.0,
        CAPPED=cap is not None, GRADIENTS=gradients, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses_C
