"""The worst batch first: an out-of-memory comes in the first seconds, not at step 1200.

One whole window of the largest samples that the data has, with its optimizer step, at learning rate zero; then once
more, because the peak often comes when the optimizer's states exist already. Afterwards the engine forgets: moments,
counters and loss scale are set back, and the generators of random numbers too, so that the first real step is bit for
bit what it would have been. Clearing gradients alone would not do: ZeRO-2 keeps some.

On the way the four milestones are measured against the plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tightfit.train.config import Milestone, Prediction
from tightfit.train.engines import Engine
from tightfit.train.events import Events
from tightfit.train.meter import Meter
from tightfit.train.place import Place, everyone
from tightfit.train.recompute import LayerCalls
from tightfit.train.windows import Window, Windows, rng_state, set_rng_state

PASSES = 2
MOST_TURNS = 24
"""fp16 may begin with a loss scale that overflows. A skipped step proves nothing; the next one has a lower scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    seconds: float
    """Of the last pass: what a step of this size takes."""
    peak_bytes: int | None
    recomputed_layers: int
    """How many layers ran a second time."""


class Milestones:
    """Memory at the four moments, told as they come."""

    def __init__(self, events: Events, meter: Meter, predicted: Prediction, place: Place) -> None:
        self._events, self.meter, self._predicted, self._place = events, meter, predicted, place
        self.measured: dict[Milestone, int | None] = {}

    def measure(self, milestone: Milestone) -> None:
        reading = self.meter.read()
        known = reading.peak_bytes is not None
        ranks = everyone(self._place, reading.peak_bytes if reading.peak_bytes is not None else reading.host_bytes)
        self.measured[milestone] = reading.peak_bytes
        self._events.write(
            "memory",
            milestone=milestone,
            predicted_bytes=self._predicted.milestones[milestone],
            measured_bytes=reading.peak_bytes,
            now_bytes=reading.now_bytes,
            host_bytes=reading.host_bytes,
            ranks=ranks,
            where="gpu" if known else "host",
        )


def probe(engine: Engine, windows: Windows, window: Window, milestones: Milestones, place: Place) -> Probed:
    """Run the window at learning rate zero, twice, and forget it."""
    before = rng_state(place)
    meter = milestones.meter
    meter.restart()
    calls = LayerCalls(engine.model)
    seconds, recomputed, taken = 0.0, 0, 0
    try:
        for turn in range(MOST_TURNS):
            began = time.monotonic()
            for number, inputs in enumerate(windows.inputs(window)):
                first = turn == 0 and number == 0
                loss = engine.forward(inputs, window.divisor)
                if first:
                    calls_forward = calls.calls
                    milestones.measure("forward")
                engine.backward(loss, last=number == len(window.micro_batches) - 1)
                del loss, inputs
                if first:
                    recomputed = calls.calls - calls_forward
                    milestones.measure("backward")
            stepped = engine.step(0.0)
            taken += not stepped.skipped or stepped.loss_scale is None
            seconds = time.monotonic() - began
            if taken == PASSES:
                break
        milestones.measure("step")
    finally:
        calls.stop()
    engine.forget()
    set_rng_state(place, before)
    return Probed(
        seconds=seconds,
        peak_bytes=meter.read().peak_bytes,
        recomputed_layers=recomputed,
    )
