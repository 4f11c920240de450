"""What each engine answers about a job: the phases of a training step, and what it holds at two of its moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tightfit.memory import fsdp2, zero0, zero3, zero12
from tightfit.memory.job import Components, Job
from tightfit.types import PhaseName


class Engine(Protocol):
    """An engine's file."""

    def initialise(self, job: Job) -> Components: ...

    def passes(self, job: Job) -> dict[PhaseName, Components]:
        """Forward, loss and backward: what depends on how many layers recompute."""

    def step(self, job: Job) -> Components: ...

    def at_the_loss(self, job: Job) -> Components:
        """Beside what the layers keep."""

    def at_the_top(self, job: Job) -> Components:
        """No less than this is held when the top layer's backward pass begins, beside what the layers hold."""

    def at_the_end(self, job: Job) -> Components:
        """No less than this is held when the last gradients leave, with no activations there."""


ENGINES: Mapping[str, Engine] = {"zero0": zero0, "zero1": zero12, "zero2": zero12, "zero3": zero3, "fsdp2": fsdp2}
