"""The way up: a run that left much of its cards unused, and the faster plan that would fit.

The plan was the fastest that was predicted to fit. A faster one fits where the run took less than predicted, which the
calibration now knows, or where a pinned lever or a tier was in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tightfit.memory.overhead import beside
from tightfit.messages import Listing, Message
from tightfit.planner.lever_changes import lever_changes
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.question import Question
from tightfit.planner.search import search
from tightfit.planner.step_down import same_training_question, unpin
from tightfit.priced import amounts

MUCH = 0.15
"""Of the card: what a run must have left unused before anybody is told."""
WORTH = 0.05
"""Of the tokens a second: what a change must bring to be worth a sentence."""


def room_above(plan: Plan, measured_peak_bytes: int, *, bounds: Bounds | None = None) -> Plan | None:
    """The faster plan, where the run left much of the card unused and there is one; None: there is none.

    Pass the calibration with what the run has taught already.
    """
    way = plan.chosen
    if way is None or unused_share(way, measured_peak_bytes) <= MUCH:
        return None
    for question in _questions(plan, bounds or Bounds()):
        best = search(question, nearest=False).best
        if best is not None and best.pace.tokens_per_s > way.pace.tokens_per_s * (1 + WORTH):
            best = replace(best, changes=way.changes, skips_long=way.skips_long)
            return replace(plan, chosen=best, alternatives=(), because=(_sentence(way, best, measured_peak_bytes),))
    return None


def _questions(plan: Plan, bounds: Bounds) -> Iterator[Question]:
    """With what is pinned, and where that leads nowhere, without."""
    asked = same_training_question(plan, bounds)
    yield asked
    free = unpin(asked)
    if free.pinned != asked.pinned:
        yield free


def unused_share(way: Way, measured_peak_bytes: int) -> float:
    """The share of the card that was left, what lies beside the tensors counted as used."""
    held = max(measured_peak_bytes, 0)
    used = held + sum(beside(held, way.world, way.hardware.gpu).values())
    return 1 - used / way.hardware.gpu.memory_bytes


def _sentence(way: Way, faster: Way, measured_peak_bytes: int) -> Message:
    peak, size = amounts(max(measured_peak_bytes, 1), way.hardware.gpu.memory_bytes)
    share = faster.pace.tokens_per_s / way.pace.tokens_per_s - 1
    return Message(
        "plan.way-up",
        peak=peak,
        size=size,
        left=unused_share(way, measured_peak_bytes),
        changes=Listing(lever_changes(way, faster), ";"),
        tokens=faster.pace.tokens_per_s,
        share=share,
    )
