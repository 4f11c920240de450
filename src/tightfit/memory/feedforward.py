"""The MLP and the mixture of experts on a tape."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, sqrt

from tightfit.memory.operations import FP32, INT64, Operations, Setting
from tightfit.memory.tape import Part, Slot, measure
from tightfit.types import Mlp, Moe

DOWN = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h")
UP = ("mlp.up_proj", "mlp.c_fc", "mlp.dense_h_to_4h")
BUSIEST_EXPERT = 0.5
"""How many more rows than the mean the busiest expert of a layer gets: an assumption about routers that were trained to
share tokens out (papers on balancing call the number `MaxVio`). Nothing holds a router to it, and a rank that gets more
rows holds more."""


def busiest_load(experts: int, ranks: int) -> float:
    """Rows that the busiest of the ranks gets which share the experts of a layer, over the mean. What experts get too
    much or too little evens out over those of one rank, as of numbers that do not hang on each other."""
    return 1.0 if ranks == 1 else 1 + BUSIEST_EXPERT / sqrt(experts / ranks)


def count_arriving(shape: Moe, tokens: int, ranks: int) -> int:
    """Rows that the busiest rank computes, where each has so many tokens."""
    return ceil(tokens * shape.top_k * busiest_load(shape.experts, ranks))


def tile_tokens(tokens: int, hidden: int) -> int:
    """Of how many tokens the tiles are that an MLP is computed in: equal ones, of at most as many as the layer is wide.
    So much fills any card, and what a tile holds is then no more than a few of the layer's own matrices."""
    return -(-tokens // -(-tokens // hidden))


def mlp(ops: Operations, x: Slot, shape: Mlp, hidden: int) -> Slot:
    inner = shape.intermediate
    if ops.setting.tiled:
        return _add_tiles(ops, x, shape, hidden, tile_tokens(ops.setting.tokens, hidden))
    if shape.fused_gate_up:
        gate_up = ops.linear(x, "mlp.gate_up_proj", 2 * inner, hidden)
        gate, up = ops.tape.split(gate_up, (ops.size(inner), ops.size(inner)))
        if ops.gates_by_liger(shape.activation):
            out = ops.linear(ops.gate_by_liger(gate, up), "mlp.down_proj", hidden, inner)
            ops.tape.hold(x, gate_up)
            return out
        product = ops.multiply(up, ops.activate(gate, shape.activation))
    elif shape.gated:
        return _add_gated_mlp(ops, x, shape.activation, inner, hidden, "mlp")
    else:
        product = ops.activate(ops.linear(x, ops.find(*UP), inner, hidden), shape.activation)
    out = ops.linear(product, ops.find(*DOWN), hidden, inner)
    ops.tape.hold(x)
    return out


def set_tile(setting: Setting, tile: int) -> Setting:
    """That of a tile of so many tokens."""
    return replace(setting, micro_batch=1, sequence=tile, parts=1, tiled=False)


def _add_tiles(ops: Operations, x: Slot, shape: Mlp, hidden: int, tile: int) -> Slot:
    """`train/tiles.py`: one operation that keeps its input. In its backward pass a tile's own two passes run beside the
    gradients of all weights, which are summed up in fp32 and rounded when the last tile is done; a tile reads parts of
    the input and of the output's gradient, and its own output is there until it has gone back."""
    own = Operations(set_tile(ops.setting, tile), ops.tensors)
    read = Slot(own.size(hidden), True)
    cost = measure(own.tape, read, mlp(own, read, shape, hidden))
    kept = read.size if any(read in op.saves for op in own.tape.ops) else 0
    width = ops.setting.width if ops.setting.trains_base else ops.setting.adapter_width
    sums = cost.weight_grads // width * FP32
    since = len(ops.tape.ops)
    out = ops.tape.op(
        (x,),
        x.size,
        saves=(x,),
        forward_temp=cost.forward_unsaved,
        backward_temp=max(cost.forward, cost.backward) - kept + sums - cost.weight_grads,
        weight_grad=cost.weight_grads,
        weight_grads=tuple([grad for grad, _ in reversed(cost.arrivals)]),
    )
    ops.tape.hold(x)
    ops.tape.called("mlp", since)
    return out


def _add_gated_mlp(ops: Operations, x: Slot, activation: str, inner: int, hidden: int, prefix: str) -> Slot:
    gate = ops.linear(x, f"{prefix}.gate_proj", inner, hidden)
    if ops.gates_by_liger(activation):
        product = ops.gate_by_liger(gate, ops.linear(x, f"{prefix}.up_proj", inner, hidden))
    else:
        active = ops.activate(gate, activation)
        product = ops.multiply(active, ops.linear(x, f"{prefix}.up_proj", inner, hidden))
    out = ops.linear(product, f"{prefix}.down_proj", hidden, inner)
    ops.tape.hold(x)
    return out


def moe(ops: Operations, x: Slot, shape: Moe, hidden: int) -> Slot:
    """A router and experts that are computed in one grouped product (transformers' `grouped_mm`)."""
    shared = None
    if shape.shared_intermediate:
        shared = _add_gated_mlp(ops, x, shape.activation, shape.shared_intermediate, hidden, "mlp.shared_expert")
    since = len(ops.tape.ops)
    scores = _route(ops, x, shape, hidden)
    ops.tape.called("mlp.gate", since)
    since = len(ops.tape.ops)
    out = (_share_experts if ops.setting.expert_ranks > 1 else _experts)(ops, x, scores, shape, hidden)
    ops.tape.called("mlp.experts", since)
    if shared is None:
        return out
    gate = ops.output_saving(ops.linear(x, "mlp.shared_expert_gate", 1, hidden))
    gated = ops.tape.op((gate, shared), shared.size, saves=(gate, shared), backward_temp=shared.size)
    total = ops.add(out, gated)
    ops.tape.hold(x, out, gated)
    return total


def adapts_experts(shape: Moe, setting: Setting) -> bool:
    return shape.lora_on_experts and setting.lora_rank > 0 and setting.lora_targets is None


def _merge_adapter(ops: Operations, weights: int, adapters: int, copy_width: int) -> Slot:
    """A parameter with its adapter added: a whole new tensor, since PEFT cannot adapt a bare parameter otherwise. The
    adapter is first cast to the precision in which the two are multiplied."""
    setting = ops.setting
    casts = () if copy_width == setting.adapter_width else (adapters * copy_width,)
    return ops.tape.op((), weights * setting.width, makes=casts, weight_grad=adapters * setting.adapter_width)


def _route(ops: Operations, x: Slot, shape: Moe, hidden: int) -> Slot:
    """The weights of the chosen experts. The router is a bare matrix, not a linear layer."""
    tape, setting = ops.tape, ops.setting
    if adapts_experts(shape, ops.setting):
        merged = _merge_adapter(ops, shape.experts * hidden, setting.lora_rank * (shape.experts + hidden), FP32)
        logits = tape.op((x, merged), ops.size(shape.experts), saves=(x, merged), part="mlp")
    else:
        saves = (x,) if setting.trains_base else ()
        grad = ops.grad(shape.experts * hidden)
        logits = tape.op((x,), ops.size(shape.experts), saves=saves, weight_grad=grad, part="mlp")
    probabilities = ops.softmax(ops.cast(logits, shape.experts, FP32), 1)
    chosen = tape.op((probabilities,), ops.size(shape.top_k, FP32), makes=(ops.size(shape.top_k, INT64),))
    if not shape.scores_fp32:
        return ops.cast(chosen, shape.top_k, setting.width)
    # divided in place by their sum, for which autograd keeps the sum and a copy of what was there
    total = tape.op((chosen,), ops.size(1, FP32))
    return tape.op((chosen, total), chosen.size, saves=(total,), makes=(chosen.size,))


def _experts(ops: Operations, x: Slot, scores: Slot, shape: Moe, hidden: int) -> Slot:
    """Every token stands once for each of its experts, sorted by expert."""
    tape, setting = ops.tape, ops.setting
    inner, rows = shape.intermediate, shape.top_k
    index = ops.size(rows, INT64)
    order = tape.op((), 2 * index)  # sorted expert numbers, and where each came from; variables both
    gathered = tape.op((x,), ops.size(rows * hidden), makes=(index,), access="parts")
    weights = tape.op((scores,), scores.size, makes=(index,))
    gate_up = _multiply_experts(ops, gathered, shape, (2 * inner, hidden), 2 * setting.lora_rank, "mlp")
    gate, up = tape.split(gate_up, (ops.size(rows * inner), ops.size(rows * inner)))
    product = ops.multiply(ops.activate(gate, shape.activation), up)
    down = _multiply_experts(ops, product, shape, (hidden, inner), setting.lora_rank, "down")
    width = FP32 if shape.scores_fp32 else setting.width
    wide = ops.size(rows * hidden, width)
    saves = (down, weights) if weights.grad else (weights,)
    made = (2 if weights.grad else 1) * wide - down.size
    weighted = tape.op((down, weights), wide, saves=saves, backward_temp=made)
    restored = tape.op((weighted,), wide, makes=(index,), access="parts")
    summed = tape.op((restored,), ops.size(hidden, width), passes=rows == 1)
    out = ops.cast(summed, hidden, setting.width)
    tape.hold(x, scores, order, gathered, weights, down)
    return out


def _share_experts(ops: Operations, x: Slot, scores: Slot, shape: Moe, hidden: int) -> Slot:
    """Rows travel to the ranks that own their experts and back, and are weighted where they came from
    (`train/experts.py`). To an owner they are tokens with one expert each, of weight one."""
    tape, setting, rows = ops.tape, ops.setting, shape.top_k
    index, wide = ops.size(rows, INT64), ops.size(rows * hidden, FP32 if shape.scores_fp32 else setting.width)
    ranks = setting.expert_ranks
    there = ops.of_rows(count_arriving(shape, setting.tokens, ranks))
    order = tape.op((), index, forward_temp=index)
    numbers = tape.op((), there.size(1, INT64))  # of the owner's experts
    sent = tape.op((x,), ops.size(rows * hidden), makes=(index,), access="parts")
    arrived = tape.op((sent,), there.size(hidden), access="sent")
    ones = tape.op((), there.size(1))
    own = replace(shape, experts=shape.experts // ranks, top_k=1, scores_fp32=False)
    made = _experts(there, arrived, ones, own, hidden)
    back = tape.op((made,), ops.size(rows * hidden), access="sent")
    weights = tape.op((scores,), scores.size, saves=(order,))
    weighted = tape.op((back, weights), wide, saves=(back, weights), backward_temp=2 * wide - back.size)
    restored = tape.op((weighted,), wide, makes=(index,), access="parts")
    out = ops.cast(tape.op((restored,), wide // rows), hidden, setting.width)
    tape.hold(x, scores, order, numbers, weights, back)
    return out


def _multiply_experts(ops: Operations, x: Slot, shape: Moe, features: tuple[int, int], rank: int, part: Part) -> Slot:
    """One product for all experts. Where they are adapted, gate and up together have twice the rank."""
    setting, (out_features, in_features) = ops.setting, features
    rows, weights = ops.size(shape.top_k * out_features), shape.experts * out_features * in_features
    if adapts_experts(shape, ops.setting):
        adapters = shape.experts * rank * (out_features + in_features)
        merged = _merge_adapter(ops, weights, adapters, setting.width)
        return ops.tape.op((x, merged), rows, saves=(x, merged), part=part)
    saves = (x,) if setting.trains_base else ()
    return ops.tape.op((x,), rows, saves=saves, weight_grad=ops.grad(weights), product=True, part=part)
