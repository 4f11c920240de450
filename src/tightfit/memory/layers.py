"""One layer of a model as a tape, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from tightfit.memory.attention import attention
from tightfit.memory.compiled import KeptBytes, measure_graph, measure_kept
from tightfit.memory.feedforward import adapts_experts, mlp, moe
from tightfit.memory.mamba2 import mamba2
from tightfit.memory.operations import FP32, Operations, Setting
from tightfit.memory.selected import measure_parts
from tightfit.memory.shared_layers import run_inside
from tightfit.memory.ssm import mamba1
from tightfit.memory.tape import LayerCost, Slot, Tape, measure
from tightfit.types import Attention, Block, Mamba1, Mamba2, Mlp, Moe, Traced

Inner = Callable[[Operations, Slot, Block, int], Slot]
MIXERS: Mapping[type, Callable[..., Slot]] = {Attention: attention, Mamba1: mamba1, Mamba2: mamba2}


@lru_cache(maxsize=1024)
def layer_cost(block: Block, hidden: int, setting: Setting, input_grad: bool = True) -> LayerCost:
    """`input_grad`: something below trains, so that the gradient goes on. Without it the layer's first norm, say,
    keeps nothing."""
    if isinstance(block.mixer, Traced):
        return _cost_of_trace(block, block.mixer, hidden, setting)
    ends = layer_tape(block, hidden, setting, input_grad)
    if setting.compiled:
        return measure_graph(*ends)
    return measure(*ends, stops=not setting.reentrant)


@lru_cache(maxsize=1024)
def recompute_cost(
    block: Block, hidden: int, setting: Setting, select: tuple[str, ...], input_grad: bool = True
) -> LayerCost:
    """The same where these parts of it run again, or with none, all of it; which is what a layer does whose parts are
    not known. What it keeps is counted beside its input."""
    known = has_parts(block, setting)
    if setting.compiled and not isinstance(block.mixer, Traced):
        return measure_graph(*layer_tape(block, hidden, setting, input_grad), select if known else ())
    if known and select:
        return measure_parts(*layer_tape(block, hidden, setting, input_grad), select)
    return replace(layer_cost(block, hidden, setting, input_grad), saved=0)


@lru_cache(maxsize=1024)
def kept_bytes(
    block: Block, hidden: int, setting: Setting, select: tuple[str, ...] | None, input_grad: bool = True
) -> KeptBytes:
    """What these two say that a layer keeps. `select`: None: nothing of it runs again."""
    if setting.compiled and not isinstance(block.mixer, Traced):
        known = select is None or has_parts(block, setting)
        return measure_kept(*layer_tape(block, hidden, setting, input_grad), select if known else ())
    made = block, hidden, setting
    cost = layer_cost(*made, input_grad) if select is None else recompute_cost(*made, select, input_grad)
    return KeptBytes(cost.saved, cost.small)


def has_parts(block: Block, setting: Setting) -> bool:
    """Whether each of its matrices belongs to a part: not in an unknown layer, where its MLP is tiled, nor where
    adapters are added to the stacked matrices of experts (`has_parts` in train/recompute.py)."""
    experts = isinstance(block.mlp, Moe) and adapts_experts(block.mlp, setting)
    return not isinstance(block.mixer, Traced) and not experts and not setting.tiled


@lru_cache(maxsize=48)
def layer_tape(block: Block, hidden: int, setting: Setting, input_grad: bool) -> tuple[Tape, Slot, Slot]:
    """The operations of one layer, its input and its output. Both memory and time are read from it, one soon after the
    other."""
    x = Slot(layer_input_bytes(block, hidden, setting), input_grad)
    added = block.arrangement in ("post", "sandwich")
    ops = Operations(setting, {tensor.name: tensor for tensor in block.tensors}, adds_norms=added)
    if block.arrangement == "single":  # x + mixer(norm(x))
        # An fp32 residual is cast to working precision, and by the norm back again, which inductor leaves out
        # (`pointless_convert`).
        read = ops.norm(x if setting.compiled else ops.cast(x, hidden, setting.width), hidden, block.norm)
        out = ops.add(x, _mixer(ops, read, block, hidden))
    elif block.arrangement == "parallel":
        out = _parallel(ops, x, block, hidden)
    else:
        out = _branch(ops, _branch(ops, x, block, hidden, _mixer), block, hidden, _feedforward)
    ops.tape.hold(*ops.returned)
    return ops.tape, x, out


def keeps_input(block: Block, hidden: int, setting: Setting) -> bool:
    """Whether what a layer reads is among what it keeps where nothing of it recomputes."""
    if isinstance(block.mixer, Traced):
        return False
    tape, x, _ = layer_tape(block, hidden, setting, True)
    return setting.compiled or any(slot is x for op in tape.ops for slot in op.saves)


def layer_input_bytes(block: Block, hidden: int, setting: Setting) -> int:
    """What a layer reads, and what checkpointing keeps of it: one residual stream. The first layer of a model with an
    fp32 residual reads the embedding in working precision."""
    return setting.tokens * hidden * (FP32 if block.residual_fp32 else setting.width)


def _cost_of_trace(block: Block, mixer: Traced, hidden: int, setting: Setting) -> LayerCost:
    """A layer that was measured whole: its bytes grow with the tokens, which leaves quadratic attention out."""
    tokens, stream = setting.tokens, layer_input_bytes(block, hidden, setting)
    saved = tokens * mixer.saved_bytes_per_token
    forward = tokens * mixer.forward_bytes_per_token
    backward = tokens * mixer.backward_bytes_per_token
    grads = sum([tensor.numel for tensor in block.tensors]) * setting.width if setting.trains_base else 0
    return LayerCost(
        saved=saved,
        output=stream,
        forward=max(forward, saved + stream),
        forward_unsaved=max(forward - saved, 2 * stream),
        recompute=max(forward, saved),
        backward=max(backward, saved + stream),
        backward_kept=max(backward, saved + stream) + grads,
        weight_grads=grads,
        input_grad=stream,
    )


def _branch(ops: Operations, x: Slot, block: Block, hidden: int, inner: Inner) -> Slot:
    """x + inner(norm(x)), with the norm on the other side, or on both."""
    read = x
    if block.arrangement != "post":
        read = ops.norm(x, hidden, block.norm)
    out = inner(ops, read, block, hidden)
    if block.arrangement in ("post", "sandwich"):
        raw, out = out, ops.norm(out, hidden, block.norm)
        ops.tape.hold(raw)
    if block.dropout:
        out = ops.dropout(out)
    if block.residual_scaled:
        scaled = ops.times_constant(out)
        total = ops.add(x, scaled)
        ops.tape.hold(out)
        return total
    if inner is _mixer:  # gpt2 keeps its output in a variable of its own until the layer ends; stablelm its input too
        if block.norm == "layer" and isinstance(block.mlp, Mlp) and block.mlp.gated:
            ops.returned += (read, out)
        elif "attn.c_attn.weight" in ops.tensors:
            ops.returned.append(out)
    return ops.add(x, out)


def _parallel(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    """mixer(norm(x)) + mlp(norm(x)) + x; the MLP has a norm of its own (gpt_neox) or not (stablelm)."""
    read = ops.norm(x, hidden, block.norm)
    mixed = _mixer(ops, read, block, hidden)
    if "post_attention_layernorm.weight" in ops.tensors:
        read = ops.norm(x, hidden, block.norm)
    fed = _feedforward(ops, read, block, hidden)
    total = ops.add(ops.add(fed, mixed), x)
    ops.tape.hold(fed, mixed)
    return total


def _mixer(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    out = run_inside(ops, x, block, hidden, _mix)
    ops.tape.hold(x)
    return out


def _mix(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    return MIXERS[type(block.mixer)](ops, x, block.mixer, hidden)


def _feedforward(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    return run_inside(ops, x, block, hidden, _feed)


def _feed(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    assert block.mlp is not None, "a layer of this arrangement has an MLP"
    return moe(ops, x, block.mlp, hidden) if isinstance(block.mlp, Moe) else mlp(ops, x, block.mlp, hidden)
