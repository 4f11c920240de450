"""What the step times of finished runs say about a machine's rates: one number a run, and many rates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import flags_from_levers
from tightfit.job import Job
from tightfit.job.fields import FREE_LEVERS
from tightfit.messages import id_of
from tightfit.model.load import load_model
from tightfit.pace import step_seconds
from tightfit.planner import plan, plan_within
from tightfit.planner.calibration import Calibration, TimedRun, TimedShare, Training, WayMark
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.taught import estimate_rates, machine_mark, teach, timed_run
from tightfit.types import Measured, TaughtRate

TRAINING = Training(shape="s", gpu="g", method="full", precision="bf16", optimizer="adamw")
WAY = WayMark(engine="zero2", offload_optimizer="none", offload_param="none", checkpointing="none")
SHARES = (
    TimedShare(rate="products", spread=0.05, slower_s=0.6, faster_s=0.6),
    TimedShare(rate="launch", spread=0.5, slower_s=0.3, faster_s=0.3),
)


def run(measured_s: float, *, training: Training = TRAINING, shares: tuple[TimedShare, ...] = SHARES) -> TimedRun:
    """Of a step that was predicted to take a second."""
    return TimedRun(
        machine="m",
        training=training,
        way=WAY,
        day="2026-11-16",
        predicted_s=1.0,
        measured_s=measured_s,
        shares=shares,
    )


def rates_after(*runs: TimedRun) -> dict[str, TaughtRate]:
    return {rate.name: rate for rate in estimate_rates(runs, TRAINING)}


def step_s(found: dict[str, TaughtRate], shares: tuple[TimedShare, ...] = SHARES) -> float:
    """What such a step is predicted to take now."""
    return 1.0 + sum(share.slower_s * (found[share.rate].factor - 1) for share in shares if share.rate in found)


@pytest.mark.parametrize("measured", [0.8, 1.0, 1.1, 1.3, 1.9])
def test_the_same_step_is_predicted_as_it_was_measured(measured: float) -> None:
    assert step_s(rates_after(run(measured))) == pytest.approx(measured, rel=0.02)


def test_the_error_goes_where_most_was_open() -> None:
    found = rates_after(run(1.2))
    assert found["launch"].factor > 1.5
    assert 1.0 < found["products"].factor < 1.05
    assert found["launch"].spread < 0.5  # it is known better now
    assert found["products"].spread <= 0.05 + 1e-9


def test_the_longer_a_step_took_the_slower_is_every_rate() -> None:
    found = [rates_after(run(measured)) for measured in (0.7, 0.9, 1.0, 1.2, 1.6)]
    for name in ("products", "launch"):
        factors = [each[name].factor for each in found]
        assert factors == sorted(factors)


def test_runs_of_two_kinds_tell_two_rates_apart() -> None:
    """One that hangs on launches alone shows whose fault the other's error was."""
    loose = tuple(replace(share, spread=0.5) for share in SHARES)
    launches = (TimedShare(rate="launch", spread=0.5, slower_s=0.9, faster_s=0.9),)
    other = replace(TRAINING, shape="other")
    alone = rates_after(run(1.3, shares=loose))
    both = rates_after(run(1.0, training=other, shares=launches), run(1.3, shares=loose))
    assert both["launch"].factor < alone["launch"].factor
    assert both["products"].factor > alone["products"].factor
    assert step_s(both, loose) == pytest.approx(1.3, rel=0.03)


def test_what_runs_beside_something_longer_saves_nothing() -> None:
    """So a step that was shorter than predicted is no lesson about it."""
    shares = (
        TimedShare(rate="link", spread=0.5, slower_s=0.5, faster_s=0.0),
        TimedShare(rate="products", spread=0.1, slower_s=0.9, faster_s=0.9),
    )
    slower, faster = rates_after(run(1.2, shares=shares)), rates_after(run(0.9, shares=shares))
    assert slower["link"].factor > slower["products"].factor > 1
    assert faster["products"].factor < 0.93
    assert 1 - faster["link"].factor < 1 - faster["products"].factor


