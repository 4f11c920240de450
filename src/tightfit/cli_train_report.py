"""The end of a training as JSON: the contract with programs. The keys here are promised, further ones may come."""

from __future__ import annotations

import json
import math
from typing import Any

from tightfit.cli_train_request import Ready
from tightfit.runs.events import Checkpointed, Resumed
from tightfit.runs.run import Outcome


def report(ready: Ready, outcome: Outcome) -> dict[str, Any]:
    """How it went. A loss that is no number is null."""
    worker, tally = ready.worker, outcome.tally
    last = tally.last
    return {
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "error": None if outcome.failure is None else outcome.failure.sentence,
        "folder": str(ready.folder),
        "model": str(ready.folder / "model") if outcome.state == "done" else None,
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
        "summary": {} if tally.ended is None else json.loads(tally.ended.summary, parse_constant=lambda _: None),
    }


def _place(event: Resumed | Checkpointed) -> dict[str, Any]:
    return {"step": event.step, "folder": event.folder}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
