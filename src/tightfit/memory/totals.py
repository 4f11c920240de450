"""What a search has to know of a footprint: sums, without the components, phases and sentences that make them up.

`Scale` weighs one way of computing at any depth of checkpointing. What does not depend on the depth is added up once.
`Floor` says what the way holds in any case, for the price of a few additions: at the loss, when the top layer's
backward pass begins, and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from tightfit.inputs.flags import BARE
from tightfit.memory import engines, host, overhead, stream, zero3
from tightfit.memory.activations import Curve, curve_of
from tightfit.memory.engines import ENGINES
from tightfit.memory.job import MemoryJob, at_depth, count_waiting_bytes, make_jobs
from tightfit.memory.pipeline import PipelineGpu
from tightfit.types import Checkpointing, Footprint, Hardware, Levers, ModelShape


class Totals(NamedTuple):
    """Bytes of one GPU, and of all ranks of a node on the host."""

    init: int
    step: int
    peak: int  # of a training step
    required: int  # of the card
    host: int
    nvme: int
    beside: int  # of the card, whatever tensors it holds: context and communicators

    def require(self, held: int) -> int:
        """What a card must have for this much."""
        return held + int(held * overhead.ALLOCATOR_SLACK) + self.beside


def totals_of(footprint: Footprint) -> Totals:
    gpu, on_host = footprint.gpu, footprint.host
    return Totals(
        init=gpu.init_peak_bytes,
        step=gpu.phases["step"].total_bytes,
        peak=gpu.peak_bytes,
        required=gpu.required_bytes,
        host=on_host.peak_bytes_per_node,
        nvme=on_host.nvme_bytes_per_node,
        beside=gpu.overhead["context"] + gpu.overhead["communicator"],
    )


def fullest_of(row: Sequence[Totals]) -> Totals:
    """What counts of the GPUs of a pipeline."""
    return max(row, key=lambda each: each.required)._replace(host=max([each.host for each in row]))


def required_bytes(held: int, hardware: Hardware, groups: int) -> int:
    """What a card must have for this much: that, and what stands beside it. `groups`: as the levers have it."""
    return held + sum(overhead.beside(held, hardware.world, hardware.gpu, groups).values())


class Floor(NamedTuple):
    """No training step holds less, whatever the depth."""

    loss: int
    top: int
    after: int  # when the last gradients leave, or at the optimizer's step: the same at every depth
    curves: Callable[[tuple[str, ...]], Curve]  # by what is selected
    gathered_loss: int  # zeRO-3: whole at the loss, and at the top; as long as no more than `settled` layers recompute
    gathered_top: int
    settled: int

    def held(self, depth: Checkpointing) -> tuple[int, int]:
        """At the loss, and when the top layer's backward pass begins. It falls with every layer that recomputes, after
        the first. The moment at the top is left out where the top layer recomputes as well."""
        curve = self.curves(depth.select)
        layers = len(curve.kept) - 1 if depth.layers is None else depth.layers
        shared = curve.shared[layers]
        sent = curve.sent[layers] if depth.offload else 0
        if depth.offload and not sent:
            return self.loss + shared, 0
        at_loss, at_top = self.loss + curve.kept[layers] - sent + shared, 0
        if curve.top is not None and layers < len(curve.kept) - 1:
            at_top = self.top + curve.below_top[layers] - sent + curve.top[layers] + shared
        if layers <= self.settled:
            return at_loss + self.gathered_loss, at_top + self.gathered_top
        return at_loss, at_top


class RowFloor(NamedTuple):
    """The same of a pipeline: when a stage's forward pass is over, of whichever GPU holds most."""

    jobs: list[MemoryJob]
    after: int

    def held(self, depth: Checkpointing) -> tuple[int, int]:
        return max(self._count(at_depth(job, depth)) for job in self.jobs), 0

    def _count(self, job: MemoryJob) -> int:
        loss, acts = ENGINES[job.levers.engine].at_the_loss(job), job.acts
        return sum(loss.values()) + acts.kept + acts.shared + count_waiting_bytes(job, "forward")


class StreamFloor(NamedTuple):
    """The same of layers that stream."""

    job: MemoryJob
    loss: int
    after: int

    def held(self, depth: Checkpointing) -> tuple[int, int]:
        return self.loss + stream.count_kept_bytes(self.job._replace(depth=depth)), 0


class Steady(NamedTuple):
    """What is the same at every depth; and on the host, as long as nothing that layers keep waits there."""

    init: int
    step: int
    host: int
    nvme: int


