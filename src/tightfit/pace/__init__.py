"""How long a training step takes, by cause: pure arithmetic on a shape, levers and hardware.

A step is passes over micro batches, then the optimizer. In each pass three things run beside each other: the
GPU computes, the host launches what the GPU will compute, and collectives move shards. The pass takes as long
as the slowest of them, and what runs beside the computation still costs it something. The
optimizer's step waits for a norm in its middle, so there the host's time and the GPU's add up.

`rates.py` holds every constant with its source, `work.py` what a layer computes, and all of them together,
`engines.py` what each engine adds. `clock.py` has the times of many ways at once.
"""

from __future__ import annotations

from tightfit.pace import engines
from tightfit.pace.clock import Clock, KernelChoice
from tightfit.pace.rates import assumptions, rates_of
from tightfit.pace.work import passes_of
from tightfit.types import Cause, Hardware, Levers, ModelShape, Pace

__all__ = ["Clock", "KernelChoice", "pace"]


def pace(shape: ModelShape, levers: Levers, hardware: Hardware, *, rehearsal: bool = False) -> Pace:
    """Seconds of one optimizer step, and tokens a second of all GPUs together.

    `rehearsal`: one rank alone poses as one of many: nothing is communicated, and the host is not shared.
    """
    rates = rates_of(hardware.gpu, levers.precision)
    again = levers.checkpointing.layers
    recomputing = shape.n_layers if again is None else again
    passes = passes_of(shape, levers, hardware.gpu, rates, recomputing=recomputing)
    traffic = engines.traffic(shape, levers, hardware, rehearsal=rehearsal)
    step = engines.step(shape, levers, hardware, rates, rehearsal=rehearsal)
    times, reductions = levers.accumulation, traffic.reductions(levers.accumulation)
    gpu, host = passes.forward_gpu + traffic.copied, passes.host + traffic.host
    gpu_back, host_back = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
    collectives, host_link = traffic.waiting(max(gpu, host), traffic.gathered)
    collectives_back, host_link_back = traffic.waiting_back(max(gpu_back, host_back), times)
    # What the host takes longer than the GPU is launch overhead.
    entries: list[tuple[Cause, float]] = [
        ("arithmetic", times * passes.products),
        ("memory traffic", times * (passes.traffic + traffic.copied)),
        ("dequantisation", times * passes.unpacking),
        ("launch overhead", times * (host - gpu)),
        ("communication", times * collectives),
        ("host link", times * host_link),
        ("host link", times * traffic.kept_out),
        ("arithmetic", times * passes.products_back),
        ("memory traffic", times * (passes.traffic_back + traffic.copied_back)),
        ("dequantisation", times * passes.unpacking_back),
        ("recomputation", times * passes.recomputed),
        ("launch overhead", times * (host_back - gpu_back)),
        ("communication", collectives_back),
        ("host link", host_link_back),
        ("host link", times * traffic.kept_out + reductions * traffic.to_host),
        ("communication", 0.0 if traffic.overlaps else reductions * traffic.reduced),
        ("optimizer", step.gpu),
        ("launch overhead", step.host),
        ("host optimizer", step.host_optimizer),
        ("host link", step.link),
        ("communication", traffic.updated),
    ]
    causes: dict[Cause, float] = {}
    for cause, seconds in entries:
        if seconds > 0:
            causes[cause] = causes.get(cause, 0.0) + seconds
    step_s = sum(causes.values())
    tokens = levers.micro_batch * levers.accumulation * levers.sequence * hardware.world
    return Pace(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        causes=dict(sorted(causes.items(), key=lambda item: -item[1])),
        because=assumptions(hardware, levers),
    )
