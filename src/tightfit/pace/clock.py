"""Step times of many ways, as a search asks for them: at whatever depths of checkpointing it has to know.

The ways of one strategy differ in micro batch, loss, kernels, buckets, and in what of a layer recomputes. What the
computation takes does not depend on the buckets, and what is communicated depends on nothing else, so each is worked
out once, for compiled layers and for others, and only their meeting is priced for every way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, overload

from tightfit.memory.activations import sent_by, setting_of
from tightfit.memory.operations import Setting
from tightfit.memory.pipeline import count_depths, lay_out
from tightfit.pace import engines
from tightfit.pace.engines import PassTimes, Traffic
from tightfit.pace.pipeline import RowTime, find_waits, hand_over_each_s
from tightfit.pace.rates import rates_of, with_exchange
from tightfit.pace.work import ELEMENTWISE, Again, frozen_of, layer_time, least_products_s, passes_of, recompute_time
from tightfit.types import AttentionKernel, Buckets, Checkpointing, Compile, Hardware, Levers, ModelShape, Scan

TIE_S = 2e-9  # two times that may round to the same, whatever the order in which they were summed up

Computed = tuple[int, str, str, str, str, str, str]
"""What decides the computation within a strategy: micro batch, loss, attention, scan, compile, kernels, MLP."""


class KernelChoice(NamedTuple):
    """The kernels and the buckets, of levers that have all the rest."""

    attention: AttentionKernel
    scan: Scan
    buckets: Buckets

    def over(self, rest: Levers) -> Levers:
        return rest.change(attention=self.attention, scan=self.scan, buckets=self.buckets)


class Times(Sequence[float]):
    """The seconds of a step at each of some depths, worked out when they are first asked for: of most ways a search
    wants to know one or two."""

    def __init__(self, depths: Sequence[int], seconds: Callable[[int], float]) -> None:
        """`seconds`: by how many layers recompute."""
        self.depths, self._seconds, self._known = depths, seconds, dict[int, float]()

    def __len__(self) -> int:
        return len(self.depths)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> list[float]: ...

    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        depth = self.depths[index]
        if depth not in self._known:
            self._known[depth] = self._seconds(depth)
        return self._known[depth]

    def at(self, depths: Sequence[int]) -> Times:
        """The same at fewer depths."""
        return Times(depths, self._seconds)


class _Pass(NamedTuple):
    """Seconds of one backward pass."""

    busy: float  # of the GPU or of the host, whichever takes longer
    net: float  # the same less what launches are ahead
    idle: float  # of that, what the GPU waits

    @classmethod
    def of(cls, gpu: float, host: float, lead: float) -> _Pass:
        behind = host - lead
        return cls(gpu if gpu > host else host, gpu if gpu > behind else behind, 0.0 if gpu > behind else behind - gpu)


_Backward = list[_Pass]
"""Backward passes by how many layers recompute."""


class Clock:
    """Of ways that differ from `strategy` in micro batch, accumulation, loss, kernels and buckets alone."""

    def __init__(self, shape: ModelShape, strategy: Levers, hardware: Hardware) -> None:
        self.shape, self.hardware = shape, hardware
        self.strategy = replace(strategy, checkpointing=Checkpointing(layers=0))
        self.rates = with_exchange(rates_of(hardware, strategy.precision), hardware, strategy)
        self.step_s = sum(engines.step(shape, strategy, hardware, self.rates, rehearsal=False))
        self._traffic: dict[tuple[Buckets, Compile], Traffic] = {}
        self._passes: dict[Computed, PassTimes] = {}
        self._bounds: dict[Computed, float] = {}
        self._back: dict[_BackKey, _Backward] = {}
        self._settings: dict[tuple[Computed, bool], Setting] = {}

    def times(self, rest: Levers, choice: KernelChoice) -> Times:
        """`pace(...).step_s` at any depth of checkpointing, from none of the layers to all, each with the parts that
        `rest.checkpointing` selects, and what compiled layers keep on the host if it says so. Inputs of other layers
        stay on the GPU, whatever it says.
        """
        passes, traffic = self._passes_of(rest, choice), self._traffic_of(rest, choice)
        micro_batches = rest.accumulation
        fixed = self.step_s + traffic.updated + traffic.reductions(micro_batches) * traffic.to_host
        if not traffic.overlaps:
            fixed += traffic.reductions(micro_batches) * traffic.reduced
        bare, more = self._bare_of(passes, traffic), micro_batches - 1 if traffic.added else 0
        waited = traffic.price_waiting(traffic.rounds_back(micro_batches))
        backward: _Backward | None = None

        def backward_at(layers: int) -> _Pass:
            nonlocal backward
            if not layers:
                return bare
            if backward is None:
                moved = traffic.copied, traffic.copied_back, traffic.host
                key = computing_key(rest, choice), rest.checkpointing.select, *moved
                backward = self._back.get(key) or self._backward(rest, choice, key)
            return backward[layers]

        if rest.checkpointing.offload and rest.compile == "layers":
            kept = sent_by(self.shape, self._setting_of(rest, choice), rest.frozen_layers, rest.checkpointing.select)
            forward = passes.busy(traffic)
            waited_before = traffic.price_waiting([(micro_batches, traffic.gathered)])
            fixed += micro_batches * forward

            def seconds(layers: int) -> float:
                back, sent = backward_at(layers), kept[layers] / self.rates.host_link
                waits = waited_before(forward, sent) + waited(back.busy, sent)
                return fixed + waits + micro_batches * back.net + more * max(0.0, traffic.added - back.idle)

        else:
            fixed += micro_batches * passes.forward_s(traffic)

            def seconds(layers: int) -> float:
                back = backward_at(layers)
                waits = waited(back.busy, 0.0)
                return fixed + waits + micro_batches * back.net + more * max(0.0, traffic.added - back.idle)

        return Times(range(self.shape.n_layers + 1), seconds)

    def least_s(self, sequences: int) -> float:
        """So many sequences take no less on one GPU, in whatever micro batches; rounded down a little, since it is
        compared with what was summed up otherwise."""
        setting = setting_of(replace(self.strategy, micro_batch=sequences), self.hardware.gpu, self.shape.model_type)
        return least_products_s(self.shape, setting, self.rates.card, frozen_of(self.strategy)) * (1 - 1e-9)

    def bound_s(self, rest: Levers, choice: KernelChoice) -> float:
        """No depth takes less: what the GPU computes when nothing recomputes, a little less as above."""
        key = computing_key(rest, choice)
        if key not in self._bounds:
            passes = self._passes_of(rest, choice)
            busy = passes.forward_gpu + passes.back_gpu
            self._bounds[key] = (self.step_s + rest.accumulation * busy) * (1 - 1e-9)
        return self._bounds[key]

    def own_s(self, rest: Levers, choice: KernelChoice) -> float:
        """What the GPU itself computes and moves in a step in which nothing recomputes."""
        passes, traffic, times = self._passes_of(rest, choice), self._traffic_of(rest, choice), rest.accumulation
        arithmetic = times * passes.products + times * passes.products_back
        moved = times * (passes.traffic + traffic.copied) + times * (passes.traffic_back + traffic.copied_back)
        return arithmetic + moved + (times * passes.unpacking + times * passes.unpacking_back)

    def _traffic_of(self, rest: Levers, choice: KernelChoice) -> Traffic:
        key = choice.buckets, rest.compile
        if key not in self._traffic:
            asked = replace(self.strategy, buckets=choice.buckets, compile=rest.compile)
            self._traffic[key] = engines.traffic(self.shape, asked, self.hardware, self.rates, rehearsal=False)
        return self._traffic[key]

    def _setting_of(self, rest: Levers, choice: KernelChoice) -> Setting:
        """Of its parts only whether any are selected decides: then Liger's kernels do not run."""
        key = computing_key(rest, choice), bool(rest.checkpointing.select)
        if key not in self._settings:
            self._settings[key] = setting_of(choice.over(rest), self.hardware.gpu, self.shape.model_type)
        return self._settings[key]

    def _passes_of(self, rest: Levers, choice: KernelChoice) -> PassTimes:
        """Nothing recomputes."""
        key = computing_key(rest, choice)
        if key not in self._passes:
            levers = choice.over(rest)
            self._passes[key] = passes_of(self.shape, levers, self.hardware.gpu, self.rates, recomputing=0)
        return self._passes[key]

    def _bare_of(self, passes: PassTimes, traffic: Traffic) -> _Pass:
        gpu, host = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
        return _Pass.of(gpu, host, passes.lead(traffic))

    def _backward(self, rest: Levers, choice: KernelChoice, key: _BackKey) -> _Backward:
        passes, traffic = self._passes_of(rest, choice), self._traffic_of(rest, choice)
        shape, frozen, setting = self.shape, frozen_of(rest), self._setting_of(rest, choice)
        layers = [layer_time(block, shape.hidden_size, setting, self.rates.card) for block in shape.blocks]
        gpu, host = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
        each, lead = 0.0 if engines.gathers_once(rest) else traffic.host / shape.n_layers, passes.lead(traffic)
        found = [self._bare_of(passes, traffic)]
        again: list[tuple[float, float]] = []
        for kind, layer in enumerate(layers):
            once, light = recompute_time(layer, rest.checkpointing.select), Again(0.0, 0.0, 0.0)
            if layer.lightens:
                light, count = recompute_time(layer, ELEMENTWISE), shape.pattern[frozen:].count(kind)
                gpu += count * light.others
                host += count * self.rates.launch * light.host
            again.append(
                (
                    passes.throttle * once.products + once.others - light.others,
                    self.rates.launch * (once.host - light.host + engines.hooks(rest, layer.modules)),
                )
            )
        for index, kind in enumerate(shape.pattern):
            host += each
            if index >= frozen:
                gpu += again[kind][0]
                host += again[kind][1]
            found.append(_Pass.of(gpu, host, lead))
        self._back[key] = found
        return found


