"""More never hurts: a bigger card, more GPUs or more host RAM never give a slower plan or lose a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_questions import GIB, ask, built, card, corners_of_any_job, machine, properties, seeded

from tightfit.memory import estimate
from tightfit.planner.candidates import Corner
from tightfit.planner.plan import Way
from tightfit.planner.question import Question, excess_bytes
from tightfit.planner.search import search
from tightfit.planner.stream import WORTH
from tightfit.types import Hardware, Levers

pytestmark = pytest.mark.thorough

SLACK = 1 + 1e-9
"""The same sum in another order."""


def best(question: Question) -> Way | None:
    return search(question).best


def never_worse(ways: list[Way | None]) -> None:
    """Once something fits it goes on fitting, and never takes longer; but layers that stream leave the card alone
    where that costs next to nothing."""
    fitting = [way for way in ways if way is not None]
    assert [way is not None for way in ways] == [False] * (len(ways) - len(fitting)) + [True] * len(fitting)
    for smaller, larger in pairwise(fitting):
        assert larger.pace.step_s <= smaller.pace.step_s * (1 + WORTH if larger.levers.streams else SLACK)


# --- a bigger card ------------------------------------------------------------------------------


@properties()
@given(corners_of_any_job(), st.sampled_from([0.0, 0.04, 0.3]), st.integers(0, 10**6))
def test_what_fits_a_card_fits_a_bigger_one(drawn: tuple[Question, Corner], margin: float, seed: int) -> None:
    question, corner = drawn
    need = estimate(question.shape, corner.levers, question.hardware.world, question.hardware).gpu.required_bytes
    random = seeded(seed)
    sizes = sorted(int(need * random.uniform(0.6, 1.6)) for _ in range(40))
    fits = []
    for size in sizes:
        hardware = card(question.hardware, size)
        footprint = estimate(question.shape, corner.levers, hardware.world, hardware)
        fits.append(excess_bytes(replace(question, hardware=hardware, margin=margin), footprint) == 0)
    assert fits == sorted(fits)


def test_a_card_with_room_for_a_second_copy_of_the_weights_loses_nothing() -> None:
    """DeepSpeed flattens on the GPU where it has room, so what it takes jumps with the size of the card."""
    question = ask("qwen2.5-7b", machine("8x24GB"))
    levers = replace(question.base, engine="zero2", offload_optimizer="cpu", micro_batch=1, accumulation=4)
    needs = {}
    for hundredths in range(2400, 3600, 3):
        hardware = card(question.hardware, hundredths * GIB // 100)
        needs[hundredths] = estimate(question.shape, levers, 8, hardware).gpu.required_bytes
        assert needs[hundredths] <= max(0.96 * hardware.gpu.memory_bytes, needs[2400])
    assert max(needs.values()) > min(needs.values())  # the jump is there


SCALES = [("qwen1.5-0.5b", "2x24GB", 3, 12), pytest.param("qwen1.5-1.8b", "1x24GB", 5, 24, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("model", "word", "first", "last"), SCALES)
def test_a_bigger_card_is_never_slower(model: str, word: str, first: int, last: int) -> None:
    question = ask(model, machine(word))
    sizes = [first * GIB + step * (last - first) * GIB // 8 for step in range(9)]
    ways = [best(replace(question, hardware=card(question.hardware, size))) for size in sizes]
    never_worse(ways)
    assert len({way.levers for way in ways if way}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model", ["qwen1.5-0.5b", "3b_mamba_lite", "qwen2.5-7b", "gemma-3-27b"])
@pytest.mark.parametrize("word", ["1x24GB", "4xA100-80GB"])
def test_a_bigger_card_is_never_slower_even_by_a_little(model: str, method: str, word: str) -> None:
    """Large steps, and tiny ones on both sides of every change of plan."""
    question = ask(model, machine(word), method=method)

    def at(size: int) -> Way | None:
        return best(replace(question, hardware=card(question.hardware, size)))

    found = {size * GIB: at(size * GIB) for size in (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)}
    for low, high in pairwise(sorted(found)):
        if levers_of(found[low]) != levers_of(found[high]):
            found |= around_the_change(at, low, high)
    never_worse([found[size] for size in sorted(found)])


def levers_of(way: Way | None) -> Levers | None:
    return None if way is None else way.levers


def around_the_change(at: Callable[[int], Way | None], low: int, high: int) -> dict[int, Way | None]:
    """What is chosen ever nearer to the size at which the choice of `low` is given up, to a MiB."""
    found: dict[int, Way | None] = {}
    before = levers_of(at(low))
    while high - low > 2**20:
        middle = (low + high) // 2
        found[middle] = at(middle)
        low, high = (middle, high) if levers_of(found[middle]) == before else (low, middle)
    return found


# --- more GPUs ----------------------------------------------------------------------------------

COUNTS = (1, 2, 3, 4, 6, 8)


def with_gpus(model: str, hardware: Hardware, method: str, batch: int | None) -> list[Way | None]:
    asked = [
        ask(model, replace(hardware, gpus_per_node=count), method=method, effective_batch=batch) for count in COUNTS
    ]
    return [best(question) for question in asked]


FEW = [("qwen1.5-1.8b", "full", "1x24GB")]
MANY = [
    ("qwen1.5-0.5b", "lora", "1x4GB"),
    *(
        (model, method, word)
        for model in ("qwen1.5-0.5b", "1b_mamba", "qwen2.5-7b", "7b_mamba", "qwen2.5-32b")
        for method in ("full", "lora")
        for word in ("1x8GB", "1xRTX4090", "1xA100-80GB")
    ),
]


@pytest.mark.parametrize(
    ("model", "method", "word"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY)],
)
def test_more_gpus_are_never_slower(model: str, method: str, word: str) -> None:
    """A fixed batch takes no longer; with the usual one, four sequences a GPU, no fewer tokens are trained a second."""
    never_worse(with_gpus(model, machine(word), method, 24))
    usual = with_gpus(model, machine(word), method, None)
    rates = [0.0 if way is None else way.pace.tokens_per_s for way in usual]
    assert rates == pytest.approx(sorted(rates), rel=1e-9)


def test_a_short_host_is_helped_by_using_fewer_gpus() -> None:
    """Every process takes host RAM of its own: where eight do not fit the host, fewer GPUs do the job."""
    question = ask("qwen1.5-0.5b", machine("8x24GB", "8GB"), method="lora")
    way = best(question)
    assert way is not None
    assert way.world < 8
    assert way.effective_batch == question.effective_batch == 32
    assert way.footprint.host.peak_bytes_per_node <= 8 * GIB


def test_two_nodes_are_never_slower_than_one() -> None:
    one, two = (
        ask(built("llama", 4, 1024, 5000, True), machine(word), effective_batch=16) for word in ("4x24GB", "2x4x24GB")
    )
    never_worse([best(one), best(two)])


# --- more host RAM ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "word"), [("qwen1.5-1.8b", "2x8GB"), pytest.param("7b_mamba", "4x24GB", marks=pytest.mark.slow)]
)
def test_more_host_ram_is_never_slower(model: str, word: str) -> None:
    sizes = ["2GB", "16GB", "32GB", "48GB", "64GB", "128GB", "256GB", None]
    ways = [best(ask(model, machine(word, size))) for size in sizes]
    never_worse(ways)
    assert ways[0] is None
    assert ways[-1] is not None


def test_an_explicit_margin_is_kept_and_a_larger_one_is_never_faster() -> None:
    question = ask("qwen1.5-0.5b", machine("1x12GB"))
    ways = [best(replace(question, margin=share)) for share in (0.8, 0.5, 0.2, 0.04, 0.0)]
    never_worse(ways)
    for way, share in zip(ways, (0.8, 0.5, 0.2, 0.04, 0.0), strict=True):
        if way is not None:
            assert way.footprint.gpu.peak_bytes < way.hardware.gpu.memory_bytes * (1 - share)


def test_the_base_is_the_users_training() -> None:
    """No way changes what is trained."""
    question = ask("qwen1.5-0.5b", machine("2x8GB"), method="lora", sequence=1024)
    free = {"engine", "offload_optimizer", "offload_param", "checkpointing", "loss", "attention", "scan"}
    free |= {"micro_batch", "accumulation", "buckets", "compile", "kernels"}
    for way in search(question).ways:
        kept = {name: getattr(way.levers, name) for name in Levers.__slots__ if name not in free}
        assert kept == {name: getattr(question.base, name) for name in kept}
        assert way.effective_batch == question.effective_batch
