"""What each engine answers about a job: the phases of a training step, and what it holds at two of its moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tightfit.memory import ddp, fsdp2, stream, zero0, zero3, zero12
from tightfit.memory.job import Components, MemoryJob, combine, count_waiting_bytes, share
from tightfit.memory.operations import FP32
from tightfit.types import PhaseName


class EngineMemory(Protocol):
    """An engine's file."""

    def initialise(self, job: MemoryJob) -> Components: ...

    def passes(self, job: MemoryJob) -> dict[PhaseName, Components]:
        """Forward, loss and backward: what depends on how many layers recompute."""

    def step(self, job: MemoryJob) -> Components: ...

    def at_the_loss(self, job: MemoryJob) -> Components:
        """Beside what the layers keep."""

    def at_the_top(self, job: MemoryJob) -> Components:
        """No less than this is held when the top layer's backward pass begins, beside what the layers hold."""

    def at_the_end(self, job: MemoryJob) -> Components:
        """No less than this is held when the last gradients leave, with no activations there."""


ENGINES: Mapping[str, EngineMemory] = {
    "ddp": ddp,
    "zero0": zero0,
    "zero1": zero12,
    "zero2": zero12,
    "zero3": zero3,
    "fsdp2": fsdp2,
    "stream": stream,
}


def passes(job: MemoryJob) -> dict[PhaseName, Components]:
    """Of one micro batch, with what others of a pipeline hold meanwhile."""
    found = ENGINES[job.levers.engine].passes(job)
    if job.row is None:
        return found
    ways = {name: count_waiting_bytes(job, "backward" if name == "backward" else "forward") for name in found}
    return {name: combine(parts, {"activations": ways[name]}) for name, parts in found.items()}


def step(job: MemoryJob) -> Components:
    """Both copies of a tied embedding, on the first GPU of a pipeline and on the last, get the sum of their gradients:
    the other's lies beside the own."""
    found = ENGINES[job.levers.engine].step(job)
    if job.row is None or not job.row.tied_numel:
        return found
    return combine(found, {"buckets": share(job.row.tied_numel, job.world * job.levers.tensor_parallel) * FP32})
