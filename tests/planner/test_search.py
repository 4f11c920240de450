"""The choice is the best there is under its own prices, whatever the order in which candidates come.

`brute_force.py` prices every candidate; here its answer and the search's are compared, rank, levers and all, on
machines whose cards are cut to sizes at which something just fits or just does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import brute_force
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_questions import GIB, ask, built, card, corners_of_any_job, machine, properties, questions, seeded

from tightfit.inputs.flags import checkpointing_from_word
from tightfit.job import Job, Machine
from tightfit.memory import Scale, estimate, required_bytes, totals_of
from tightfit.pace import Clock, KernelChoice, pace
from tightfit.planner import candidates, plan
from tightfit.planner.ladder import FULL, OFFLOADED, Ladder, from_below, in_a_valley, past_a_floor
from tightfit.planner.question import Question
from tightfit.planner.search import rank, something_fits
from tightfit.types import Checkpointing, Compile, Gpu, Hardware, Levers, ModelShape

search = import_module("tightfit.planner.search")  # the package has a function of this name


def chosen(question: Question) -> brute_force.Chosen | None:
    best = search.search(question).best
    return None if best is None else (rank(best), best.levers, best.world)


def sizes(question: Question, count: int, seed: int) -> list[int]:
    """Sizes of cards at which one of the candidates has exactly room, or a byte too little."""
    needs = set()
    for asked, levers in seeded(seed).sample(list(brute_force.candidates(question)), 40):
        needs.add(estimate(asked.shape, levers, asked.hardware.world, asked.hardware).gpu.required_bytes)
    least = sorted(needs)[: 2 * count]
    picked = seeded(seed).sample(least, min(count, len(least)))
    return [int(need / (1 - question.margin)) + 1 - index % 2 for index, need in enumerate(picked)]


QUESTIONS: dict[str, Callable[[], Question]] = {
    "llama, two GPUs": lambda: ask(built("llama", 4, 512, 5000, True), machine("2x24GB"), levers={"attention": "sdpa"}),
    "mamba, one GPU": lambda: ask(
        built("mamba", 3, 512, 5000, True), machine("1x24GB", "16GB"), levers={"attention": "sdpa"}
    ),
    "adapters, three GPUs": lambda: ask(
        built("llama", 3, 1024, 5000, False), machine("3x24GB", "16GB"), method="lora", levers={"attention": "sdpa"}
    ),
    "windows, short sequences": lambda: ask(
        built("gemma3_text", 7, 256, 5000, True), machine("2x24GB"), sequence=64, levers={"loss": "plain"}
    ),
    "zero3 alone, 4-bit": lambda: ask(
        built("gpt_neox", 6, 1024, 128, False), machine("4x24GB"), method="qlora", levers={"engine": "zero3"}
    ),
    "the host is small": lambda: ask(
        built("llama", 3, 2048, 5000, True), machine("4x24GB", "8GB"), levers={"attention": "sdpa", "loss": "fused"}
    ),
    "a selection, on the card or on the host": lambda: ask(
        built("llama", 6, 2048, 5000, True),
        machine("2xa100-40gb", "24GB"),
        levers={"checkpointing": "select:auto", "attention": "sdpa", "loss": "fused", "engine": "ddp"},
        effective_batch=8,
        sequence=4096,
    ),
    "layers stream": lambda: ask(
        built("llama", 4, 2048, 5000, True),
        machine("1x24GB", "16GB"),
        levers={"engine": "stream", "attention": "sdpa", "loss": "fused"},
        effective_batch=4,
    ),
    "more layers stream": lambda: ask(
        built("llama", 6, 2048, 5000, True),
        machine("1x24GB", "16GB"),
        levers={"engine": "stream", "attention": "sdpa", "loss": "fused"},
        effective_batch=4,
    ),
    "some states of layers that stream are on an NVMe": lambda: ask(
        built("llama", 6, 2048, 5000, True),
        machine("1x24GB", "6GB", "20GB"),
        levers={"engine": "stream", "attention": "sdpa", "loss": "fused"},
        effective_batch=4,
    ),
    "frozen layers stream, and the host cannot hold them all": lambda: ask(
        built("llama", 6, 2048, 5000, False),
        machine("1x24GB", "2GB"),
        method="lora",
        levers={"engine": "stream", "attention": "sdpa", "loss": "fused"},
        effective_batch=4,
    ),
    "pinned depth": lambda: ask(
        built("mamba2", 3, 512, 5000, True), machine("2x24GB"), levers={"checkpointing": "layers:1"}
    ),
    "NVMe and two nodes": lambda: ask(
        built("llama", 2, 1024, 128, False), machine("2x2x24GB", "9GB", "1GB"), levers={"attention": "sdpa"}
    ),
}

QUICK = [name for name in QUESTIONS if name.startswith(("pinned depth", "a selection", "frozen layers stream, and"))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in QUESTIONS],
)
def test_the_choice_is_that_of_trying_everything(name: str) -> None:
    question = QUESTIONS[name]()
    answers = []
    for size in sizes(question, 2, seed=len(name)):
        asked = replace(question, hardware=card(question.hardware, size))
        answers.append(brute_force.best(asked))
        assert chosen(asked) == answers[-1]
        assert something_fits(asked) == (answers[-1] is not None)
    assert any(answers)  # a machine on which nothing ever fits would prove nothing


@pytest.mark.slow
@properties(max_examples=30)
@given(questions(), st.integers(0, 99))
def test_the_choice_is_that_of_trying_everything_anywhere(question: Question, seed: int) -> None:
    for size in sizes(question, 3, seed):
        asked = replace(question, hardware=card(question.hardware, size))
        expected = brute_force.best(asked)
        assert chosen(asked) == expected
        assert something_fits(asked) == (expected is not None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seed", [4, 38, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(4), *range(5, 38)))]
)
def test_what_streams_and_may_send_is_as_fast_as_trying_everything(seed: int) -> None:
    """On a card that one way fills, and on a host that another one fills, which sends."""
    random = seeded(seed)
    hidden = random.choice([1024, 2048])
    shape = built(
        random.choice(["llama", "llama", "gemma3_text", "gpt_neox"]),
        random.randint(3, 6),
        hidden,
        random.choice([5000, 50_000]),
        random.random() < 0.5,
    )
    method = random.choice(["lora", "lora", "full"])
    question = ask(
        shape,
        machine(random.choice(["1xRTX4090", "1xRTX4090", "2xRTX4090", "1xH100"]), "64GB"),
        method=method,
        sequence=random.choice([2048, 4096, 8192]),
        effective_batch=random.choice([4, 8]),
        levers={"engine": "stream", "attention": "sdpa", "loss": "fused"},
    )
    ways = list(brute_force.candidates(question))
    held, sent = (
        estimate(asked.shape, levers, asked.hardware.world, asked.hardware)
        for asked, levers in (random.choice(ways), random.choice([way for way in ways if way[1].checkpointing.offload]))
    )
    size = int(held.gpu.required_bytes / (1 - question.margin)) + 1
    ram = int(sent.host.peak_bytes_per_node * random.choice([1, 1 / 0.9, 1.05, 2])) + 1
    asked = replace(question, hardware=replace(card(question.hardware, size), host_ram_bytes=ram))
    found, expected = chosen(asked), brute_force.best(asked)
    assert something_fits(asked) == (expected is not None)
    assert (None if found is None else found[0][0]) == (None if expected is None else expected[0][0])


# --- in any order -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", ["llama, two GPUs", "adapters, three GPUs"])
def test_the_order_of_candidates_does_not_matter(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    question = QUESTIONS[name]()
    asked = replace(question, hardware=card(question.hardware, sizes(question, 6, seed)[-1]))
    before = chosen(asked)
    strategies, corners = search.strategies, search.corners

    def shuffle(made: list[Any]) -> list[Any]:
        """Alike each time, as long lists are shared out by place."""
        return seeded(seed).sample(made, len(made))

    monkeypatch.setattr(search, "strategies", lambda *given: shuffle(strategies(*given)))
    monkeypatch.setattr(search, "corners", lambda *given: shuffle(list(corners(*given))))
    assert chosen(asked) == before is not None


@pytest.mark.thorough
def test_no_two_candidates_are_equally_simple() -> None:
    """Equally fast ways would otherwise be told apart by their place in a list."""
    question = QUESTIONS["llama, two GPUs"]()
    ranks: dict[tuple[int, ...], Any] = {}
    for asked, levers in brute_force.candidates(question):
        simple = candidates.complexity(levers, asked.hardware.world)
        assert ranks.setdefault(simple, levers) == levers
    assert len(ranks) > 1000


# --- what the search takes for granted ----------------------------------------------------------


@pytest.mark.thorough
@properties()
@given(corners_of_any_job(streams=False))
def test_more_recomputing_layers_never_make_a_step_faster(drawn: tuple[Question, candidates.Corner]) -> None:
    question, corner = drawn
    times = Clock(question.shape, corner.levers, question.hardware).times(corner.rest, corner.choice)
    for depth, seconds in enumerate(times):
        levers = replace(corner.levers, checkpointing=replace(corner.rest.checkpointing, layers=depth))
        assert pace(question.shape, levers, question.hardware).step_s == pytest.approx(seconds, rel=1e-12)
    assert list(times) == sorted(times)
    offloaded = replace(corner.levers, checkpointing=OFFLOADED)
    assert not corner.is_whole or pace(question.shape, offloaded, question.hardware).step_s >= times[-1] * (1 - 1e-12)


@pytest.mark.thorough
@properties()
@given(corners_of_any_job(streams=False))
def test_arithmetic_alone_takes_no_longer_than_the_gpus_own_work(drawn: tuple[Question, candidates.Corner]) -> None:
    question, corner = drawn
    clock = Clock(question.shape, corner.levers, replace(question.hardware, nodes=1, gpus_per_node=1))
    sequences = corner.rest.micro_batch * corner.rest.accumulation
    assert clock.least_s(sequences) <= clock.own_s(corner.rest, corner.choice)


@pytest.mark.thorough
@properties()
@given(corners_of_any_job())
def test_the_need_of_every_engine_but_zero3_is_a_valley(drawn: tuple[Question, candidates.Corner]) -> None:
    """From the first recomputing layer on it falls with each, then rises by no more than a layer's input."""
    question, corner = drawn
    _, *needs = needs_by_depth(question, corner)
    assume(corner.levers.engine != "zero3")
    bottom = needs.index(min(needs))
    assert needs[: bottom + 1] == sorted(needs[: bottom + 1], reverse=True)
    assert needs[bottom:] == sorted(needs[bottom:])
    assert needs[-1] - min(needs) <= Ladder(question, corner)._rise // (1 + len(question.caps))


