"""Step times of many ways at once, as a search asks for them: at every depth of checkpointing.

The ways of one strategy differ in micro batch, loss, kernels and buckets. What the computation takes does not depend
on the buckets, and what is communicated depends on nothing else, so each is worked out once and only their meeting is
priced for every way.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.pace import engines
from tightfit.pace.engines import PassTimes, Traffic
from tightfit.pace.rates import CHECKPOINTED_LAYER_S, rates_of
from tightfit.pace.work import frozen_of, layer_time, least_products_s, passes_of
from tightfit.types import AttentionKernel, Buckets, Checkpointing, Hardware, Levers, ModelShape, Scan

Computed = tuple[int, str, str, str]
"""What decides the computation within a strategy: micro batch, loss, attention, scan."""


class KernelChoice(NamedTuple):
    """The kernels and the buckets, of levers that have all the rest."""

    attention: AttentionKernel
    scan: Scan
    buckets: Buckets

    def over(self, rest: Levers) -> Levers:
        return replace(rest, attention=self.attention, scan=self.scan, buckets=self.buckets)


class Clock:
    """Of ways that differ from `strategy` in micro batch, accumulation, loss, kernels and buckets alone."""

    def __init__(self, shape: ModelShape, strategy: Levers, hardware: Hardware) -> None:
        self.shape, self.hardware = shape, hardware
        self.strategy = replace(strategy, checkpointing=Checkpointing(layers=0))
        self.rates = rates_of(hardware, strategy.precision)
        self.step_s = sum(engines.step(shape, strategy, hardware, self.rates, rehearsal=False))
        self._traffic: dict[Buckets, Traffic] = {}
        self._passes: dict[Computed, PassTimes] = {}
        self._back: dict[tuple[Computed, float, float, float], tuple[list[float], list[float]]] = {}

    def times(self, rest: Levers, choice: KernelChoice) -> list[float]:
        """`pace(...).step_s` for every depth of checkpointing, from none of the layers to all.

        Layer inputs stay on the GPU, whatever `rest.checkpointing` says.
        """
        computed = _computing_key(rest, choice)
        passes = self._passes.get(computed) or self._passes_of(rest, choice)
        traffic = self._traffic.get(choice.buckets) or self._traffic_of(choice.buckets)
        micro_batches = rest.accumulation
        fixed = self.step_s + traffic.updated + micro_batches * passes.forward_s(traffic)
        fixed += traffic.reductions(micro_batches) * traffic.to_host
        if not traffic.overlaps:
            fixed += traffic.reductions(micro_batches) * traffic.reduced
        moved = traffic.copied, traffic.copied_back, traffic.host
        busy, net = self._back.get((computed, *moved)) or self._backward(rest, choice)
        waited = traffic.waited_back(micro_batches)
        hidden = bisect_right(busy, traffic.hidden_s)  # a deeper pass is longer
        most = waited(busy[-1])
        times = [fixed + micro_batches * net[depth] + waited(busy[depth]) for depth in range(hidden)]
        return times + [fixed + micro_batches * seconds + most for seconds in net[hidden:]]

    def least_s(self, sequences: int) -> float:
        """So many sequences take no less on one GPU, in whatever micro batches; rounded down a little, since it is
        compared with what was summed up otherwise."""
        setting = setting_of(replace(self.strategy, micro_batch=sequences), self.hardware.gpu)
        return least_products_s(self.shape, setting, self.rates.card, frozen_of(self.strategy)) * (1 - 1e-9)

    def own_s(self, rest: Levers, choice: KernelChoice) -> float:
        """What the GPU itself computes and moves in a step in which nothing recomputes."""
        passes, traffic, times = self._passes_of(rest, choice), self._traffic_of(choice.buckets), rest.accumulation
        arithmetic = times * passes.products + times * passes.products_back
        moved = times * (passes.traffic + traffic.copied) + times * (passes.traffic_back + traffic.copied_back)
        return arithmetic + moved + (times * passes.unpacking + times * passes.unpacking_back)

    def _traffic_of(self, buckets: Buckets) -> Traffic:
        if buckets not in self._traffic:
            asked = replace(self.strategy, buckets=buckets)
            self._traffic[buckets] = engines.traffic(self.shape, asked, self.hardware, self.rates, rehearsal=False)
        return self._traffic[buckets]

    def _passes_of(self, rest: Levers, choice: KernelChoice) -> PassTimes:
        """Nothing recomputes."""
        key = _computing_key(rest, choice)
        if key not in self._passes:
            levers = choice.over(rest)
            self._passes[key] = passes_of(self.shape, levers, self.hardware.gpu, self.rates, recomputing=0)
        return self._passes[key]

    def _backward(self, rest: Levers, choice: KernelChoice) -> tuple[list[float], list[float]]:
        """Seconds of one backward pass at every depth, those of the GPU or of the host, whichever takes longer; and the
        same less what launches are ahead."""
        passes, traffic, levers = self._passes_of(rest, choice), self._traffic_of(choice.buckets), choice.over(rest)
        shape, frozen = self.shape, frozen_of(levers)
        setting = setting_of(levers, self.hardware.gpu)
        layers = [layer_time(block, shape.hidden_size, setting, self.rates.card) for block in shape.blocks]
        again = [
            (
                passes.throttle * layer.products + layer.traffic + layer.unpacking,
                self.rates.launch * (layer.host + CHECKPOINTED_LAYER_S + engines.hooks(levers, layer.modules)),
            )
            for layer in layers
        ]
        gpu, host = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
        each, lead = traffic.host / shape.n_layers, passes.lead(traffic)
        busy, net = [max(gpu, host)], [max(gpu, host - lead)]
        for index, kind in enumerate(shape.pattern):
            host += each
            if index >= frozen:
                gpu += again[kind][0]
                host += again[kind][1]
            busy.append(gpu if gpu > host else host)
            net.append(gpu if gpu > host - lead else host - lead)
        self._back[_computing_key(rest, choice), traffic.copied, traffic.copied_back, traffic.host] = busy, net
        return busy, net


def _computing_key(rest: Levers, choice: KernelChoice) -> Computed:
    return rest.micro_batch, rest.loss, choice.attention, choice.scan
