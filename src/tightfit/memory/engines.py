"""What each engine answers about a job: the phases of a training step, and what it holds at two of its moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tightfit.memory import fsdp2, zero0, zero3, zero12
from tightfit.memory.job import Components, Job
from tightfit.types import PhaseName


class Engine(NamedTuple):
    initialise: Callable[[Job], Components]
    passes: Callable[[Job], dict[PhaseName, Components]]
    """Forward, loss and backward: what depends on how many layers recompute."""
    step: Callable[[Job], Components]
    at_the_loss: Callable[[Job], Components]
    """Beside what the layers keep."""
    at_the_top: Callable[[Job], Components]
    """No less than this is held when the top layer's backward pass begins, beside what the layers hold."""
    at_the_end: Callable[[Job], Components]
    """No less than this is held when the last gradients leave, with no activations there."""


_ZERO12 = Engine(
    zero12.initialise, zero12.passes, zero12.step, zero12.at_the_loss, zero12.at_the_top, zero12.at_the_end
)
ENGINES = {
    "zero0": Engine(zero0.initialise, zero0.passes, zero0.step, zero0.at_the_loss, zero0.at_the_top, zero0.at_the_end),
    "zero1": _ZERO12,
    "zero2": _ZERO12,
    "zero3": Engine(zero3.initialise, zero3.passes, zero3.step, zero3.at_the_loss, zero3.at_the_top, zero3.at_the_end),
    "fsdp2": Engine(fsdp2.initialise, fsdp2.passes, fsdp2.step, fsdp2.at_the_loss, fsdp2.at_the_top, fsdp2.at_the_end),
}
