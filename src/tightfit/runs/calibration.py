"""Measured against predicted: what a run has taught. What is done with it stands in `planner/calibration.py`, and where
it is written down in `desk/calibration.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone

from tightfit.planner.calibration import (
    COMPONENT,
    Entry,
    MeasuredPhase,
    TimedRun,
    data_mark,
    training_of,
    uncorrected_bytes,
    way_mark,
)
from tightfit.planner.plan import Plan, Way
from tightfit.planner.step_down import Shortfall
from tightfit.planner.taught import timed_run
from tightfit.runs.events import Event, MemoryMark, Step, Tally
from tightfit.types import PhaseName

LEAST_STEPS = 8  # of which a median says something
WHOLE_SHARE = 0.97  # of the planned tokens in a step, from which on its time is that of a whole batch


def learned(events: Iterable[Event], plan: Plan) -> Entry | None:
    """What a run's events teach about its plan, whether it finished or not; None: nothing was measured.

    The events must be those of this plan alone, not of attempts before it.
    """
    way = plan.chosen
    if way is None:
        return None
    said = list(events)
    steps = [event for event in said if isinstance(event, Step)]
    marks = {event.milestone: event for event in said if isinstance(event, MemoryMark)}
    found = [*_on_gpu(marks, max((step.peak_bytes or 0 for step in steps), default=0), way)]
    if way.hardware.gpu.vendor != "cpu":  # on the CPU it all is host memory
        # Of the steps: while the model is read, pages of its files count as resident.
        predicted = uncorrected_bytes(way.footprint.host.phases["step"])
        held = max((step.host_bytes or 0 for step in steps), default=0)
        found.append(MeasuredPhase(where="host", phase="step", predicted_bytes=predicted, measured_bytes=held))
    return _entry_of(plan, way, tuple(found))


def learn_seconds(tally: Tally, plan: Plan, processor: str) -> TimedRun | None:
    """How long this plan's steps took; None: too few were made, or with less than whole sequences, of which a step
    takes less whatever the machine's rates are.

    The tally must be that of this plan alone, as in `learned`. Saving and evaluating are no part of a step's seconds.
    """
    way, step_s, tokens = plan.chosen, tally.step_s, tally.step_tokens
    if way is None or not step_s or not tokens or tally.timed_steps < LEAST_STEPS:
        return None
    if tokens < WHOLE_SHARE * plan.effective_batch * way.levers.sequence:
        return None
    return timed_run(way.shape, way.levers, way.hardware, processor, step_s, _today())


def learn_from_failure(plan: Plan, shortfall: Shortfall, held_bytes: int) -> Entry | None:
    """What an out-of-memory on a GPU teaches: `held_bytes` (allocated + asked) were needed in that phase, at the least.

    None: no more than was predicted, so the prediction is not what was wrong.
    """
    way = plan.chosen
    if way is None or shortfall.where != "gpu":
        return None
    phase = shortfall.phase or way.footprint.gpu.peak_phase
    predicted = uncorrected_bytes(way.footprint.gpu.phases[phase])
    if held_bytes <= predicted:
        return None
    found = MeasuredPhase(where="gpu", phase=phase, predicted_bytes=predicted, measured_bytes=held_bytes)
    return _entry_of(plan, way, (found,))


def _entry_of(plan: Plan, way: Way, measured: tuple[MeasuredPhase, ...]) -> Entry | None:
    known = tuple(each for each in measured if each.predicted_bytes > 0 and each.measured_bytes > 0)
    if not known:
        return None
    return Entry(
        training=training_of(way.shape, way.levers, way.hardware),
        way=way_mark(way.levers),
        data=data_mark(plan.job),
        sequence=way.levers.sequence,
        day=_today(),
        measured=known,
    )


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def _on_gpu(marks: Mapping[str, MemoryMark], peak_bytes: int, way: Way) -> Iterator[MeasuredPhase]:
    """Milestones are peaks since the first pass began, so each is one of the phase that is largest up to there.

    With the plain loss the first forward pass ends before the loss is at its largest, so it says nothing.
    """
    gpu = way.footprint.gpu
    errors: dict[PhaseName, int] = {}
    forward: tuple[PhaseName, ...] = ("forward", "loss")
    for milestone, phases in (("init", ("init",)), ("forward", forward), ("backward", (*forward, "backward"))):
        mark = marks.get(milestone)
        if mark is None or mark.measured_bytes is None or mark.predicted_bytes is None:
            continue
        if milestone != "forward" or way.levers.loss == "fused":
            phase = max(phases, key=lambda name: gpu.phases[name].total_bytes)
            errors[phase] = mark.measured_bytes - mark.predicted_bytes + gpu.phases[phase].components.get(COMPONENT, 0)
    last = marks.get("step")
    probed = None if last is None else last.measured_bytes
    peak = max(probed or 0, peak_bytes)
    if peak:
        errors[gpu.peak_phase] = peak - uncorrected_bytes(gpu.phases[gpu.peak_phase])
    for phase, error in errors.items():
        predicted = uncorrected_bytes(gpu.phases[phase])
        if error > 0 or phase == "init" or probed is not None:  # a largest batch that never passed proves nothing
            yield MeasuredPhase(where="gpu", phase=phase, predicted_bytes=predicted, measured_bytes=predicted + error)
