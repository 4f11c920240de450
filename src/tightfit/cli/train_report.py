"""The end of a training: what it teaches later plans, the faster plan that would have fitted, and all of it as JSON.

The JSON is the contract with programs: the keys here are promised, further ones may come.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tightfit.cli.train_request import Ready
from tightfit.desk.calibration import Calibrations
from tightfit.inputs.flags import flags_from_levers
from tightfit.inputs.surroundings import cache_folder
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.way_up import room_above
from tightfit.runs.calibration import learned
from tightfit.runs.events import Checkpointed, Resumed, Tally
from tightfit.runs.run import Outcome


def learn(plan: Plan | None, tally: Tally, bounds: Bounds) -> Bounds:
    """Write down what an attempt measured, and hand back the bounds that know it; unchanged with `--no-calibration`."""
    if plan is None or bounds.calibration is None:
        return bounds
    entry = learned((*tally.marks, *([tally.last] if tally.last else ())), plan)
    if entry is not None:
        Calibrations(cache_folder()).add(entry)
    return replace(bounds, calibration=bounds.calibration.with_entry(entry))


def way_up(plan: Plan | None, tally: Tally, bounds: Bounds) -> Plan | None:
    """The faster plan that would fit, where the run left much of its cards unused; `bounds`: after `learn`.

    Its first `because` is the sentence to say.
    """
    peaks = [mark.measured_bytes for mark in tally.marks if mark.measured_bytes is not None]
    peak = max((*peaks, tally.peak_bytes or 0))
    return None if plan is None or not peak else room_above(plan, peak, bounds=bounds)


def say_way_up(faster: Plan | None) -> None:
    """At the end of what people read."""
    if faster is None:
        return
    from tightfit.screen import open_console, say

    console = open_console()
    console.print()
    say(console, faster.because[0])


def report(ready: Ready, outcome: Outcome, faster: Plan | None = None) -> dict[str, Any]:
    """How it went. A loss that is no number is null. `faster`: see `way_up`."""
    worker, tally = ready.worker, outcome.tally
    last = tally.last
    return {
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "error": None if outcome.failure is None else str(outcome.failure.sentence),
        "folder": str(ready.folder),
        "model": str(ready.folder / "model") if outcome.state == "done" else None,
        "pictures": list(tally.pictures),
        "steps": None if last is None else last.step,
        "resumed_from": None if tally.resumed is None else _place(tally.resumed),
        "checkpoint": None if tally.checkpoint is None else _place(tally.checkpoint),
        "loss": {"first": _finite(tally.first_loss), "last": _finite(last.loss if last else None)},
        "memory": {
            "predicted_peak_bytes": worker.peak_bytes,
            "peak_bytes": tally.peak_bytes,
            "milestones": [
                {
                    "milestone": mark.milestone,
                    "predicted_bytes": mark.predicted_bytes,
                    "measured_bytes": mark.measured_bytes,
                    "host_bytes": mark.host_bytes,
                }
                for mark in tally.marks
            ],
        },
        "pace": {
            "predicted_step_s": worker.step_s,
            "step_s": tally.step_s,
            "predicted_tokens_per_s": worker.tokens_per_s,
            "tokens_per_s": tally.tokens_per_s,
        },
        "way_up": _way_up_report(faster),
        "summary": {} if tally.ended is None else dict(tally.ended.summary),
    }


def _way_up_report(faster: Plan | None) -> dict[str, Any] | None:
    if faster is None or faster.chosen is None:
        return None
    return {
        "text": str(faster.because[0]),
        "levers": flags_from_levers(faster.chosen.levers),
        "world": faster.chosen.world,
        "tokens_per_s": faster.chosen.pace.tokens_per_s,
    }


def _place(event: Resumed | Checkpointed) -> dict[str, Any]:
    return {"step": event.step, "folder": event.folder}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
