"""The question turned round: what is named fits, and the next larger does not."""

from __future__ import annotations

import pytest
from small_questions import fits, machine, preset

from tightfit.job import Job
from tightfit.model.presets import PRESETS
from tightfit.planner import plan
from tightfit.planner.limits import STEP_TOKENS, largest_micro_batch, largest_model, longest_sequence
from tightfit.types import ConfigError, Method

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("model", "method", "word", "pins"),
    [
        ("qwen1.5-0.5b", "lora", "1x2GB", {"engine": "zero2"}),
        pytest.param("qwen1.5-0.5b", "lora", "1x2GB", {}, marks=pytest.mark.slow),
        pytest.param("1b_mamba", "full", "2x24GB", {}, marks=pytest.mark.slow),
    ],
)
def test_the_longest_sequence_fits_and_the_next_does_not(
    model: str, method: Method, word: str, pins: dict[str, str]
) -> None:
    job, shape, hardware = Job(model=model, method=method, levers=pins), preset(model), machine(word, "64GB")
    found = longest_sequence(job, shape, hardware)
    assert isinstance(found.value, int)
    assert found.plan.chosen is not None
    assert found.plan.chosen.levers.sequence == found.value
    longer = Job(model=model, method=method, levers=pins, sequence=found.value + STEP_TOKENS)
    assert plan(longer, shape, hardware, every_gpu=True).chosen is None


def test_a_sequence_is_never_longer_than_the_model_was_made_for() -> None:
    found = longest_sequence(Job(model="tiny_llama"), preset("tiny_llama"), machine("1x24GB"))
    assert found.value == preset("tiny_llama").max_positions
    assert "memory alone would allow more" in " ".join(map(str, found.because))


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    job, shape, hardware = Job(model="qwen1.5-0.5b", method="lora"), preset("qwen1.5-0.5b"), machine("1x8GB", "32GB")
    found = largest_micro_batch(job, shape, hardware)
    assert isinstance(found.value, int)
    assert found.plan.chosen is not None
    assert found.plan.chosen.levers.micro_batch == found.value
    more = found.value + 1
    pins = {"micro_batch": more}
    assert not fits("qwen1.5-0.5b", hardware, method="lora", effective_batch=more, levers=pins)


def test_the_largest_model_fits_and_no_larger_one_does() -> None:
    job, hardware = Job(model="tiny_llama", method="lora"), machine("1x8GB", "24GB")
    found = largest_model(job, hardware)
    assert isinstance(found.value, str)
    assert found.plan.fits
    largest = preset(found.value).parameters
    for name in PRESETS:
        if preset(name).parameters > largest:
            assert not fits(name, hardware, method="lora")


def test_where_not_even_the_smallest_fits_it_is_said() -> None:
    job, hardware = Job(model="qwen1.5-1.8b", levers={"engine": "zero2"}), machine("1x1GB", "1GB")
    assert longest_sequence(job, preset("qwen1.5-1.8b"), hardware).value is None
    assert largest_micro_batch(job, preset("qwen1.5-1.8b"), hardware).value is None
    assert largest_model(job, hardware).value is None


def test_a_pinned_micro_batch_contradicts_asking_for_the_largest() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        largest_micro_batch(Job(model="tiny_llama", levers={"micro_batch": 1}), preset("tiny_llama"), machine("1x24GB"))
