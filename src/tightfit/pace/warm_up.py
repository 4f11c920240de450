"""How long compiling takes before the first step, where no earlier run has left its code in the cache.

Each kind of layer is compiled once, and all layers of that kind share the code; those that recompute are a kind of
their own, and so is the lowest layer under adapters, whose input needs no gradient.
"""

from __future__ import annotations

from tightfit.memory.activations import setting_of
from tightfit.memory.operations import Setting
from tightfit.memory.weights import is_linear
from tightfit.pace.rates import COMPILE_CODE_S, COMPILE_PRODUCT_S, COMPILE_START_S
from tightfit.types import Block, Levers, ModelShape


def warm_up_s(shape: ModelShape, levers: Levers, launch: float) -> float:
    """`launch`: host seconds over those of the measured host."""
    if levers.compile == "off":
        return 0.0
    again = shape.n_layers if levers.checkpointing.layers is None else levers.checkpointing.layers
    codes = {(kind, index < again, index < levers.frozen_layers) for index, kind in enumerate(shape.pattern)}
    kinds = [kind for kind, _, _ in codes]
    if levers.method != "full" and not again:
        kinds.append(shape.pattern[0])
    setting = setting_of(levers)
    return launch * (COMPILE_START_S + sum(_code_s(shape.blocks[kind], setting) for kind in kinds))


def _code_s(block: Block, setting: Setting) -> float:
    modules = [tensor.name.rpartition(".")[0] for tensor in block.tensors if is_linear(tensor)]
    return COMPILE_CODE_S + COMPILE_PRODUCT_S * sum(3 if setting.adapts(module) else 1 for module in modules)