class RowClock:
    """The same of a pipeline, each of whose GPUs has a clock of its own."""

    def __init__(self, shape: ModelShape, strategy: Levers, hardware: Hardware) -> None:
        self.shape, self.hardware, self.row = shape, hardware, lay_out(shape, strategy)
        self.clocks = [Clock(gpu.shape, gpu.levers(strategy), hardware) for gpu in self.row]

    def bound_s(self, rest: Levers, choice: KernelChoice) -> float:
        """No depth takes less: what the GPU at the beginning computes when nothing recomputes."""
        return self.clocks[0].bound_s(rest.change(frozen_layers=self.row[0].frozen), choice)

    def times(self, rest: Levers, choice: KernelChoice) -> Times:
        """By how many layers of each stage recompute, from none to all of the longest."""
        each = [
            clock.times(rest.change(frozen_layers=gpu.frozen), choice)
            for gpu, clock in zip(self.row, self.clocks, strict=True)
        ]
        levers = choice.over(rest)
        each_s = hand_over_each_s(self.shape, levers, self.hardware, self.clocks[0].rates)

        def seconds(depth: int) -> float:
            times = [
                RowTime(gpu.place, own[gpu.count_recomputing(depth)], clock.step_s, gpu.alike)
                for own, clock, gpu in zip(each, self.clocks, self.row, strict=True)
            ]
            return find_waits(levers, each_s, times).sum(times)

        return Times(range(count_depths(self.shape, rest) + 1), seconds)


def clock_of(shape: ModelShape, strategy: Levers, hardware: Hardware) -> Clock | RowClock:
    return (Clock if strategy.pipeline_parallel == 1 else RowClock)(shape, strategy, hardware)


def computing_key(rest: Levers, choice: KernelChoice) -> Computed:
    return rest.micro_batch, rest.loss, choice.attention, choice.scan, rest.compile, rest.kernels, rest.mlp


_BackKey = tuple[Computed, tuple[str, ...], float, float, float]
