"""How long compiling takes before the first step, and when rows of a new length first come, where no earlier run left
its code in the cache.

Each kind of layer is compiled once, and all layers of that kind share the code (`train/compile.py`). Those that
recompute are a kind of their own; so are those above them, of which only elementwise work is made again, frozen ones,
and the lowest that trains where its input needs no gradient, as always under adapters. Rows that are not packed are
padded to one of a few lengths, of which each has its code: all are counted, though data of one length meets one alone.

Left out: what evaluation runs, of which the levers do not know whether there is any, and ranks that compile beside each
other on a host with few cores. The seconds are those of one host, beside an H200. Others may be faster, but what a
launch takes there says nothing about their compilers.
"""

from __future__ import annotations

from tightfit.memory.activations import setting_of
from tightfit.memory.layers import has_parts
from tightfit.memory.operations import Setting
from tightfit.memory.weights import is_linear
from tightfit.pace.rates import COMPILE_CODE_S, COMPILE_PRODUCT_S, COMPILE_START_S
from tightfit.pace.work import ELEMENTWISE
from tightfit.types import Levers, ModelShape

HALVINGS, MULTIPLE = 4, 8
"""How often the length of full rows is halved for shorter ones, and what each of these is a multiple of: as in
train/compile.py, which a test holds equal."""


def warm_up_s(shape: ModelShape, levers: Levers) -> float:
    if levers.compile == "off":
        return 0.0
    setting = setting_of(levers)
    lengths = 1 if levers.packed else count_lengths(levers.sequence)
    each = 0.0
    for kind, *_ in _codes(shape, levers, setting):
        modules = [tensor.name.rpartition(".")[0] for tensor in shape.blocks[kind].tensors if is_linear(tensor)]
        each += COMPILE_CODE_S + COMPILE_PRODUCT_S * sum([3 if setting.adapts(module) else 1 for module in modules])
    return COMPILE_START_S + lengths * each


def count_lengths(sequence: int) -> int:
    """To how many lengths rows of up to so many tokens are padded."""
    halves = {-(-(sequence >> times) // MULTIPLE) * MULTIPLE for times in range(1, HALVINGS + 1)}
    return 1 + len([width for width in halves if 0 < width < sequence])


def _codes(shape: ModelShape, levers: Levers, setting: Setting) -> set[tuple[int, tuple[str, ...] | None, bool, bool]]:
    """By kind of layer, what of it recomputes, whether it trains and whether its input has a gradient."""
    depth, frozen = levers.checkpointing, levers.frozen_layers
    lowest = frozen if setting.trains_base else 0

    def select_again(index: int) -> tuple[str, ...] | None:
        """As `inside` in train/recompute.py says it; None: nothing."""
        if depth.layers is None or index < depth.layers:
            return depth.select if has_parts(shape.blocks[shape.pattern[index]], setting) else ()
        return ELEMENTWISE if depth.layers and has_parts(shape.blocks[shape.pattern[index]], setting) else None

    return {
        (kind, select_again(index), index < frozen, index > lowest or setting.trains_embedding)
        for index, kind in enumerate(shape.pattern)
    }
