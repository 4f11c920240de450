"""Final norm, head and loss: where a large vocabulary costs more than all layers together.

The plain path is Hugging Face's: logits in the working precision, upcast to fp32, `cross_entropy`. PyTorch
keeps the log-probabilities; the backward pass then makes two more fp32 tensors of that size before it is
back in the working precision. The fused path is `train/loss.py`: one chunk of logits at a time, gradients
made in the forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.operations import FP32, Operations, Setting
from tightfit.memory.tape import Slot, measure
from tightfit.types import ModelShape

FUSED_CHUNK_BYTES = 384 * 2**20  # of logits that the fused loss's kernel turns into their gradient at a time, at most
TORCH_CHUNK_ELEMENTS = 2**26  # the same in torch, which has them in fp32 beside: as many bytes in all
TILE_ROWS = 128  # of a matrix product's tile: a chunk is no fraction of one
PRODUCT_ROWS = 1024
"""From so many on, logits and the gradients of hidden states are computed as fast as of all tokens at once; 0.8 as fast
with 441. Measured on an H200 at widths of 896 to 4096."""
ADDING_ROWS = 2048
"""The same where the head trains. Each chunk reads and writes its whole gradient: that product is 0.9 as fast as of all
tokens at once with 1280 rows, 0.94 with these. Measured likewise."""
CHUNK_MULTIPLICATIONS = 2**37
"""Of a chunk's product, at least: three of them take a fast card a millisecond, its launches the host a third of it."""


def fused_chunk_tokens(tokens: int, vocab: int, hidden: int, *, width: int, trains_head: bool, kernel: bool) -> int:
    """Tokens whose logits the fused loss holds at once: enough for products that are as fast as they can be, in equal
    parts. `kernel`: not in torch."""
    if not kernel:
        return min(tokens, max(1, TORCH_CHUNK_ELEMENTS // vocab))
    rows = max(ADDING_ROWS if trains_head else PRODUCT_ROWS, CHUNK_MULTIPLICATIONS // (vocab * hidden))
    most = max(1, min(rows, FUSED_CHUNK_BYTES // (vocab * width)))
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    return min(tokens, most, -(-even // TILE_ROWS) * TILE_ROWS)


def chunk_tokens(shape: ModelShape, setting: Setting, trains_head: bool) -> int:
    """The same in this setting. Liger's chunks have as many logits as all hidden states have numbers, their tokens
    rounded up to a power of two."""
    tokens, vocab, hidden, width = setting.tokens, shape.vocab_size, shape.hidden_size, setting.width
    if not setting.liger_loss:
        kernel = setting.loss_kernel
        return fused_chunk_tokens(tokens, vocab, hidden, width=width, trains_head=trains_head, kernel=kernel)
    even = -(-tokens // -(-vocab // hidden))
    return min(tokens, 1 << (even - 1).bit_length())


class HeadCost(NamedTuple):
    """Bytes beside the input of the final norm."""

    saved_norm: int
    norm_forward: int  # held while the final norm runs forwards, what it keeps included
    norm_backward: int
    """Held in the final norm's backward pass, what it has kept and the gradient of its output included."""
    saved_logits: int  # kept for the backward pass: log-probabilities, or the fused loss's gradients
    forward_logits: int  # held at the worst moment of the forward pass, what is kept included
    backward_logits: int  # likewise of the backward pass, to the end of the final norm's
    backward_head: int  # likewise, before the final norm's
    arriving: int  # held when the head's gradient arrives: that and the gradient of the hidden states
    head_grad: int  # the head's weight gradient, 0 where the head is frozen or its loss fused
    fused_grad: int  # the same of a fused loss, which has made it before the backward pass begins
    eval_logits: int


NO_HEAD = HeadCost(*[0] * len(HeadCost._fields))


@lru_cache(maxsize=1024)
def head_cost(shape: ModelShape, setting: Setting, fused: bool, trains_head: bool) -> HeadCost:
    if shape.hands_on:
        return NO_HEAD
    tokens, width, vocab, hidden = setting.tokens, setting.width, shape.vocab_size, shape.hidden_size
    norm, norm_forward, norm_backward, head_input = _final_norm(shape, setting)
    logits, logits32 = tokens * vocab * width, tokens * vocab * FP32
    head_grad = vocab * hidden * width if trains_head else 0
    upcast = logits32 if width < FP32 else 0
    capped = 2 * logits if shape.final_softcap else 0  # tanh(logits / cap) is kept, and scaled again
    if fused:
        held = width  # of each logit
        if not setting.loss_kernel:  # the softmax in fp32, and the cap's slope
            held += (FP32 if width < FP32 else 0) + (FP32 if shape.final_softcap else 0)
        chunk = chunk_tokens(shape, setting, trains_head) * vocab * held
        kept = tokens * hidden * width + head_grad
        return HeadCost(
            saved_norm=norm,
            norm_forward=norm_forward,
            norm_backward=norm_backward,
            saved_logits=kept,
            forward_logits=kept + chunk + head_input,
            backward_logits=max(kept, norm_backward - norm + head_grad),
            backward_head=kept,
            arriving=kept,
            head_grad=0,
            fused_grad=head_grad,
            eval_logits=chunk_tokens(shape, setting, False) * vocab * held + head_input,
        )
    saved_norm = norm + (head_input if trains_head else 0)
    return HeadCost(
        saved_norm=saved_norm,
        norm_forward=norm_forward,
        norm_backward=norm_backward,
        saved_logits=logits32 + capped // 2,
        # the caller's variable holds the head's input until the loss is there
        forward_logits=logits + upcast + logits32 + capped + (0 if trains_head else head_input),
        backward_logits=max(3 * logits32 + capped // 2, norm_backward - saved_norm + head_grad),
        backward_head=3 * logits32 + capped // 2,
        arriving=tokens * hidden * width + head_grad,
        head_grad=head_grad,
        fused_grad=0,
        eval_logits=logits + upcast + logits32 + capped + head_input,
    )


def _final_norm(shape: ModelShape, setting: Setting) -> tuple[int, int, int, int]:
    """What the final norm keeps, what its passes hold, and its output, which a plain head that trains keeps. Behind an
    fp32 residual the norm works in fp32 throughout, and its output is cast for the head."""
    wide = shape.blocks[shape.pattern[-1]].residual_fp32
    added = shape.blocks[shape.pattern[-1]].arrangement == "sandwich"  # Liger treats it as the others of such a model
    ops = Operations(replace(setting, width=FP32) if wide else setting, {}, adds_norms=added)
    x = Slot(ops.size(shape.hidden_size), True)
    y = ops.norm(x, shape.hidden_size, shape.final_norm)
    if wide and setting.width < FP32:
        y = ops.tape.op((y,), ops.size(shape.hidden_size, setting.width))
    cost = measure(ops.tape, x, y)
    return cost.saved, cost.forward, cost.backward, y.size
