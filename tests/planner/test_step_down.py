"""The next plan after memory ran out: smaller where it has to be, the same training, and an end to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from brute_force import candidates
from hypothesis import given
from hypothesis import strategies as st
from small_questions import GIB, ask, built, machine, preset, properties, questions

from tightfit.job import Allowance, Job, Limits
from tightfit.pace import pace
from tightfit.planner import plan
from tightfit.planner.calibration import Calibration, Entry, MeasuredPhase, phase_bytes, training_of, way_mark
from tightfit.planner.candidates import complexity
from tightfit.planner.certainty import MOST_SLOWER
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.question import Cap, Question, excess_bytes, weigh
from tightfit.planner.search import search, something_fits
from tightfit.planner.step_down import MARGIN, NoWay, Shortfall, StepDown, Tried, locate, margin_bytes, step_down
from tightfit.types import Hardware, PhaseName

pytestmark = pytest.mark.thorough

TRAINING: tuple[PhaseName, ...] = ("forward", "loss", "backward", "step")


def planned(model: str, hardware: Hardware, **job: Any) -> Plan:
    answer = plan(Job(model=model, **job), preset(model), hardware)
    assert answer.chosen is not None
    return answer


def way_of(answer: Plan) -> Way:
    assert answer.chosen is not None
    return answer.chosen


def held(way: Way, shortfall: Shortfall) -> int:
    return phase_bytes(way.footprint, shortfall.where, shortfall.phase, way.hardware)


def training(way: Way) -> tuple[object, ...]:
    """All that changes the result."""
    levers = way.levers
    kind = (way.shape.name, levers.method, levers.lora, levers.sequence, levers.frozen_layers, levers.trains)
    return (*kind, levers.precision, levers.optimizer, levers.master_weights, way.effective_batch, way.changes)


def check(last: Plan, found: StepDown, shortfall: Shortfall) -> None:
    """What every step down promises."""
    before, after = way_of(last), way_of(found.plan)
    needed = shortfall.missing_bytes + margin_bytes(Tried(way=before, shortfall=shortfall), (), Bounds())
    assert held(before, shortfall) - held(after, shortfall) == found.less_bytes >= needed
    assert after.fits
    assert training(after) == training(before)
    assert found.plan.effective_batch == last.effective_batch
    assert found.changed
    assert found.plan.because[: len(found.because)] == found.because
    assert found.plan.job == last.job


# --- what is promised -----------------------------------------------------------------------------

MACHINES = ("8xRTX4090", "1x24GB", "4x12GB", "2x8xA100-80GB", "8xK100-64GB")
MODELS = ("qwen1.5-0.5b", "qwen1.5-1.8b", "3b_mamba", "qwen2.5-7b")


QUICK = (
    ("qwen1.5-0.5b", "1x24GB", "full"),
    ("qwen1.5-1.8b", "4x12GB", "lora"),
    ("3b_mamba", "8xRTX4090", "full"),
)
EVERY = product(MODELS, MACHINES, ("full", "lora"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "word", "method"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in EVERY],
)
def test_the_next_plan_predicts_enough_less_and_trains_the_same(model: str, word: str, method: Any) -> None:
    answer = plan(Job(model=model, method=method), preset(model), machine(word, "192GB"))
    if answer.chosen is None:
        pytest.skip("nothing fits to begin with")
    phases = [answer.chosen.footprint.gpu.peak_phase, "step", None]
    for phase in phases:
        shortfall = Shortfall(where="gpu", missing_bytes=GIB // 2, phase=phase)
        found = step_down(answer, shortfall)
        if isinstance(found, StepDown):
            check(answer, found, shortfall)
            # the simplest of those that cannot be told from the fastest was chosen, which may be a little slower
            assert (1 + MOST_SLOWER) * way_of(found.plan).pace.step_s >= answer.chosen.pace.step_s
        else:
            assert found.because


@pytest.mark.thorough
@pytest.mark.parametrize("phase", [*TRAINING, "init", "eval", "save", None])
def test_any_phase_can_be_what_failed(phase: PhaseName | None) -> None:
    answer = planned("qwen1.5-0.5b", machine("2x24GB"))
    shortfall = Shortfall(where="gpu", missing_bytes=GIB // 4, phase=phase)
    found = step_down(answer, shortfall)
    assert isinstance(found, StepDown)
    check(answer, found, shortfall)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("qwen1.5-0.5b", "1x8GB"),
        pytest.param("qwen1.5-0.5b", "2x8GB", marks=pytest.mark.slow),
        pytest.param("qwen2.5-7b", "8xRTX4090", marks=pytest.mark.slow),
    ],
)
def test_step_downs_end(model: str, word: str) -> None:
    """Whatever phase fails each time, no plan comes twice, and after a few there is none."""
    last = planned(model, machine(word, "256GB"))
    before: tuple[Tried, ...] = ()
    seen = [(way_of(last).levers, way_of(last).world)]
    for number in range(40):
        phase = TRAINING[number % len(TRAINING)]
        shortfall = Shortfall(where="gpu", missing_bytes=GIB // 4, phase=phase)
        found = step_down(last, shortfall, before=before)
        if isinstance(found, NoWay):
            break
        before = (*before, Tried(way=way_of(last), shortfall=shortfall))
        last = found.plan
        now = (way_of(last).levers, way_of(last).world)
        assert now not in seen
        seen.append(now)
        for earlier in before:
            assert held(way_of(last), earlier.shortfall) < held(earlier.way, earlier.shortfall)
    else:
        raise AssertionError("no end")
    assert 2 <= len(seen) <= 12


def test_each_failure_on_a_side_asks_for_twice_the_margin_of_the_one_before() -> None:
    way = way_of(planned("qwen1.5-1.8b", machine("2x24GB", "100GB")))
    gpu = Tried(way=way, shortfall=Shortfall(where="gpu"))
    host = Tried(way=way, shortfall=Shortfall(where="host"))
    first = margin_bytes(gpu, (), Bounds())
    assert first == int(24 * GIB * MARGIN)
    assert margin_bytes(gpu, (gpu, host, gpu), Bounds()) == 4 * first
    half = held(way, host.shortfall) // 2
    assert margin_bytes(host, (gpu,), Bounds()) == min(int(100 * GIB * MARGIN), half)


def test_a_phase_that_is_small_beside_the_card_is_asked_for_half_of_it_at_the_most() -> None:
    answer = planned("tiny_llama", machine("2x24GB"))
    shortfall = Shortfall(where="gpu", phase="loss", missing_bytes=2**20)
    margin = margin_bytes(Tried(way=way_of(answer), shortfall=shortfall), (), Bounds())
    assert margin == (held(way_of(answer), shortfall) - 2**20) // 2 < 24 * GIB * MARGIN
    found = step_down(answer, shortfall)
    assert isinstance(found, StepDown)
    check(answer, found, shortfall)


def test_a_host_of_unknown_size_has_a_margin_too() -> None:
    way = way_of(planned("tiny_llama", machine("2x24GB", None)))
    assert margin_bytes(Tried(way=way, shortfall=Shortfall(where="host")), (), Bounds()) > 0


# --- what decides it ------------------------------------------------------------------------------


def test_what_tensors_could_have_had_bounds_every_phase() -> None:
    """The card holds no more in another phase than in the one that failed."""
    answer = planned("qwen1.5-0.5b", machine("1x24GB"))
    room = way_of(answer).footprint.gpu.peak_bytes // 2
    shortfall = Shortfall(where="gpu", missing_bytes=GIB // 4, phase="loss", room_bytes=room)
    found = step_down(answer, shortfall)
    assert isinstance(found, StepDown)
    gpu = way_of(found.plan).footprint.gpu
    assert max(gpu.peak_bytes, gpu.init_peak_bytes) <= room - int(24 * GIB * MARGIN)


def test_on_the_host_the_next_plan_holds_less_there() -> None:
    answer = planned("qwen2.5-7b", machine("2x24GB", "192GB"))
    assert way_of(answer).levers.streams
    shortfall = Shortfall(where="host", missing_bytes=8 * GIB)
    found = step_down(answer, shortfall)
    if isinstance(found, StepDown):
        check(answer, found, shortfall)
    else:
        assert found.remedies


def test_memory_that_may_not_be_locked_is_not_locked_any_more() -> None:
    answer = planned("qwen2.5-7b", machine("2x24GB", "192GB"))
    assert way_of(answer).levers.buckets.pin_memory
    found = step_down(answer, Shortfall(where="host", reason="pinned"))
    assert isinstance(found, StepDown)
    after = way_of(found.plan)
    assert not after.levers.buckets.pin_memory
    assert training(after) == training(way_of(answer))
    assert "pin memory on → off" in found.changed
    assert found.because[0].id == "plan.ran-out-of-locked"
    assert "plan.not-locked" in [said.id for said in found.because]
    again = Shortfall(where="host", reason="pinned")
    second = step_down(found.plan, again, before=(Tried(way=way_of(answer), shortfall=again),))
    if isinstance(second, StepDown):
        assert held(way_of(second.plan), again) < held(after, again)
        assert not way_of(second.plan).levers.buckets.pin_memory


def test_pieces_that_are_too_small_need_a_smaller_phase() -> None:
    answer = planned("qwen1.5-0.5b", machine("2x24GB"))
    shortfall = Shortfall(where="gpu", missing_bytes=GIB, phase="loss", reason="fragmentation")
    found = step_down(answer, shortfall)
    assert isinstance(found, StepDown)
    check(answer, found, shortfall)
    assert str(found.because[0]) == (
        "The last attempt found no 1.0 GiB in one piece of GPU memory at the loss: it was there, but in smaller pieces."
    )


def test_on_the_cpu_what_gpus_would_hold_is_host_memory() -> None:
    cpu = machine("2x8GB", "16GB")
    cpu = replace(cpu, gpu=replace(cpu.gpu, vendor="cpu", name="CPU"))
    answer = planned("qwen1.5-0.5b", cpu, method="lora", sequence=2048)
    shortfall = Shortfall(where="host", missing_bytes=GIB // 2)
    found = step_down(answer, shortfall)
    assert isinstance(found, StepDown)
    check(answer, found, shortfall)


def test_what_is_pinned_stays_and_what_was_named_is_said() -> None:
    levers = {
        "engine": "zero2",
        "micro_batch": 4,
        "checkpointing": "full",
        "loss": "fused",
        "offload_optimizer": "none",
    }
    answer = planned("qwen1.5-0.5b", machine("1x24GB"), levers={**levers, "reduce_bucket": 50_000_000})
    found = step_down(answer, Shortfall(where="gpu", missing_bytes=GIB, phase="backward"))
    assert isinstance(found, NoWay)
    assert any("--engine" in str(said) for said in found.because if said.id == "plan.without-pins")
    pinned = planned("qwen1.5-0.5b", machine("1x24GB"), levers={"engine": "zero2"})
    stepped = step_down(pinned, Shortfall(where="gpu", missing_bytes=GIB, phase="loss"))
    assert isinstance(stepped, StepDown)
    assert way_of(stepped.plan).levers.engine == "zero2"


def test_a_tier_gives_way_and_its_training_stays() -> None:
    job = Job(model="qwen1.5-1.8b", method="lora", tier="deepspeed", sequence=1024)
    answer = plan(job, preset("qwen1.5-1.8b"), machine("1x16GB"))
    before = way_of(answer)
    assert (before.levers.micro_batch, before.levers.accumulation) == (4, 4)
    found = step_down(answer, Shortfall(where="gpu", missing_bytes=GIB, phase="loss"))
    assert isinstance(found, StepDown)
    after = way_of(found.plan)
    assert after.effective_batch == 16
    assert after.levers.sequence == before.levers.sequence
    assert found.plan.job.tier == "deepspeed"


# --- what changes the training --------------------------------------------------------------------

SMALL_CARD = ("1x4GB", "8GB")


@pytest.mark.thorough
def test_nothing_costly_is_done_unasked_and_what_would_help_is_named() -> None:
    answer = planned("qwen1.5-0.5b", machine(*SMALL_CARD), method="lora", sequence=8192)
    found = step_down(answer, Shortfall(where="gpu", missing_bytes=2 * GIB))
    assert isinstance(found, NoWay)
    assert found.remedies
    order = get_args(Allowance)
    places = [order.index(remedy.allowance) for remedy in found.remedies]
    assert places == sorted(places)
    for remedy in found.remedies:
        assert any(f"--allow {remedy.allowance} would help: {remedy.cost}" in str(said) for said in found.because)
    allowed = replace(answer.job, limits=Limits(allow=(found.remedies[0].allowance,)))
    stepped = step_down(replace(answer, job=allowed), Shortfall(where="gpu", missing_bytes=2 * GIB))
    assert isinstance(stepped, StepDown)
    assert way_of(stepped.plan).levers == found.remedies[0].way.levers
    assert way_of(stepped.plan).changes == (found.remedies[0].cost,)
    assert found.remedies[0].cost in stepped.changed
    assert way_of(stepped.plan).effective_batch == answer.effective_batch


@pytest.mark.thorough
def test_a_change_that_was_made_before_is_kept() -> None:
    """What trains adapters by leave goes on training them, and says so."""
    job = Job(model="qwen2.5-7b", limits=Limits(allow=("lora",)))
    answer = plan(job, preset("qwen2.5-7b"), machine("1x24GB", "32GB"))
    before = way_of(answer)
    assert before.levers.method == "lora"
    found = step_down(answer, Shortfall(where="gpu", missing_bytes=GIB, phase=before.footprint.gpu.peak_phase))
    assert isinstance(found, StepDown)
    assert training(way_of(found.plan)) == training(before)
    assert len(way_of(found.plan).changes) == 1


# --- the search -----------------------------------------------------------------------------------


def taught(question: Question, error: int, *, another_way: bool = False) -> Calibration:
    """A run in the way that this question would choose, which took so much more, or less, than predicted."""
    best = search(question).best
    assert best is not None
    gpu = best.footprint.gpu
    predicted = gpu.phases[gpu.peak_phase].total_bytes
    measured = MeasuredPhase(
        where="gpu", phase=gpu.peak_phase, predicted_bytes=predicted, measured_bytes=max(1, predicted + error)
    )
    mark = way_mark(best.levers)
    entry = Entry(
        training=training_of(best.shape, best.levers, best.hardware),
        way=replace(mark, engine="other") if another_way else mark,
        data="data",
        sequence=best.levers.sequence,
        day="2026-01-01",
        measured=(measured,),
    )
    return Calibration(entries=(entry,), data="data")


def best_by_trying(question: Question) -> tuple[object, ...] | None:
    """Everything weighed, with calibration and caps."""
    found = None
    for asked, levers in candidates(question):
        step_s = pace(asked.shape, levers, asked.hardware).step_s
        rank = (round(step_s, 9), complexity(levers, asked.hardware.world))
        if found is not None and rank >= found[0]:
            continue
        if not excess_bytes(asked, weigh(asked, levers)):
            found = (rank, levers, asked.hardware.world)
    return found


@pytest.mark.slow
@pytest.mark.thorough
@properties(max_examples=15)
@given(
    question=questions(),
    share=st.sampled_from([0.5, 0.8, 0.95]),
    phase=st.sampled_from([*TRAINING, "init", "eval", "save", None]),
    where=st.sampled_from(["gpu", "gpu", "host"]),
    error=st.sampled_from([0.0, 0.1, -0.1, 0.4]),
    another_way=st.booleans(),
)
def test_with_caps_and_a_calibration_the_search_finds_what_trying_everything_does(
    question: Question, share: float, phase: PhaseName | None, where: Any, error: float, another_way: bool
) -> None:
    first = search(question).best
    if first is None:
        return
    size = phase_bytes(first.footprint, where, phase, first.hardware)
    asked = replace(
        question,
        caps=(Cap(where=where, phase=phase, most_bytes=int(size * share)),),
        calibration=taught(question, int(error * first.footprint.gpu.peak_bytes), another_way=another_way),
    )
    best, right = search(asked).best, best_by_trying(asked)
    assert something_fits(asked) == (right is not None)
    if right is None:
        assert best is None
        return
    assert best is not None
    assert (best.levers, best.world) == right[1:]


@pytest.mark.thorough
def test_a_failure_that_taught_something_is_corrected_into_both_plans() -> None:
    answer = planned("qwen1.5-0.5b", machine("1x24GB"))
    question = ask("qwen1.5-0.5b", machine("1x24GB"))
    calibration = taught(question, 2 * GIB)
    shortfall = Shortfall(where="gpu", missing_bytes=GIB, phase=way_of(answer).footprint.gpu.peak_phase)
    found = step_down(answer, shortfall, bounds=Bounds(calibration=calibration))
    assert isinstance(found, StepDown)
    after = way_of(found.plan)
    assert after.correction is not None
    assert any(str(said).startswith("Calibrated by +2.0 GiB from a run on 2026-01-01") for said in found.plan.because)
    assert found.less_bytes >= GIB + int(24 * GIB * MARGIN)
    assert after.footprint.gpu.required_bytes <= after.gpu_limit_bytes


def test_a_step_down_takes_no_longer_than_a_breath() -> None:
    shape = built("llama", 4, 512, 5000, False)
    answer = plan(Job(model=shape.name), shape, machine("2x24GB"))
    found = step_down(answer, Shortfall(where="gpu", missing_bytes=GIB // 64, phase="loss"))
    assert isinstance(found, StepDown | NoWay)
    if isinstance(found, StepDown):
        assert found.plan.search_s < 4


def test_the_plain_losss_own_backward_is_counted_with_the_loss() -> None:
    """It shows as one of the backward pass, which is far smaller where the vocabulary is large."""
    last = planned("qwen1.5-0.5b", machine("1x24GB"), levers={"loss": "plain", "checkpointing": "full"})
    way, failed = way_of(last), Shortfall(where="gpu", missing_bytes=GIB, phase="backward")
    phases = way.footprint.gpu.phases
    assert phases["loss"].total_bytes > phases["backward"].total_bytes
    assert locate(failed, way).phase == "loss"
    fused = replace(way, levers=replace(way.levers, loss="fused"))
    assert locate(failed, fused) == failed
    assert locate(replace(failed, where="host"), way).phase == "backward"
    assert locate(replace(failed, phase="step"), way).phase == "step"
