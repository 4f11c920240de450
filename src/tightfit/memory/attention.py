"""Softmax attention on a tape: projections, rotary embedding, the kernel.

Two facts about layout decide copies here. Heads are split by a view and a transpose, so a gradient that comes
back head by head is copied before the projection can use it. And a fused kernel lays its output out as its
query is laid out (flash, cuDNN; the memory-efficient one does not): where the query was put together with `cat`
(partial rotary), the output has to be copied back into token order, and autograd keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from tightfit.memory.operations import BOOL, FP32, Operations, Setting
from tightfit.memory.tape import Slot
from tightfit.types import Attention

Kernel = Literal["flash", "cudnn", "efficient", "math", "eager"]
AttentionCall = Callable[[Operations, Slot, Slot, Slot, Attention], Slot]

SLICED = "self_attn.qkv_proj"
FUSED = (SLICED, "attn.c_attn", "attention.query_key_value")
OUTPUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense")

WIDEST_FUSED_HEAD = 256
QUERY_BLOCK = 128  # queries that the flash kernel takes together
MASK_ALIGNMENT = 16  # elements to which PyTorch pads the rows of a mask for its memory-efficient kernel
SUM_ALIGNMENT = 32  # queries to which that kernel pads its row sums
HEAD_BLOCKS = (64, 128)  # to one of these it pads a head where it accumulates
KEY_BLOCK, MOST_BLOCKS = 64, 200  # keys that it takes together, and how many such blocks of all heads at once at most


def attention(ops: Operations, x: Slot, shape: Attention, hidden: int) -> Slot:
    kernel = kernel_of(shape, ops.setting)
    q, k, v = _project(ops, x, shape, hidden, by_head=kernel in ("eager", "math"))
    if shape.qk_norm and shape.qk_norm_kind == "gemma":
        q, k = _norm(ops, q, shape, shape.heads), _norm(ops, k, shape, shape.kv_heads)
    if shape.rotary:
        if ops.setting.liger:
            by_head = kernel in ("eager", "math")
            q, k = (_rotate_by_liger(ops, each, shape, by_head=by_head) for each in (q, k))
        else:
            q, k = _rotate(ops, q, k, shape)
    if ops.setting.parts > 1:
        context = _exchange(ops, q, k, v, shape, KERNELS[kernel])
    else:
        context = KERNELS[kernel](ops, q, k, v, shape)
    out = ops.linear(context, ops.find(*OUTPUT), hidden, shape.heads * shape.head_dim)
    ops.tape.hold(q, k, v, *ops.local)
    return out


def _exchange(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention, kernel: AttentionCall) -> Slot:
    """Ulysses: ranks that share sequences turn all heads of their tokens into their heads of all tokens, and back
    (`train/ulysses.py`). What is sent is put in order first; what arrives lies as attention wants it, and its output is
    put in order once more. Fused kernels hand back gradients that can be sent as they lie."""
    parts = ops.setting.parts
    own = replace(shape, heads=shape.heads // parts, kv_heads=max(shape.kv_heads // parts, 1))
    inner = Operations(replace(ops.setting, parts=1), ops.tensors, ops.tape)
    lies = kernel not in (_eager, _math)
    wide, narrow = (inner.size(heads * shape.head_dim) for heads in (own.heads, own.kv_heads))
    sent = [
        ops.tape.op((each,), size, access="parts", forward_temp=size, backward_temp=0 if lies else size)
        for each, size in ((q, wide), (k, narrow), (v, narrow))
    ]
    context = kernel(inner, sent[0], sent[1], sent[2], own)
    return ops.tape.op((context,), q.size, access="parts", forward_temp=q.size, backward_temp=q.size)


def exchanged_bytes(shape: Attention, setting: Setting) -> int:
    """What a rank sends in one pass through the layer."""
    features = (2 * shape.heads + 2 * max(shape.kv_heads, setting.parts)) * shape.head_dim
    return setting.tokens * features * setting.width * (setting.parts - 1) // setting.parts


def kernel_of(shape: Attention, setting: Setting) -> Kernel:
    """What really runs. `sdpa` is a choice between PyTorch's kernels, each with its own conditions (ATen's
    `sdp_utils.cpp`), of which the first that can run is taken.

    cuDNN's takes heads of at most 256, grouped ones and a mask too, but no dropout other than by sixteenths, and comes
    first on the cards for which PyTorch prefers it. The flash kernel takes such heads, but no mask. The
    memory-efficient one takes any head and a mask, but no grouped heads: transformers repeats these only where there is
    a mask or the heads are too wide, so that other grouped heads end in plain matrix products, as everything does where
    no fused kernel can run.
    """
    if setting.attention == "eager" or (shape.softcap and setting.attention == "sdpa"):
        return "eager"
    if setting.attention == "flash":
        return "flash"
    if setting.prefers_cudnn and shape.head_dim <= WIDEST_FUSED_HEAD and not shape.dropout:
        return "cudnn"
    repeats = _repeats(shape, setting)
    if setting.flash_capable and not repeats:
        return "flash"
    return "efficient" if setting.fused_capable and (repeats or shape.kv_heads == shape.heads) else "math"


def is_masked(shape: Attention, setting: Setting) -> bool:
    """Whether PyTorch's kernels are given a mask, under which they compute what it hides as well. A window needs one as
    soon as the sequence is as long (transformers does not look whether it hides anything), and so do packed documents
    and padding; causality alone does not. The flash package is told of all of these."""
    windowed = shape.sliding_window is not None and setting.sequence >= shape.sliding_window
    return setting.attention != "flash" and (setting.packed or setting.padded or windowed)


def computed_keys(shape: Attention, setting: Setting) -> float:
    """With how many keys each query is computed, on average. A kernel that is told of causality or a window skips what
    they hide; under a mask, and in matrix products, every score is computed and then hidden. Documents of a packed
    sequence are of unknown length: where the kernel knows their borders, this is the most."""
    if is_masked(shape, setting) or kernel_of(shape, setting) in ("eager", "math"):
        return setting.sequence
    window = min(shape.sliding_window or setting.sequence, setting.sequence)
    return window - window**2 / (2 * setting.sequence)  # the first positions have fewer than a window before them


def _repeats(shape: Attention, setting: Setting) -> bool:
    """Whether transformers repeats grouped heads itself (`use_gqa_in_sdpa`)."""
    return is_masked(shape, setting) or shape.head_dim > WIDEST_FUSED_HEAD


def mask_bytes(shape: Attention, setting: Setting) -> int:
    """The mask that the model makes once a pass and hands to every layer of this kind. `sdpa` takes a boolean one,
    whose sequences share their storage (`expand` in `sdpa_mask`) unless each has borders of its own; eager attention
    adds a mask, so that it is written out for every sequence (`eager_mask`)."""
    kernel, pairs = kernel_of(shape, setting), setting.sequence * setting.sequence
    if kernel == "eager":
        return setting.micro_batch * pairs * setting.width
    own = setting.micro_batch if setting.packed or setting.padded else 1
    return own * pairs * BOOL if kernel in ("cudnn", "efficient", "math") and is_masked(shape, setting) else 0


def _project(ops: Operations, x: Slot, shape: Attention, hidden: int, *, by_head: bool) -> tuple[Slot, Slot, Slot]:
    # The fused attention kernels' own gradients come in token order, and Liger's rotary embedding leaves or brings them
    # there; but its norms over heads leave them head by head.
    copied = by_head or shape.rotary
    if ops.setting.liger and shape.rotary:
        copied = shape.qk_norm and shape.qk_norm_kind == "gemma"
    if shape.fused_qkv:
        return _project_fused(ops, x, shape, hidden, copies=(copied, copied, by_head))

    def project(name: str, heads: int, copies: bool, norms: bool) -> Slot:
        made = ops.tape.view(ops.linear(x, f"self_attn.{name}", heads * shape.head_dim, hidden), copies_grad=copies)
        return _norm(ops, made, shape, heads) if norms else made

    norms = shape.qk_norm and shape.qk_norm_kind != "gemma"
    q, k = project("q_proj", shape.heads, copied, norms), project("k_proj", shape.kv_heads, copied, norms)
    return q, k, project("v_proj", shape.kv_heads, by_head, False)


def _project_fused(
    ops: Operations, x: Slot, shape: Attention, hidden: int, *, copies: tuple[bool, bool, bool]
) -> tuple[Slot, Slot, Slot]:
    """Three views of one storage: whoever keeps one of them keeps it all."""
    tape, module = ops.tape, ops.find(*FUSED)
    q_features, kv_features = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    fused = ops.linear(x, module, q_features + 2 * kv_features, hidden)
    sizes = (ops.size(q_features), ops.size(kv_features), ops.size(kv_features))
    if module == SLICED:
        # Slices: each gradient is laid into zeros of the whole, and these are added up.
        parts: tuple[Slot, ...] = tuple([tape.view(fused, size=size, copies_grad=True) for size in sizes])
    elif shape.rotary:
        # gpt_neox splits head by head, and turns the joined gradient back into token order.
        parts = tape.split(tape.view(fused, copies_grad=True), sizes)
        return parts[0], parts[1], parts[2]
    else:
        parts = tape.split(fused, sizes)
    q, k, v = (tape.view(part, copies_grad=copy) for part, copy in zip(parts, copies, strict=True))
    return q, k, v


def _norm(ops: Operations, x: Slot, shape: Attention, heads: int) -> Slot:
    if shape.qk_norm_whole:  # Liger leaves these as they are, in a model that is there already
        return ops.norm_by_torch(x, shape.head_dim * heads, shape.qk_norm_kind)
    normed = ops.norm(x, shape.head_dim, shape.qk_norm_kind, rows=heads, copies=shape.qk_norm_kind == "gemma")
    # a LayerNorm a head (stablelm), then put together again
    return ops.tape.op((normed,), normed.size) if shape.qk_norm_kind == "layer" else normed


def _rotate_by_liger(ops: Operations, x: Slot, shape: Attention, *, by_head: bool) -> Slot:
    """`LigerRopeFunction` changes x in place, and later its gradient; both in token order, for which parts of a fused
    projection, heads that a norm has laid out and gradients of plain products are copied."""
    if shape.fused_qkv or (shape.qk_norm and shape.qk_norm_kind == "gemma"):
        return ops.tape.op((x,), x.size, passes=not by_head, fused=True)
    return ops.tape.view(x, copies_grad=by_head, fused=True)


def _rotate(ops: Operations, q: Slot, k: Slot, shape: Attention) -> tuple[Slot, Slot]:
    turned = _rotate_one(ops, q, shape), _rotate_one(ops, k, shape)
    if _joins(ops, shape):  # cat with the part that is not rotated, maybe empty; its gradient is laid into zeros
        turned = (
            ops.tape.op((turned[0], q), q.size, access="parts"),
            ops.tape.op((turned[1], k), k.size, access="parts"),
        )
    elif shape.rotary_fp32:
        turned = ops.tape.op((turned[0],), q.size, access="cast"), ops.tape.op((turned[1],), k.size, access="cast")
    ops.tape.hold(q, k)
    if _joins(ops, shape) and not shape.fused_qkv:
        ops.local += (q, k)  # stablelm has variables for the parts
    return turned


def _rotate_one(ops: Operations, x: Slot, shape: Attention) -> Slot:
    """x·cos + rotate_half(x)·sin. cos and sin are the model's; x itself is not kept."""
    part = x.size if shape.rotary_dim is None else x.size * shape.rotary_dim // shape.head_dim
    if shape.rotary_fp32:
        part = part * FP32 // ops.setting.width
    # Forwards two products, a negated half, a join and a sum; backwards two halves that are laid into zeros and added.
    moves: dict[str, Any] = {"access": "parts", "again": 4 * part, "again_back": 9 * part}
    return ops.tape.op((x,), part, forward_temp=2 * part, backward_temp=2 * part, **moves)


