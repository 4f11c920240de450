"""How long a training step takes, by cause: pure arithmetic on a shape, levers and hardware.

A step is passes over micro batches, then the optimizer. In each pass three things run beside each other: the
GPU computes, the host launches what the GPU will compute, and collectives move shards. The pass takes as long
as the slowest of them, and what runs beside the computation still costs it something; launches that are ahead of the
GPU at the end of the forward pass are ahead in the backward pass too. The optimizer's step waits for a norm in its
middle, so there the host's time and the GPU's add up.

Each rate may be off by its spread (`rates.py`); a pace tells what each of them leaves open, and its range is all of it
together.

`rates.py` holds every constant with its source, `work.py` what a layer computes, and all of them together, `graph.py`
what a compiled one moves, `engines.py` what each engine adds; of the streaming one, whose layers come from the host in
turn, `stream.py` has the whole step. `clock.py` has the times of many ways at once, and
`warm_up.py` what compiling takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot

from tightfit.memory import estimate
from tightfit.memory.activations import setting_of
from tightfit.memory.pipeline import PipelineGpu, Stage, lay_out
from tightfit.pace import engines, stream
from tightfit.pace.clock import TIE_S, Clock, KernelChoice, RowClock, clock_of
from tightfit.pace.pipeline import RowTime, find_waits, hand_over_each_s
from tightfit.pace.rates import (
    Known,
    Rates,
    assumptions,
    find_model_spread,
    know_rates,
    rates_of,
    slow_down,
    with_exchange,
)
from tightfit.pace.warm_up import warm_up_s
from tightfit.pace.work import exchange_s, passes_of
from tightfit.types import Cause, Hardware, Levers, ModelShape, Pace, RateUsed

__all__ = ["TIE_S", "Clock", "KernelChoice", "RowClock", "RowTime", "clock_of", "pace", "step_seconds", "time_row"]

LEAST_OPEN = 0.002
"""A rate that leaves less than this share of a step open is not reported."""


def pace(
    shape: ModelShape, levers: Levers, hardware: Hardware, *, rehearsal: bool = False, ranged: bool = True
) -> Pace:
    """Seconds of one optimizer step, and tokens a second of all GPUs together, with their range.

    `rehearsal`: one rank alone poses as one of many, in a pipeline as the one that holds most: nothing is communicated,
    and the host is not shared. `ranged`: without its range and rates it takes a tenth of the time.
    """
    rates, known = know_rates(hardware, levers.precision, rehearsal=rehearsal)
    causes = _causes(shape, levers, hardware, rates, rehearsal=rehearsal)
    step_s = sum(causes.values())
    used: dict[str, RateUsed] = {}
    for name in _list_that_matter(known, levers, hardware) if ranged else ():
        each = known[name]
        slower = slow_down(rates, name, 1 + each.spread)
        open_s = sum(_causes(shape, levers, hardware, slower, rehearsal=rehearsal).values()) - step_s
        if open_s > LEAST_OPEN * step_s:
            used[name] = RateUsed(value=each.value, source=each.source, spread=each.spread, open_s=open_s, on=each.on)
    # Rates are off independently of each other, and so is the model.
    apart = hypot(find_model_spread(hardware), *[each.open_s / step_s for each in used.values()])
    tokens = levers.micro_batch * levers.accumulation * levers.sequence * levers.data_ranks(hardware.world)
    return Pace(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        causes=causes,
        low_s=step_s / (1 + apart) if ranged else 0.0,
        high_s=step_s * (1 + apart) if ranged else 0.0,
        rates=dict(sorted(used.items(), key=lambda item: -item[1].open_s)),
        because=assumptions(hardware, levers),
        warm_up_s=warm_up_s(shape, levers),
    )


def _list_that_matter(known: Mapping[str, Known], levers: Levers, hardware: Hardware) -> list[str]:
    """The rates that a step can depend on, less those that it does not as can be seen without pricing it once more."""
    matters = {
        "link": hardware.world > 1,
        "network": hardware.nodes > 1,
        "nvme": "nvme" in (levers.offload_optimizer, levers.offload_param),
        "host_optimizer": levers.steps_on_host,
        "unpacking": levers.method == "qlora",
    }
    return [name for name in known if matters.get(name, True)]


def step_seconds(shape: ModelShape, levers: Levers, hardware: Hardware) -> float:
    """`pace(...).step_s` alone, for a search."""
    return sum(_causes(shape, levers, hardware, rates_of(hardware, levers.precision), rehearsal=False).values())


def _causes(
    shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool
) -> dict[Cause, float]:
    """Seconds of a step by cause, the longest first."""
    causes: dict[Cause, float] = {}
    if levers.streams:
        entries = stream.list_causes(shape, levers, hardware, rates, rehearsal=rehearsal)
    elif levers.pipeline_parallel == 1:
        entries = _list_causes(shape, levers, hardware, rates, rehearsal=rehearsal)
    elif rehearsal:
        fullest = estimate(shape, levers, hardware.world, hardware).pipeline_gpu
        gpu = next(gpu for gpu in lay_out(shape, levers) if gpu.place == fullest)
        entries = _list_causes(gpu.shape, gpu.levers(levers), hardware, rates, rehearsal=True)
    else:
        row = lay_out(shape, levers)
        each = [_list_causes(gpu.shape, gpu.levers(levers), hardware, rates, rehearsal=False) for gpu in row]
        waits = find_waits(
            levers,
            hand_over_each_s(shape, levers, hardware, rates),
            _time_row(row, levers, hardware, rates, each),
        )
        entries = [
            *each[waits.slowest],
            ("communication", waits.handed_s),
            ("pipeline bubble", waits.bubble_s),
        ]
    for cause, seconds in entries:
        if seconds > 0:
            causes[cause] = causes.get(cause, 0.0) + seconds
    return dict(sorted(causes.items(), key=lambda item: -item[1]))


def time_row(
    shape: ModelShape, levers: Levers, hardware: Hardware, known: dict[tuple[Stage, ...], RowTime]
) -> tuple[float, list[RowTime]]:
    """Of a pipeline `step_seconds`, and what each of its GPUs takes by itself; of GPUs with like layers the first.
    `known`: those of other splits of the layers; what is found is added."""
    rates, times = rates_of(hardware, levers.precision), list[RowTime]()
    for gpu in lay_out(shape, levers):
        if gpu.stages not in known:
            causes = _list_causes(gpu.shape, gpu.levers(levers), hardware, rates, rehearsal=False)
            (known[gpu.stages],) = _time_row((gpu,), levers, hardware, rates, (causes,))
        times.append(known[gpu.stages]._replace(alike=gpu.alike))
    each_s = hand_over_each_s(shape, levers, hardware, rates)
    return find_waits(levers, each_s, times).sum(times), times


def _time_row(
    row: Sequence[PipelineGpu],
    levers: Levers,
    hardware: Hardware,
    rates: Rates,
    causes: Sequence[list[tuple[Cause, float]]],
) -> list[RowTime]:
    steps = [engines.step(gpu.shape, gpu.levers(levers), hardware, rates, rehearsal=False) for gpu in row]
    return [
        RowTime(gpu.place, sum(s for _, s in one), sum(step), gpu.alike)
        for gpu, one, step in zip(row, causes, steps, strict=True)
    ]


def _list_causes(
    shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates, *, rehearsal: bool
) -> list[tuple[Cause, float]]:
    """Of a GPU with all layers, or with its part of them."""
    again = levers.checkpointing.layers
    recomputing = shape.n_layers if again is None else again
    rates = with_exchange(rates, hardware, levers, rehearsal=rehearsal)
    exchanged = exchange_s(shape, setting_of(levers, hardware.gpu, shape.model_type), rates.card)
    passes = passes_of(shape, levers, hardware.gpu, rates, recomputing=recomputing)
    traffic = engines.traffic(shape, levers, hardware, rates, rehearsal=rehearsal)
    step = engines.step(shape, levers, hardware, rates, rehearsal=rehearsal)
    times, reductions = levers.accumulation, traffic.reductions(levers.accumulation)
    gpu = passes.forward_gpu + traffic.copied
    gpu_back, host_back = passes.back_gpu + traffic.copied_back, passes.host_back + traffic.host_back
    busy, busy_back = passes.busy(traffic), max(gpu_back, host_back - passes.lead(traffic))
    added, idle_back = (times - 1) * traffic.added, busy_back - gpu_back
    collectives, host_link = traffic.waiting(busy, traffic.gathered)
    collectives_back, host_link_back = traffic.waiting_back(max(gpu_back, host_back), times)
    # What the GPU waits for launches is launch overhead.
    return [
        ("arithmetic", times * passes.products),
        ("communication", times * 2 * exchanged),
        ("memory traffic", times * (passes.traffic + traffic.copied - exchanged)),
        ("dequantisation", times * passes.unpacking),
        ("launch overhead", times * (busy - gpu)),
        ("communication", times * collectives),
        ("host link", times * host_link),
        ("host link", times * traffic.kept_out),
        ("arithmetic", times * passes.products_back),
        ("memory traffic", times * (passes.traffic_back + traffic.copied_back - exchanged) + added),
        ("dequantisation", times * passes.unpacking_back),
        ("recomputation", times * passes.recomputed),
        ("launch overhead", times * idle_back - (times - 1) * min(traffic.added, idle_back)),
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
