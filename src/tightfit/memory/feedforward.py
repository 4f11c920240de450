"""The MLP and the mixture of experts on a tape."""

from __future__ import annotations

from tightfit.memory.operations import FP32, Operations
from tightfit.memory.tape import Slot
from tightfit.types import Mlp, Moe

INT64 = 8
UP = ("mlp.up_proj", "mlp.c_fc", "mlp.dense_h_to_4h", "mlp.fc1")
DOWN = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc2")


def mlp(ops: Operations, x: Slot, shape: Mlp, hidden: int, prefix: str = "") -> Slot:
    inner = shape.intermediate
    up, down = tuple(prefix + name for name in UP), tuple(prefix + name for name in DOWN)
    if shape.fused_gate_up:
        gate = up_out = ops.linear(x, "mlp.gate_up_proj", 2 * inner, hidden)
        active = ops.tape.op((gate,), ops.size(inner), saves=(gate,), grad_sizes=(ops.size(inner),))
        product = ops.tape.op(
            (up_out, active), ops.size(inner), saves=(up_out, active), grad_sizes=(2 * ops.size(inner), ops.size(inner))
        )
    elif shape.gated:
        active = ops.activate(ops.linear(x, "mlp.gate_proj", inner, hidden), shape.activation)
        product = ops.multiply(active, ops.linear(x, ops.find(*up), inner, hidden))
    else:
        product = ops.activate(ops.linear(x, ops.find(*up), inner, hidden), shape.activation)
    return ops.linear(product, ops.find(*down), hidden, inner)