def _joins(ops: Operations, shape: Attention) -> bool:
    """Families that may rotate a part of each head put it together with the rest, even where that is empty. Liger's
    rotary embedding does not."""
    return shape.rotary and not ops.setting.liger and (shape.rotary_dim is not None or shape.fused_qkv)


def _flash(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """Flash attention, torch's own or the package's. Its backward accumulates dq and a row sum more in whole blocks
    (`mha_bwd`); the CPU's does not."""
    rows, wide = ops.setting.sequence, shape.head_dim
    if ops.setting.on_gpu:
        multiple = 32 if wide <= HEAD_BLOCKS[-1] else 64
        rows, wide = -(-rows // QUERY_BLOCK) * QUERY_BLOCK, -(-wide // multiple) * multiple
    return _fused(ops, q, k, v, shape, ops.setting.micro_batch * rows * shape.heads * (wide + 1) * FP32)


def _cudnn(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """cuDNN's kernel holds what flash does, in no blocks. A boolean mask becomes an additive one, made for this call
    and kept; transformers repeats grouped heads then."""
    setting = ops.setting
    temp = ops.size(shape.heads * (shape.head_dim + 1), FP32)
    if not is_masked(shape, setting):
        return _fused(ops, q, k, v, shape, temp)
    key, value = _repeat(ops, k, shape), _repeat(ops, v, shape)
    mask = setting.micro_batch * setting.sequence * setting.sequence * setting.width
    context = _fused(ops, q, key, value, shape, temp, mask)
    ops.tape.hold(key, value)
    return context


def _fused(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention, accumulated: int, mask: int = 0) -> Slot:
    """Keeps q, k, v, the output, which is laid out as q, and the row sums. The backward accumulates dq in fp32; with
    grouped heads dk and dv are first written for every head."""
    sums = ops.size(shape.heads, FP32)
    temp = accumulated + (2 * q.size if k.size != q.size else 0)
    qkv, makes = (q, k, v), (sums, mask) if mask else (sums,)
    facts: dict[str, Any] = {"backward_temp": temp, "product": True, "part": "mixer"}
    context = ops.tape.op(qkv, q.size, saves=qkv, saves_output=True, makes=makes, **facts)
    return _token_order(ops, context, shape)


def _efficient(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """PyTorch's memory-efficient kernel, on heads that transformers has repeated. The mask is as for cuDNN's, its rows
    padded; the output comes in token order, whatever the query's."""
    setting = ops.setting
    key, value = _repeat(ops, k, shape), _repeat(ops, v, shape)
    padded = -(-setting.sequence // SUM_ALIGNMENT) * SUM_ALIGNMENT
    sums = setting.micro_batch * shape.heads * padded * FP32
    rows = -(-setting.sequence // MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = setting.micro_batch * setting.sequence * rows * setting.width
    # The backward accumulates dq in fp32, over whole blocks of a head. Of heads wider than a block it accumulates dk
    # and dv too, for the keys that are computed at once; and the forward accumulates their output.
    block = next((width for width in HEAD_BLOCKS if shape.head_dim <= width), shape.head_dim)
    temp, widened = sums + ops.size(shape.heads * block, FP32), 0
    if block not in HEAD_BLOCKS:
        all_heads = setting.micro_batch * shape.heads
        at_once = min(max(MOST_BLOCKS // all_heads, 1), -(-setting.sequence // KEY_BLOCK))
        temp += 2 * all_heads * at_once * KEY_BLOCK * shape.head_dim * FP32
        widened = ops.size(shape.heads * shape.head_dim, FP32) if setting.width < FP32 else 0
    makes = (sums, mask) if is_masked(shape, setting) else (sums,)
    qkv = q, key, value
    facts: dict[str, Any] = {"forward_temp": widened, "backward_temp": temp, "product": True, "part": "mixer"}
    context = ops.tape.op(qkv, q.size, saves=qkv, saves_output=True, makes=makes, **facts)
    ops.tape.hold(key, value)
    return context


def _math(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """PyTorch's fallback: matrix products in fp32, with the whole score matrix. The mask is made for this call, and not
    kept; grouped heads are repeated by it, in fp32, unless transformers has done so."""
    tape, setting = ops.tape, ops.setting
    features, pairs = shape.heads * shape.head_dim, shape.heads * setting.sequence
    narrow, mask = shape.kv_heads * shape.head_dim, setting.sequence * setting.sequence * FP32
    given = k, v
    if _repeats(shape, setting):
        k, v, narrow = _repeat(ops, k, shape), _repeat(ops, v, shape), features
    if is_masked(shape, setting):
        mask = setting.micro_batch * setting.sequence * setting.sequence * setting.width
    q32, k32, v32 = ops.cast(q, features, FP32), ops.cast(k, narrow, FP32), ops.cast(v, narrow, FP32)
    whole = ops.times_constant(q32)
    key, value = k32, v32
    if narrow != features:
        key, value = _repeat(ops, k32, shape), _repeat(ops, v32, shape)
    scaled = ops.times_constant(key)
    repeated = shape.kv_heads != shape.heads  # which lays it out head by head
    query = whole if _joins(ops, shape) else _by_head(ops, whole)
    keys = scaled if repeated or _joins(ops, shape) else _by_head(ops, scaled)
    values = value if repeated else _by_head(ops, value)
    scores = tape.op((query, keys), ops.size(pairs, FP32), saves=(query, keys), forward_temp=mask, part="mixer")
    weights = ops.softmax(scores, shape.heads, ops.size(pairs, BOOL))  # it looks for rows that are hidden whole
    returned = ops.cast(weights, pairs, setting.width)  # beside the output, though nobody takes it
    mixed = tape.op((weights, values), ops.size(features, FP32), saves=(weights, values), part="mixer")
    context = ops.cast(mixed, features, setting.width)
    tape.hold(q32, k32, v32, whole, key, value, weights, returned, *given)
    return tape.op((context,), q.size)


def _token_order(ops: Operations, context: Slot, shape: Attention) -> Slot:
    """transpose(1, 2).contiguous(): a copy only where the query was contiguous head by head."""
    return ops.tape.op((context,), context.size, access="parts") if _joins(ops, shape) else context


def _repeat(ops: Operations, x: Slot, shape: Attention) -> Slot:
    """repeat_kv: a copy for every head; nothing where each query head has its own."""
    if shape.kv_heads == shape.heads:
        return x
    return ops.tape.op((x,), x.size * shape.heads // shape.kv_heads, access="parts")


def _eager(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """Hugging Face's eager attention: the whole score matrix, its fp32 softmax and that cast back. Its products want
    (batch · heads, …): with more than one sequence, what is not laid out so is copied."""
    tape, setting = ops.tape, ops.setting
    pairs = shape.heads * setting.sequence
    repeated = key, value = _repeat(ops, k, shape), _repeat(ops, v, shape)
    query = q if _joins(ops, shape) else _by_head(ops, q)
    key = key if key is not k or _joins(ops, shape) else _by_head(ops, key)
    scores = tape.op((query, key), ops.size(pairs), saves=(query, key), part="mixer")
    scores = ops.times_constant(scores)
    if shape.softcap:
        scores = ops.times_constant(ops.output_saving(ops.times_constant(scores)))
    scores = ops.plus_constant(scores)  # the mask
    if "attn.c_attn.weight" in ops.tensors:  # gpt2 stays in the working precision
        weights = ops.softmax(scores, shape.heads)
    else:
        softmax = ops.softmax(ops.cast(scores, pairs, FP32), shape.heads)
        tape.hold(scores)
        weights = ops.cast(softmax, pairs, setting.width)
    if shape.dropout:
        weights = ops.dropout(weights)
    value = value if value is not v else _by_head(ops, value)
    mixed = tape.op((weights, value), q.size, saves=(weights, value), part="mixer")
    ops.returned.append(weights)
    context = tape.op((mixed,), q.size)  # transpose(1, 2).contiguous()
    tape.hold(*repeated)
    return context


def _by_head(ops: Operations, x: Slot) -> Slot:
    return x if ops.setting.micro_batch == 1 else ops.tape.op((x,), x.size, access="parts")


KERNELS: Mapping[Kernel, AttentionCall] = {
    "flash": _flash,
    "cudnn": _cudnn,
    "efficient": _efficient,
    "math": _math,
    "eager": _eager,
}
