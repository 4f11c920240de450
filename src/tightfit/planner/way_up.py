"""The way up: a run that left much of its cards unused, and the faster plan that would fit.

The plan was the fastest that was predicted to fit. A faster one fits where the run took less than predicted, which the
calibration now knows, or where a pinned lever or a tier was in the way.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.memory.overhead import beside
from tightfit.messages import Listing, Message
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.reasons import lever_changes
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
    asked = same_training_question(plan, bounds or Bounds())
    free = unpin(asked)
    for question in (asked, free) if free.pinned != asked.pinned else (asked,):
        best = search(question, nearest=False).best
        if best is not None and best.pace.tokens_per_s > way.pace.tokens_per_s * (1 + WORTH):
            best = replace(best, changes=way.changes, skips_long=way.skips_long)
            peak, size = amounts(max(measured_peak_bytes, 1), way.hardware.gpu.memory_bytes)
            said = Message(
                "plan.way-up",
                peak=peak,
                size=size,
                left=unused_share(way, measured_peak_bytes),
                changes=Listing(lever_changes(way, best), ";"),
                tokens=best.pace.tokens_per_s,
                share=best.pace.tokens_per_s / way.pace.tokens_per_s - 1,
            )
            return replace(plan, chosen=best, alternatives=(), because=(said,))
    return None


def unused_share(way: Way, measured_peak_bytes: int) -> float:
    """The share of the card that was left, what lies beside the tensors counted as used."""
    held = max(measured_peak_bytes, 0)
    used = held + sum(beside(held, way.world, way.hardware.gpu).values())
    return 1 - used / way.hardware.gpu.memory_bytes
