"""One layer of a model as a tape, and its cost."""

from __future__ import annotations

from functools import lru_cache

from tightfit.memory.attention import attention
from tightfit.memory.feedforward import mlp
from tightfit.memory.operations import FP32, Operations, Setting
from tightfit.memory.ssm import mamba1
from tightfit.memory.tape import LayerCost, Slot, measure
from tightfit.types import Attention, Block, Mamba1, Mamba2, Mlp, Moe, Traced


@lru_cache(maxsize=4096)
def layer_cost(block: Block, hidden: int, setting: Setting) -> LayerCost:
    ops = Operations(setting, {tensor.name: tensor for tensor in block.tensors})
    x = Slot(layer_input_bytes(block, hidden, setting), True)
    return measure(ops.tape, x, _layer(ops, x, block, hidden))


def layer_input_bytes(block: Block, hidden: int, setting: Setting) -> int:
    """What a layer reads, and what checkpointing keeps of it: one residual stream.

    The first layer of a model with an fp32 residual reads the embedding in working precision.
    """
    return setting.tokens * hidden * (FP32 if block.residual_fp32 else setting.width)


def _layer(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    def norm(slot: Slot) -> Slot:
        return ops.norm(slot, hidden, block.norm)

    if block.arrangement == "single":
        return _single(ops, x, block, hidden)
    if block.arrangement == "parallel":
        mixed = _mixer(ops, norm(x), block, hidden)
        return ops.add(ops.add(_feedforward(ops, norm(x), block, hidden), mixed), x)
    if block.arrangement == "post":
        h = ops.add(x, norm(_mixer(ops, x, block, hidden)))
        return ops.add(h, norm(_feedforward(ops, h, block, hidden)))
    mixed = _mixer(ops, norm(x), block, hidden)
    if block.arrangement == "sandwich":
        mixed = norm(mixed)
    h = ops.add(x, mixed)
    out = _feedforward(ops, norm(h), block, hidden)
    if block.arrangement == "sandwich":
        out = norm(out)
    return ops.add(h, out)


def _single(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    """residual + mixer(norm(x)); an fp32 residual is cast to working precision before the norm."""
    mixed = _mixer(ops, ops.norm(ops.cast(x, hidden, ops.setting.width), hidden, block.norm), block, hidden)
    if mixed.size < x.size:
        mixed = ops.tape.view(mixed, size=x.size, copies_grad=True)  # promoted while adding
    return ops.add(x, mixed)


def _mixer(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    if isinstance(block.mixer, Mamba1):
        return mamba1(ops, x, block.mixer, hidden)
    assert isinstance(block.mixer, Attention)
    return attention(ops, x, block.mixer, hidden)


def _feedforward(ops: Operations, x: Slot, block: Block, hidden: int) -> Slot:
    assert isinstance(block.mlp, Mlp)
    return mlp(ops, x, block.mlp, hidden)