@pytest.mark.thorough
@properties()
@given(corners_of_any_job())
def test_no_engine_needs_less_than_its_floors(drawn: tuple[Question, candidates.Corner]) -> None:
    """They only fall from the first recomputing layer on. Nor is the floor of larger buckets below that of smaller
    ones, which stands for all."""
    question, corner = drawn
    depths = [*(Checkpointing(layers=count) for count in range(question.shape.n_layers)), FULL]
    floors = floors_by_depth(question, corner, depths)
    assert all(floor <= need for floor, need in zip(floors, needs_by_depth(question, corner), strict=True))
    falling = floors[1 + corner.levers.frozen_layers :]  # before, nothing recomputes
    assert falling == sorted(falling, reverse=True)
    choices = candidates.bucket_choices(corner.levers, question.pinned, question.hardware)
    least = min(choices, key=candidates._buffers)
    smallest = replace(
        corner.choice.buckets,
        reduce_bucket=least.reduce_bucket,
        allgather_bucket=least.allgather_bucket,
        overlap_comm=least.overlap_comm,
    )
    alike = replace(corner, choice=corner.choice._replace(buckets=smallest))
    assert all(low <= own for low, own in zip(floors_by_depth(question, alike, depths), floors, strict=True))


@pytest.mark.thorough
@properties()
@given(corners_of_any_job())
def test_a_scale_weighs_what_an_estimate_does(drawn: tuple[Question, candidates.Corner]) -> None:
    question, corner = drawn
    scale = Scale(question.shape, corner.levers, question.hardware)
    for depth in (*(Checkpointing(layers=count) for count in range(question.shape.n_layers)), FULL, OFFLOADED):
        levers = replace(corner.levers, checkpointing=depth)
        footprint = estimate(question.shape, levers, question.hardware.world, question.hardware)
        assert scale.totals(depth) == totals_of(footprint)
        at_loss, at_top = scale.floor.held(depth)
        assert at_loss <= footprint.gpu.phases["loss"].total_bytes
        assert at_top <= footprint.gpu.phases["backward"].total_bytes
        assert scale.floor.after <= footprint.gpu.peak_bytes


