"""Softmax attention on a tape: projections, rotary embedding, the kernel."""

from __future__ import annotations

from tightfit.memory.operations import FP32, Operations
from tightfit.memory.tape import Slot
from tightfit.types import Attention

FUSED = ("self_attn.qkv_proj", "attn.c_attn", "attention.query_key_value")
OUTPUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attn.dense")


def attention(ops: Operations, x: Slot, shape: Attention, hidden: int) -> Slot:
    q_features, kv_features = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.fused_qkv:
        fused = ops.linear(x, ops.find(*FUSED), q_features + 2 * kv_features, hidden)
        q, k, v = _split(ops, fused, q_features, kv_features, rotary=shape.rotary)
    else:
        q = ops.linear(x, "self_attn.q_proj", q_features, hidden)
        k = ops.linear(x, "self_attn.k_proj", kv_features, hidden)
        v = ops.linear(x, "self_attn.v_proj", kv_features, hidden)
    if shape.qk_norm:
        q, k = _norm_heads(ops, q, k, shape)
    if shape.rotary:
        q, k = _rotate(ops, q, q_features), _rotate(ops, k, kv_features)
    if shape.softcap or ops.setting.attention == "eager":
        context = _eager(ops, q, k, v, shape)
    else:
        context = _kernel(ops, q, k, v, shape)
    return ops.linear(context, ops.find(*OUTPUT), hidden, q_features)


def _split(ops: Operations, fused: Slot, q_features: int, kv_features: int, *, rotary: bool) -> tuple[Slot, Slot, Slot]:
    """Three views of one storage. Whoever keeps one of them keeps it all; their gradients are joined anew."""
    del q_features, kv_features, rotary, ops
    return fused, fused, fused


def _norm_heads(ops: Operations, q: Slot, k: Slot, shape: Attention) -> tuple[Slot, Slot]:
    kind = "gemma" if shape.qk_norm == "gemma" else "rms"
    return (
        ops.norm(q, shape.head_dim, kind, rows=shape.heads),
        ops.norm(k, shape.head_dim, kind, rows=shape.kv_heads),
    )


def _rotate(ops: Operations, x: Slot, features: int) -> Slot:
    """x·cos + rotate_half(x)·sin. cos and sin are the model's; x itself is not kept."""
    size = ops.size(features)
    return ops.tape.op((x,), size, forward_temp=2 * size, backward_temp=2 * size, grad_sizes=(size,))


def _kernel(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """Flash attention, torch's own or the package's: keeps q, k, v, its output and the row sums."""
    size = ops.size(shape.heads * shape.head_dim)
    sums = ops.size(shape.heads, FP32)
    # The backward accumulates dq in fp32; with grouped heads dk and dv are first written for every head.
    accumulator = ops.size(shape.heads * shape.head_dim, FP32) + sums
    expanded = 2 * size if shape.kv_heads != shape.heads else 0
    return ops.tape.op(
        (q, k, v), size, saves=(q, k, v), saves_output=True, makes=(sums,), backward_temp=accumulator + expanded,
        grad_sizes=(size, *(2 * [ops.size(shape.kv_heads * shape.head_dim)])),
    )


def _eager(ops: Operations, q: Slot, k: Slot, v: Slot, shape: Attention) -> Slot:
    """Hugging Face's eager attention: the whole score matrix, its fp32 softmax and that cast back."""
    size = ops.size(shape.heads * shape.head_dim)
    if shape.kv_heads != shape.heads:
        k, v = ops.tape.op((k,), size), ops.tape.op((v,), size)  # repeat_kv
    setting = ops.setting
    pairs = shape.heads * setting.sequence
    scores = ops.tape.op((q, k), ops.size(pairs), saves=(q, k))
    scaled = ops.tape.op((scores,), ops.size(pairs))
    if shape.softcap:
        scaled = ops.tape.op((scaled,), ops.size(pairs), saves_output=True, forward_temp=2 * ops.size(pairs))
        scaled = ops.tape.op((scaled,), ops.size(pairs))
    masked = ops.add(scaled, Slot(0, False), size=ops.size(pairs))
    softmax = ops.tape.op((masked,), ops.size(pairs, FP32), saves_output=True, backward_temp=ops.size(pairs, FP32))
    weights = ops.cast(softmax, pairs, setting.width)
    mixed = ops.tape.op((weights, v), size, saves=(weights, v))
    return ops.tape.op((mixed,), size)  # transpose(1, 2).contiguous()
