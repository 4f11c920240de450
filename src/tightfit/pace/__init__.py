"""How long a training step takes, by cause: pure arithmetic on a shape, levers and hardware.

A step is passes over micro batches, then the optimizer. In each pass three things run beside each other: the
GPU computes, the host launches what the GPU will compute, and collectives move shards. The pass takes as long
as the slowest of them, and what runs beside the computation still costs it something. The
optimizer's step waits for a norm in its middle, so there the host's time and the GPU's add up.

`rates.py` holds every constant with its source, `work.py` what a layer computes, `engines.py` what each
engine adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tightfit.memory.activations import setting_of
from tightfit.pace import engines
from tightfit.pace.engines import Passes, Traffic
from tightfit.pace.rates import CHECKPOINTED_LAYER_S, HEAD_OPERATIONS, OPERATION_S, Rates, assumptions, rates_of
from tightfit.pace.work import head_time, layer_time
from tightfit.types import Cause, Checkpointing, Gpu, Hardware, Levers, ModelShape, Pace

__all__ = ["pace", "step_times"]


def pace(shape: ModelShape, levers: Levers, hardware: Hardware, *, rehearsal: bool = False) -> Pace:
    """Seconds of one optimizer step, and tokens a second of all GPUs together.

    `rehearsal`: one rank alone poses as one of many: nothing is communicated, and the host is not shared.
    """
    rates = rates_of(hardware.gpu, levers.precision)
    passes = _passes(shape, levers, rates, hardware.gpu)
    traffic = engines.traffic(shape, levers, hardware, rehearsal=rehearsal)
    causes = _Causes()
    causes.forward(passes, traffic, levers.accumulation)
    causes.backward(passes, traffic, levers.accumulation)
    causes.step(engines.step(shape, levers, hardware, rates, rehearsal=rehearsal), traffic)
    step_s = sum(causes.seconds.values())
    tokens = levers.micro_batch * levers.accumulation * levers.sequence * hardware.world
    return Pace(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        causes=causes.ordered(),
        because=assumptions(hardware, levers),
    )


def step_times(shape: ModelShape, levers: Levers, hardware: Hardware) -> list[float]:
    """`pace(...).step_s` for every depth of checkpointing, from none of the layers to all, at the price of one.

    Layer inputs stay on the GPU, whatever `levers.checkpointing` says.
    """
    rates = rates_of(hardware.gpu, levers.precision)
    none = replace(levers, checkpointing=Checkpointing(layers=0))
    passes = _passes(shape, none, rates, hardware.gpu)
    traffic = engines.traffic(shape, none, hardware, rehearsal=False)
    step = engines.step(shape, levers, hardware, rates, rehearsal=False)
    times, micro_batches = [], levers.accumulation
    fixed = sum(step) + traffic.updated + micro_batches * passes.forward_s(traffic)
    fixed += traffic.reductions(micro_batches) * traffic.to_host
    if not traffic.overlaps:
        fixed += traffic.reductions(micro_batches) * traffic.reduced
    setting, frozen = setting_of(levers, hardware.gpu), _frozen(levers)
    layers = [layer_time(block, shape.hidden_size, setting, rates) for block in shape.blocks]
    gpu, host = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
    each = traffic.host / shape.n_layers
    again = [
        (
            layer.products + layer.traffic + layer.unpacking,
            layer.host + CHECKPOINTED_LAYER_S + engines.hooks(levers, layer.modules),
        )
        for layer in layers
    ]
    waited = traffic.waited_back(micro_batches)
    for depth in range(shape.n_layers + 1):
        if depth > 0:
            host += each
        if depth > frozen:
            gpu_again, host_again = again[shape.pattern[depth - 1]]
            gpu += gpu_again
            host += host_again
        busy = gpu if gpu > host else host
        times.append(fixed + micro_batches * busy + waited(busy))
    return times


@dataclass(slots=True)
class _Causes:
    """The seconds of a step, put down cause by cause."""

    seconds: dict[Cause, float] = field(default_factory=dict)

    def add(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def forward(self, passes: Passes, traffic: Traffic, times: int) -> None:
        self.add("arithmetic", times * passes.products)
        self.add("memory traffic", times * (passes.traffic + traffic.copied))
        self.add("dequantisation", times * passes.unpacking)
        busy = self._busy(times, passes.forward_gpu + traffic.copied, passes.host + traffic.host)
        collectives, host_link = traffic.waiting(busy)
        self._waited(times * collectives, times * host_link)
        self.add("host link", times * traffic.kept_out)

    def backward(self, passes: Passes, traffic: Traffic, times: int) -> None:
        self.add("arithmetic", times * passes.products_back)
        self.add("memory traffic", times * (passes.traffic_back + traffic.copied_back))
        self.add("dequantisation", times * passes.unpacking_back)
        self.add("recomputation", times * passes.recomputed)
        busy = self._busy(times, passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back)
        self._waited(*traffic.waiting_back(busy, times))
        self.add("host link", times * traffic.kept_out + traffic.reductions(times) * traffic.to_host)
        if not traffic.overlaps:
            self.add("communication", traffic.reductions(times) * traffic.reduced)

    def _busy(self, times: int, gpu: float, host: float) -> float:
        """What the host takes longer than the GPU is launch overhead."""
        self.add("launch overhead", times * (host - gpu))
        return max(gpu, host)

    def _waited(self, collectives: float, host_link: float) -> None:
        self.add("communication", collectives)
        self.add("host link", host_link)

    def step(self, step: engines.Step, traffic: Traffic) -> None:
        self.add("optimizer", step.gpu)
        self.add("launch overhead", step.host)
        self.add("host optimizer", step.host_optimizer)
        self.add("host link", step.link)
        self.add("communication", traffic.updated)

    def ordered(self) -> Mapping[Cause, float]:
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))


def _passes(shape: ModelShape, levers: Levers, rates: Rates, gpu: Gpu) -> Passes:
    """All layers and the head, for one micro batch."""
    setting = setting_of(levers, gpu)
    again = levers.checkpointing.layers
    counts, recomputed, backed = _counts(shape, shape.n_layers if again is None else again, _frozen(levers))
    head = head_time(shape, setting, rates, levers.loss == "fused", setting.trains_head(tied=shape.tied))
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
    return Passes(
        products=products,
        traffic=traffic,
        unpacking=unpacking,
        host=host + engines.hooks(levers, modules),
        products_back=products_back,
        traffic_back=traffic_back,
        unpacking_back=unpacking_back,
        recomputed=again_s,
        host_back=host_back + engines.hooks(levers, modules_back),
    )


def _frozen(levers: Levers) -> int:
    return levers.frozen_layers if levers.method == "full" else 0


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
