"""Layers that several ranks share (tensor parallel, `train/tensor.py`): what each of them has of a model, and the ends
of its part of a layer on a tape.

Inside attention and MLP a rank has some heads and some of the intermediate width, for all tokens; outside it has some
of the tokens, with all that belongs to them. The projections that read the residual stream are cut by rows, those that
write it by columns, so that a rank's output is a sum's term for each token: on the way in tokens are gathered, on the
way out terms are added up and scattered. All else of a model is used whole: norms, embedding, head, and of an adapter
the half that has the width of the residual stream. Of that too a rank holds a part alone between uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tightfit.inputs.layouts import cut_dimension
from tightfit.memory.operations import Operations, Setting
from tightfit.memory.tape import Slot
from tightfit.memory.weights import is_adapted
from tightfit.types import Attention, Block, Lora, Mlp, Tensor

ENDS = 4  # gathers and scatters of one pass through a layer: on both sides of attention and of the MLP


@lru_cache(maxsize=256)
def cut_block(block: Block, ranks: int) -> Block:
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mixer, Attention):
        mixer = replace(mixer, heads=mixer.heads // ranks, kv_heads=max(mixer.kv_heads // ranks, 1))
    if isinstance(mlp, Mlp):
        mlp = replace(mlp, intermediate=-(-mlp.intermediate // ranks))
    return replace(block, mixer=mixer, mlp=mlp, tensors=tuple([_cut(each, ranks) for each in block.tensors]))


def _cut(tensor: Tensor, ranks: int) -> Tensor:
    dimension = cut_dimension(tensor)
    if dimension is None:
        return tensor
    numbers = list(tensor.shape)
    numbers[dimension] = -(-numbers[dimension] // ranks)
    return Tensor(tensor.name, tuple(numbers))


class Uncut(NamedTuple):
    """Elements of a layer that each rank uses whole, though it may hold a part of them."""

    base: int
    adapters: int  # those that read the residual stream or write it, as the projection that they adapt does


@lru_cache(maxsize=256)
def count_uncut(block: Block, lora: Lora | None) -> Uncut:
    base = sum([tensor.numel for tensor in block.tensors if cut_dimension(tensor) is None])
    adapted = [tensor for tensor in block.tensors if lora is not None and is_adapted(tensor, lora)]
    widths = [tensor.shape[1 - (cut_dimension(tensor) or 0)] for tensor in adapted]
    return Uncut(base, sum(widths) * (lora.rank if lora else 0))


def inside_of(setting: Setting) -> Setting:
    """Where a rank has all tokens of its rows."""
    return setting if setting.tensor == 1 else replace(setting, tensor=1)


def run_inside(
    ops: Operations, x: Slot, block: Block, hidden: int, inner: Callable[[Operations, Slot, Block, int], Slot]
) -> Slot:
    """`inner`: attention or the MLP, whose last projection leaves each rank the sums of its own tokens."""
    setting = ops.setting
    if setting.tensor == 1:
        return inner(ops, x, block, hidden)
    own = cut_block(block, setting.tensor)
    tensors = {tensor.name: tensor for tensor in own.tensors}
    inside = Operations(inside_of(setting), tensors, ops.tape, ops.returned, ranks=setting.tensor)
    gathered = inside.send(x, inside.size(hidden))
    out = inner(inside, gathered, own, hidden)
    ops.tape.hold(x, gathered)
    return out


def exchanged_bytes(hidden: int, setting: Setting) -> int:
    """What a rank sends in one pass through a layer."""
    return ENDS * setting.tokens * hidden * setting.width * (setting.tensor - 1)
