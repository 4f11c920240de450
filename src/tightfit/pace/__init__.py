"""How long a training step takes, by cause: pure arithmetic on a shape, levers and hardware.

A step is passes over micro batches, then the optimizer. In each pass three things run beside each other: the
GPU computes, the host launches what the GPU will compute, and collectives move shards. The pass takes as long
as the slowest of them, and what runs beside the computation still costs it something. The
optimizer's step waits for a norm in its middle, so there the host's time and the GPU's add up.

`rates.py` holds every constant with its source, `work.py` what a layer computes, `passes.py` all layers together,
`engines.py` what each engine adds. `clock.py` has the times of many ways at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.pace import engines
from tightfit.pace.clock import Clock, KernelChoice
from tightfit.pace.engines import PassTimes, Traffic
from tightfit.pace.passes import passes_of
from tightfit.pace.rates import assumptions, rates_of
from tightfit.types import Cause, Hardware, Levers, ModelShape, Pace

__all__ = ["Clock", "KernelChoice", "pace", "step_times"]


def pace(shape: ModelShape, levers: Levers, hardware: Hardware, *, rehearsal: bool = False) -> Pace:
    """Seconds of one optimizer step, and tokens a second of all GPUs together.

    `rehearsal`: one rank alone poses as one of many: nothing is communicated, and the host is not shared.
    """
    rates = rates_of(hardware.gpu, levers.precision)
    again = levers.checkpointing.layers
    recomputing = shape.n_layers if again is None else again
    passes = passes_of(shape, levers, hardware.gpu, rates, recomputing=recomputing)
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
    """`pace(...).step_s` for every depth of checkpointing: see `Clock`, which has it for many ways at once."""
    choice = KernelChoice(levers.attention, levers.scan, levers.buckets)
    return Clock(shape, levers, hardware).times(levers, choice)


@dataclass(slots=True)
class _Causes:
    """The seconds of a step, put down cause by cause."""

    seconds: dict[Cause, float] = field(default_factory=dict)

    def add(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def forward(self, passes: PassTimes, traffic: Traffic, times: int) -> None:
        self.add("arithmetic", times * passes.products)
        self.add("memory traffic", times * (passes.traffic + traffic.copied))
        self.add("dequantisation", times * passes.unpacking)
        busy = self._busy(times, passes.forward_gpu + traffic.copied, passes.host + traffic.host)
        collectives, host_link = traffic.waiting(busy)
        self._waited(times * collectives, times * host_link)
        self.add("host link", times * traffic.kept_out)

    def backward(self, passes: PassTimes, traffic: Traffic, times: int) -> None:
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

    def step(self, step: engines.StepTime, traffic: Traffic) -> None:
        self.add("optimizer", step.gpu)
        self.add("launch overhead", step.host)
        self.add("host optimizer", step.host_optimizer)
        self.add("host link", step.link)
        self.add("communication", traffic.updated)

    def ordered(self) -> Mapping[Cause, float]:
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))