class Scale:
    """One way of computing, at any depth of checkpointing."""

    def __init__(
        self, shape: ModelShape, levers: Levers, hardware: Hardware, row: tuple[PipelineGpu, ...] | None = None
    ) -> None:
        """`row`: of a pipeline, those of its GPUs that are to be weighed; None: all."""
        self.shape, self.levers, self.hardware = shape, levers, hardware
        self.engine = ENGINES[levers.engine]
        self.jobs = make_jobs(shape, levers, hardware.world, hardware.gpu, row=row)
        self.job = self.jobs[0][0]
        self._waiting: dict[Checkpointing, list[int]] = {}

    def totals(self, depth: Checkpointing) -> Totals:
        """Those of `estimate`: of the fullest GPU."""
        return fullest_of(self.totals_of_each(depth))

    def totals_of_each(self, depth: Checkpointing) -> list[Totals]:
        """Of the GPUs of a pipeline that differ in their layers."""
        found, beside = [], required_bytes(0, self.hardware, self.levers.groups)
        for jobs, steady in zip(self.jobs, self.steady_of_each(depth), strict=True):
            passes = [engines.passes(at_depth(job, depth)) for job in jobs]
            peak = max([steady.step, *[sum(parts.values()) for each in passes for parts in each.values()]])
            required = required_bytes(max(peak, steady.init), self.hardware, self.levers.groups)
            found.append(Totals(steady.init, steady.step, peak, required, steady.host, steady.nvme, beside))
        return found

    @cached_property
    def floor(self) -> Floor | RowFloor | StreamFloor:
        job, engine = self.job, self.engine
        if job.row is not None:
            steps = [each.step for each in self.steady_of_each(Checkpointing())]
            return RowFloor(list(chain.from_iterable(self.jobs)), max(steps))
        loss, top = sum(engine.at_the_loss(job).values()), sum(engine.at_the_top(job).values())
        after = max(sum(engine.at_the_end(job).values()), sum(engine.step(job).values()))
        if self.levers.streams:
            return StreamFloor(job, loss, after)
        curves = partial(curve_of, self.shape, job.acts.setting, self.levers.frozen_layers)
        if self.levers.stage != 3:
            return Floor(loss, top, after, curves, 0, 0, -1)
        whole, width = zero3.settle_for(job), job.weights.width
        return Floor(loss, top, after, curves, whole.loss * width, whole.top * width, whole.layers)

    def steady(self, depth: Checkpointing) -> Steady:
        """Of each kind the most that any GPU has."""
        each = self.steady_of_each(depth)
        return each[0] if len(each) == 1 else Steady(*map(max, zip(*each, strict=True)))

    def steady_of_each(self, depth: Checkpointing) -> list[Steady]:
        if not depth.offload:
            return self._resting
        each = zip(self._resting, self._host_of_each(depth), strict=True)
        return [rest._replace(host=on_host) for rest, on_host in each]

    def host_bytes(self, depth: Checkpointing) -> int:
        """`Steady.host` alone, for a part of the price."""
        return max(self._host_of_each(depth))

    def _host_of_each(self, depth: Checkpointing) -> list[int]:
        if not depth.offload:
            return [max(each) * self._ranks for each in self._on_host]
        if depth not in self._waiting:
            waiting = [host.waiting_bytes(at_depth(jobs[0], depth)) for jobs in self.jobs]
            self._waiting[depth] = [
                max(building, training + more) * self._ranks
                for (building, training), more in zip(self._on_host, waiting, strict=True)
            ]
        return self._waiting[depth]

    @property
    def _ranks(self) -> int:
        """Of a node."""
        return min(self.hardware.world, self.hardware.gpus_per_node)

    @cached_property
    def _on_host(self) -> list[tuple[int, int]]:
        """Of one rank while the model is built, and in a step, where nothing that layers keep waits there."""
        found = []
        for jobs in self.jobs:
            phases = host.phases(at_depth(jobs[0], BARE))
            sizes = {name: sum(parts.values()) for name, parts in phases.items()}
            found.append((sizes["init"], max(sizes["forward"], sizes["backward"], sizes["step"])))
        return found

    @cached_property
    def _resting(self) -> list[Steady]:
        """Where nothing that layers keep waits on the host."""
        return [
            Steady(
                init=sum(self.engine.initialise(jobs[0]).values()),
                step=sum(engines.step(jobs[0]).values()),
                host=on_host,
                nvme=host.nvme_bytes(jobs[0]) * self._ranks,
            )
            for jobs, on_host in zip(self.jobs, self._host_of_each(BARE), strict=True)
        ]
