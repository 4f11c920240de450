"""All layers and the head together: the seconds of one micro batch."""

from __future__ import annotations

from functools import lru_cache

from tightfit.memory.activations import setting_of
from tightfit.memory.operations import Setting
from tightfit.pace import engines
from tightfit.pace.engines import PassTimes
from tightfit.pace.rates import CHECKPOINTED_LAYER_S, HEAD_OPERATIONS, OPERATION_S, Rates
from tightfit.pace.work import head_time, layer_time
from tightfit.types import Gpu, Levers, ModelShape


def passes_of(shape: ModelShape, levers: Levers, gpu: Gpu, rates: Rates, *, recomputing: int) -> PassTimes:
    """With the engine's hooks; `recomputing`: the lowest so many layers run twice."""
    plain, modules, modules_back = _plain(
        shape, setting_of(levers, gpu), rates, recomputing, frozen_of(levers), levers.loss == "fused"
    )
    return plain._replace(
        host=plain.host + engines.hooks(levers, modules),
        host_back=plain.host_back + engines.hooks(levers, modules_back),
    )


def frozen_of(levers: Levers) -> int:
    """Layers without a backward pass."""
    return levers.frozen_layers if levers.method == "full" else 0


@lru_cache(maxsize=1024)
def _plain(
    shape: ModelShape, setting: Setting, rates: Rates, recomputing: int, frozen: int, fused: bool
) -> tuple[PassTimes, int, int]:
    """Without hooks, so that all engines share it; and the modules that are called in each pass."""
    counts, recomputed, backed = _counts(shape, recomputing, frozen)
    head = head_time(shape, setting, rates, fused, setting.trains_head(tied=shape.tied))
    products, traffic, products_back, traffic_back, host = head
    unpacking = unpacking_back = again_s = 0.0
    host_back = HEAD_OPERATIONS * OPERATION_S
    modules = modules_back = 3
    for block, count, anew, back in zip(shape.blocks, counts, recomputed, backed, strict=True):
        layer = layer_time(block, shape.hidden_size, setting, rates)
        products += count * layer.products
        traffic += count * layer.traffic
        unpacking += count * layer.unpacking
        host += count * layer.host
        products_back += back * layer.products_back
        traffic_back += back * layer.traffic_back
        unpacking_back += back * layer.unpacking
        again_s += anew * (layer.products + layer.traffic + layer.unpacking)
        host_back += back * layer.host_back + anew * (layer.host + CHECKPOINTED_LAYER_S)
        modules += count * layer.modules
        modules_back += (back + anew) * layer.modules
    passes = PassTimes(
        products=products,
        traffic=traffic,
        unpacking=unpacking,
        host=host,
        products_back=products_back,
        traffic_back=traffic_back,
        unpacking_back=unpacking_back,
        recomputed=again_s,
        host_back=host_back,
    )
    return passes, modules, modules_back


@lru_cache(maxsize=1024)
def _counts(
    shape: ModelShape, recomputing: int, frozen: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of each kind of layer: how many there are, how many run twice, how many have a backward pass."""
    kinds = range(len(shape.blocks))
    all_layers = tuple(shape.pattern.count(kind) for kind in kinds)
    twice = tuple(shape.pattern[frozen:recomputing].count(kind) for kind in kinds)
    back = tuple(shape.pattern[frozen:].count(kind) for kind in kinds)
    return all_layers, twice, back