def test_another_training_moves_what_was_measured_little() -> None:
    """Its error may be one of the model of the pace."""
    sure = (TimedShare(rate="products", spread=0.02, slower_s=1.0, faster_s=1.0),)
    same = rates_after(run(1.2, shares=sure))["products"].factor
    other = rates_after(run(1.2, training=replace(TRAINING, shape="other"), shares=sure))["products"].factor
    assert 1.0 < other < 1.05 < same


def test_a_wild_figure_counts_when_it_was_measured_again() -> None:
    once = Calibration().with_timed(run(3.0))
    assert [each.counts for each in once.timed] == [False]
    twice = once.with_timed(run(2.9))
    assert [(each.counts, each.runs) for each in twice.timed] == [(True, 2)]
    assert not twice.with_timed(run(0.3)).timed[-1].counts  # the other way
    assert twice.with_timed(run(1.1)).timed[-1].runs == 1


@cache
def planned() -> Plan:
    return plan(Job(model="tiny_llama"), load_model("tiny_llama"), parse_hardware("2x24GB", host_ram="64GB"))


def test_only_runs_on_this_machine_with_these_rates_count() -> None:
    first = planned()
    assert first.chosen is not None
    hardware, shape, levers = first.hardware, first.shape, first.chosen.levers
    here = replace(run(1.2), machine=machine_mark(hardware, "a processor"))
    known = Calibration(timed=(here,), processor="a processor")
    taught = teach(hardware, known, shape, levers)
    assert taught.taught is not None
    assert taught.taught.on == "2026-11-16"
    assert teach(taught, known, shape, levers) == taught
    assert teach(taught, None, shape, levers) == taught  # who wants nothing changed gets nothing changed
    assert teach(taught, Calibration(processor="a processor"), shape, levers) == hardware
    anew = replace(hardware, measured=Measured(on="2026-11-17", machine="m", rates={}))
    for other, processor in ((hardware, "another"), (anew, "a processor")):
        assert teach(other, replace(known, processor=processor), shape, levers).taught is None
    answer = plan_within(Bounds(calibration=known), first.job, first.shape, first.hardware)
    assert answer.hardware.taught == taught.taught


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [0.9, *(pytest.param(each, marks=pytest.mark.slow) for each in (1.0, 1.15)), 1.6])
@pytest.mark.parametrize(("word", "method"), [("8xRTX4090", "full"), ("1xA100-80GB", "lora"), ("8xH100", "full")])
def test_the_next_plan_of_the_same_training_takes_as_long_as_the_run_did(word: str, method: Any, factor: float) -> None:
    """In the real prices, where rates overlap and hide each other."""
    job = Job(model="qwen2.5-7b", method=method)
    first = plan(job, load_model(job.model), parse_hardware(word, host_ram="256GB"))
    way = first.chosen
    assert way is not None
    seen = timed_run(way.shape, way.levers, way.hardware, "a processor", factor * way.pace.step_s, "2026-11-16")
    known = Calibration(processor="a processor").with_timed(seen)
    again = plan_within(Bounds(calibration=known), job, first.shape, first.hardware)
    assert again.hardware.taught is not None
    assert step_seconds(way.shape, way.levers, again.hardware) == pytest.approx(factor * way.pace.step_s, rel=0.04)
    assert again.chosen is not None
    assert {rate.source for rate in again.chosen.pace.rates.values()} == {"run"}
    told = [said for said in again.because if id_of(said) == "plan.taught-by"]
    assert bool(told) == (abs(again.chosen.pace.step_s / _untaught_s(again.chosen) - 1) >= 0.005)
    same = plan_within(Bounds(calibration=known), replace(job, levers=_pins(way)), first.shape, first.hardware).chosen
    assert same is not None
    assert same.pace.low_s < factor * way.pace.step_s < same.pace.high_s
    assert same.pace.high_s / same.pace.low_s < 1.09  # it has run before, and its rates leave open what they may
    unwanted = plan_within(Bounds(), job, first.shape, first.hardware)
    assert unwanted.chosen == way


def _pins(way: Way) -> dict[str, Any]:
    """What makes it the way of a plan again."""
    return {flag: value for flag, value in flags_from_levers(way.levers).items() if flag in FREE_LEVERS}


def _untaught_s(way: Way) -> float:
    return step_seconds(way.shape, way.levers, replace(way.hardware, taught=None))