def floors_by_depth(question: Question, corner: candidates.Corner, depths: list[Checkpointing]) -> list[int]:
    floor = Scale(question.shape, corner.levers, question.hardware).floor
    return [required_bytes(max(floor.held(depth)), question.hardware, corner.levers.groups) for depth in depths]


def needs_by_depth(question: Question, corner: candidates.Corner) -> list[int]:
    depths = [*(Checkpointing(layers=count) for count in range(question.shape.n_layers)), FULL]
    world, hardware = question.hardware.world, question.hardware
    each = [estimate(question.shape, replace(corner.levers, checkpointing=d), world, hardware) for d in depths]
    return [footprint.gpu.required_bytes for footprint in each]


def test_under_zero3_fewer_recomputing_layers_can_need_less() -> None:
    """What is gathered depends on what is fetched next: why `past_a_floor` tries every depth."""
    question = ask(built("mamba2", 3, 4096, 5000, True), machine("8x24GB"), method="lora", sequence=16)
    base = next(levers for levers in search.list_strategies(question) if levers.engine == "zero3")
    needs = needs_by_depth(question, next(search._corners(question, base)))
    assert needs[0] < min(needs[1:])


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=33), st.integers(0, 33), st.integers(0, 60), st.integers(0, 33)
)
@settings(derandomize=True)
def test_the_first_fit_of_a_valley(falls: list[int], turn: int, limit: int, known: int) -> None:
    falling = sorted(falls[: turn + 1], reverse=True)
    needs = [*falling, *sorted(max(need, falling[-1]) for need in falls[turn + 1 :])]
    last = len(needs) - 1
    expected = next((index for index, need in enumerate(needs) if need <= limit), None)

    def excess(index: int) -> int:
        return max(0, needs[index] - limit)

    assert in_a_valley(excess, last, rise=50) == expected
    low = min(known, last if expected is None else expected)  # nothing fits before
    assert from_below(excess, low, last, rise=50) == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=33), st.integers(0, 60))
@settings(derandomize=True)
def test_the_first_fit_past_a_floor(needs: list[int], limit: int) -> None:
    floors = [min(needs[: index + 1]) // 2 for index in range(len(needs))]
    asked: list[int] = []

    def excess(index: int) -> int:
        asked.append(index)
        return max(0, needs[index] - limit)

    found = past_a_floor(excess, len(needs) - 1, lambda index: max(0, floors[index] - limit))
    assert found == next((index for index, need in enumerate(needs) if need <= limit), None)
    assert all(floors[index] <= limit for index in asked if index)


@pytest.mark.parametrize("layers", [1, 2, 33, 126])
def test_depths_go_from_none_to_all(layers: int) -> None:
    def depths(depth: str, *, how: Compile = "layers", partial: bool = True) -> tuple[int, ...]:
        rest = Levers(checkpointing=checkpointing_from_word(depth), compile=how)
        choice = KernelChoice(rest.attention, rest.scan, rest.buckets)
        return candidates.Corner(rest, choice, searched=True).depths(layers, partial=partial)

    every = tuple(range(layers + 1))
    assert depths("full") == depths("select:mlp") == depths("select:elementwise", how="off") == every
    assert depths("full", partial=False) == depths("select:elementwise") == (0, layers)
    # the top layer keeps its own, whether it is told to send it or not
    assert depths("select:elementwise+offload") == (*every[: layers - 1], layers)


@pytest.mark.thorough
@pytest.mark.parametrize("hardware", ["8xRTX4090", "1x24GB", "4xA100-80GB"])
def test_another_trainer_recomputes_all_layers_or_none(hardware: str) -> None:
    job = Job(model="qwen2.5-7b", method="lora", hardware=Machine(gpus=hardware, host_ram="256GB"))
    mine, others = plan(job), plan(job, partial=False)
    assert mine.chosen is not None
    assert others.chosen is not None
    for way in (others.chosen, *others.alternatives):
        assert way.levers.checkpointing.layers in (0, None)
    assert mine.chosen.pace.step_s <= others.chosen.pace.step_s


@pytest.mark.thorough
def test_every_gpu_means_every_gpu() -> None:
    """Where fewer would do better, or are all that fits."""
    job = Job(model="tiny_llama", effective_batch=8, hardware=Machine(gpus="8xRTX4090", host_ram="64GB"))
    free, bound = plan(job), plan(job, every_gpu=True)
    assert free.chosen is not None
    assert free.chosen.world < 8
    assert bound.chosen is not None
    assert bound.chosen.world == 8


def test_both_ranks_of_the_cpu_run() -> None:
    cpu = Gpu(name="CPU", vendor="cpu", memory_bytes=8 * 2**30)
    answer = plan(Job(model="tiny_llama"), hardware=Hardware(gpu=cpu, gpus_per_node=2))
    assert answer.chosen is not None
    assert answer.chosen.world == 2


# --- what was pinned ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pins",
    [
        {"engine": "fsdp2"},
        {"engine": "zero3", "offload_param": "cpu", "offload_optimizer": "none"},
        {"micro_batch": 2},
        {"accum": 4},
        {"micro_batch": 2, "accum": 3},
        {"checkpointing": "layers:1"},
        {"checkpointing": "full+offload"},
        {"loss": "plain", "attention": "eager"},
        {"reduce_bucket": 7_000_000},
    ],
    ids=str,
)
def test_a_pinned_lever_is_kept_on_any_number_of_gpus(pins: dict[str, Any]) -> None:
    question = ask(built("llama", 4, 512, 5000, True), machine("3x24GB"), levers=pins)
    ways = search.search(question).ways
    assert ways
    for way in ways:
        assert way.effective_batch == question.effective_batch
        for name in question.pinned - {"buckets"}:
            assert getattr(way.levers, name) == getattr(question.base, name)
        assert way.levers.buckets == question.base.buckets or "buckets" not in question.pinned


def test_a_pinned_micro_batch_never_changes_the_batch_on_fewer_gpus() -> None:
    """Four of twelve sequences a GPU: two GPUs would have six each, which four does not divide."""
    question = ask(built("llama", 4, 512, 5000, True), machine("3x24GB"), levers={"micro_batch": 4})
    for asked, levers in brute_force.candidates(question):
        assert levers.micro_batch * levers.accumulation * asked.hardware.world == question.effective_batch


@pytest.mark.thorough
def test_a_shape_from_the_smallest_card_up() -> None:
    """Nothing fits, then everything does, and in between the choice only gets faster."""
    shape: ModelShape = built("llama", 4, 512, 5000, True)
    question = ask(shape, machine("2x24GB"))
    steps = []
    for tenths in range(7, 43, 4):
        best = search.search(replace(question, hardware=card(question.hardware, tenths * GIB // 10))).best
        steps.append(None if best is None else best.pace.step_s)
    fitting = [step for step in steps if step is not None]
    assert steps == [None] * (len(steps) - len(fitting)) + sorted(fitting, reverse=True)
    assert steps[0] is None
    assert len(set(fitting)) > 2
