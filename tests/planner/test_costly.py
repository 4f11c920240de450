"""What changes the training is never done unasked; when nothing else fits, the cheapest such change is named."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from small_questions import ask, fits, machine, preset

from tightfit.job import Adapters, Allowance, Job, Limits, Machine
from tightfit.messages import LANGUAGES, Message
from tightfit.model.presets import PRESETS
from tightfit.planner import costly, plan
from tightfit.planner.plan import Plan
from tightfit.types import ConfigError, Hardware

pytestmark = pytest.mark.thorough

ORDER = get_args(Allowance)


def planned(model: str, hardware: Hardware, *allow: Allowance, **job: Any) -> Plan:
    return plan(Job(model=model, limits=Limits(allow=allow), **job), preset(model), hardware)


SHORT = machine("4x12GB", "48GB")
"""Neither the cards nor the host can hold a 7B's optimizer."""


@pytest.fixture(scope="module")
def refused() -> Plan:
    return planned("7b_mamba", SHORT)


def test_nothing_costly_is_done_unasked(refused: Plan) -> None:
    assert not refused.fits
    assert refused.remedies
    for way in refused.alternatives:
        assert (way.levers.method, way.levers.sequence, way.levers.optimizer) == ("full", 2048, "adamw")
        assert way.effective_batch == refused.effective_batch == 16
        assert not way.changes


def test_the_cheapest_change_is_named_first(refused: Plan) -> None:
    places = [ORDER.index(remedy.allowance) for remedy in refused.remedies]
    assert places == sorted(places)
    said = " ".join(map(str, refused.because))
    assert f"The mildest change that would fit is --allow {refused.remedies[0].allowance}" in said
    assert f"{refused.gpus_needed} of these GPUs would do" in said
    assert "The nearest is" in said


def test_changes_are_ranked_by_what_they_do_to_the_result() -> None:
    """Pure 16-bit training loses updates: it was offered before 8-bit states, and only another model changes more."""
    answer = planned("qwen1.5-1.8b", machine("1x24GB", "8GB"))
    named = [remedy.allowance for remedy in answer.remedies]
    assert named == ["8bit-optimizer", "lora", "pure-16bit", "smaller-model"]
    said = " ".join(map(str, answer.because))
    assert all(f"{remedy.cost}; {remedy.effect} (" in said for remedy in answer.remedies)
    assert "updates below its precision are lost" in said
    assert ORDER[-2:] == ("pure-16bit", "smaller-model")


def test_updates_that_stream_are_rounded_and_not_lost() -> None:
    allowed: tuple[Allowance, ...] = ("pure-16bit",)
    streamed = planned("qwen1.5-1.8b", machine("1xRTX4090", "28GB"), *allowed, levers={"engine": "stream"})
    assert streamed.chosen is not None
    (change,) = streamed.chosen.changes
    (remedy,) = costly.mildest_changes(
        ask("qwen1.5-1.8b", machine("1xRTX4090", "28GB"), levers={"engine": "stream"}), allowed
    )
    assert remedy.cost == change
    for language in LANGUAGES:
        said = " ".join(each.text(language) for each in (remedy.cost, remedy.effect) if isinstance(each, Message))
        assert {"en": "at random", "zh": "随机"}[language] in said
        assert not any(word in said for word in ("are lost", "都小到会丢失"))


def test_each_remedy_fits_when_it_is_allowed(refused: Plan) -> None:
    for remedy in refused.remedies:
        answer = planned("7b_mamba", SHORT, remedy.allowance)
        assert answer.chosen is not None
        assert answer.chosen.levers == remedy.way.levers
        assert answer.chosen.changes == (remedy.cost,)
        assert answer.chosen.effective_batch == 16
        assert Message("plan.changes-training", change=remedy.cost) in answer.because


def test_what_would_not_help_alone_is_not_named(refused: Plan) -> None:
    named = {remedy.allowance for remedy in refused.remedies}
    assert not named & {"lora-rank", "lora-targets", "quantize"}  # full training has no adapters, no frozen weights
    assert costly.mildest_changes(ask("7b_mamba", SHORT), ("lora-rank", "lora-targets", "quantize")) == ()


def test_of_several_allowed_the_cheapest_is_taken() -> None:
    answer = planned("7b_mamba", SHORT, "smaller-model", "lora")
    assert answer.chosen is not None
    assert answer.chosen.levers.method == "lora"
    assert answer.chosen.shape.name == "7b_mamba"


def test_an_allowance_is_not_used_where_nothing_need_change() -> None:
    answer = planned("qwen1.5-0.5b", machine("1x24GB"), *ORDER)
    assert answer.chosen is not None
    assert answer.chosen.levers.method == "full"
    assert answer.chosen.changes == ()


def test_4_bit_weights_need_adapters_as_well() -> None:
    hardware = machine("1x24GB", "32GB")
    question = ask("qwen2.5-32b", hardware)
    assert costly.mildest_changes(question, ("quantize",)) == costly.mildest_changes(question, ("lora",)) == ()
    both = planned("qwen2.5-32b", hardware, "quantize", "lora")
    assert both.chosen is not None
    assert both.chosen.levers.method == "qlora"
    assert len(both.chosen.changes) == 2


def test_where_no_single_change_helps_a_pair_is_named() -> None:
    (found,) = costly.remedies(ask("gemma-3-27b", machine("1x24GB", "32GB")))
    assert found.allowance == "lora"
    assert str(found.cost) == (
        "trains adapters of rank 8 instead of every weight, "
        "together with --allow quantize: the frozen weights have 4 bits (NF4) instead of 16"
    )
    assert found.way.levers.method == "qlora"


def test_adapters_are_those_of_the_job() -> None:
    answer = planned("7b_mamba", SHORT, "lora", lora=Adapters(rank=32, targets=("in_proj",)))
    assert answer.chosen is not None
    assert answer.chosen.levers.lora is not None
    assert (answer.chosen.levers.lora.rank, answer.chosen.levers.lora.targets) == (32, ("in_proj",))
    assert "rank 32" in str(answer.chosen.changes[0])


def test_embeddings_alone_are_not_turned_into_adapters() -> None:
    assert list(costly.changes(ask(preset("tiny_llama"), SHORT), "lora"))
    assert not list(costly.changes(ask(preset("tiny_llama"), SHORT, trains="embeddings"), "lora"))


def test_the_longest_sequence_that_fits_is_kept() -> None:
    hardware = machine("1x2GB", "8GB")
    answer = planned("qwen1.5-0.5b", hardware, "shorter-seq", method="lora", sequence=32768)
    assert answer.chosen is not None
    sequence = answer.chosen.levers.sequence
    assert sequence % 128 == 0
    assert sequence < 32768
    assert fits("qwen1.5-0.5b", hardware, method="lora", sequence=sequence)
    assert not fits("qwen1.5-0.5b", hardware, method="lora", sequence=sequence + 128)
    assert f"cut at {sequence} tokens instead of 32768" in str(answer.chosen.changes[0])
    skipped = planned("qwen1.5-0.5b", hardware, "skip-data", method="lora", sequence=32768)
    assert skipped.chosen is not None
    assert skipped.chosen.levers.sequence == sequence
    assert f"longer than {sequence} tokens are left out" in str(skipped.chosen.changes[0])


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_a_smaller_model_stays_in_the_family(name: str) -> None:
    shape = preset(name)
    smaller = costly.smaller_models(shape)
    assert all(other.model_type == shape.model_type for other in smaller)
    sizes = [other.parameters for other in smaller]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size < shape.parameters for size in sizes)


@pytest.mark.parametrize(
    ("model", "word", "ram", "batch"),
    [
        ("7b_mamba", "4x24GB", "64GB", None),
        ("7b_mamba", "2x24GB", "64GB", 24),
        pytest.param("qwen2.5-32b", "4x24GB", "64GB", None, marks=pytest.mark.slow),
        pytest.param("gemma-3-27b", "2x4x24GB", "64GB", None, marks=pytest.mark.slow),
    ],
)
def test_so_many_gpus_do_and_the_next_fewer_do_not(model: str, word: str, ram: str, batch: int | None) -> None:
    hardware = machine(word, ram)
    question = ask(model, hardware, effective_batch=batch)
    count = costly.count_gpus(question, batch_asked=batch is not None)
    assert count is not None
    assert count > hardware.world
    more = costly.more_machines(hardware)
    if batch is not None:
        more = [each for each in more if batch % each.world == 0]
    index = [each.world for each in more].index(count)
    enough, short = more[index], hardware if index == 0 else more[index - 1]
    assert fits(model, enough, effective_batch=batch)
    assert not fits(model, short, effective_batch=batch)


def test_a_batch_that_was_asked_for_stays_whatever_the_gpus() -> None:
    """Nine sequences can be shared by three GPUs or nine, not by eight."""
    question = ask("7b_mamba", machine("1x24GB", "16GB"), effective_batch=9)
    assert costly.count_gpus(question, batch_asked=True) in (3, 9, None)


# --- the batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 3, 5, 6, 7])
def test_the_usual_batch_is_four_sequences_a_gpu(gpus: int) -> None:
    assert ask("tiny_llama", machine(f"{gpus}x24GB")).effective_batch == 4 * gpus


@pytest.mark.parametrize(
    ("levers", "batch"),
    [({"micro_batch": 3}, 18), ({"accum": 6}, 18), ({"micro_batch": 8}, 24), ({"micro_batch": 2, "accum": 5}, 30)],
)
def test_the_usual_batch_follows_what_is_pinned(levers: dict[str, int], batch: int) -> None:
    question = ask("tiny_llama", machine("3x24GB"), levers=levers)
    assert question.effective_batch == batch
    best = plan(Job(model="tiny_llama", levers=levers), preset("tiny_llama"), machine("3x24GB")).chosen
    assert best is not None
    assert best.effective_batch == batch


@pytest.mark.parametrize(
    ("batch", "levers", "near"),
    [(10, {}, "9 or 12"), (2, {}, "3"), (12, {"micro_batch": 8}, "24"), (24, {"micro_batch": 2, "accum": 2}, "12")],
)
def test_a_batch_that_cannot_be_shared_is_an_error_that_names_one_that_can(
    batch: int, levers: dict[str, int], near: str
) -> None:
    with pytest.raises(ConfigError, match=f"--effective-batch {batch} cannot be shared evenly by 3 GPUs.*use {near}$"):
        ask("tiny_llama", machine("3x24GB"), effective_batch=batch, levers=levers)


# --- what contradicts itself --------------------------------------------------------------------


@pytest.mark.parametrize(
    "levers",
    [
        {"engine": "zero2", "offload_param": "cpu"},
        {"engine": "zero0", "offload_optimizer": "cpu"},
        {"checkpointing": "layers:99"},
    ],
    ids=str,
)
def test_pins_that_contradict_each_other_are_an_error(levers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ask("tiny_llama", machine("2x24GB"), levers=levers)


def test_pins_that_no_engine_runs_are_said_so() -> None:
    """The host's optimizer is AdamW; an 8-bit one cannot go there."""
    answer = planned("tiny_llama", machine("2x24GB"), optimizer="adamw8bit", levers={"offload_optimizer": "cpu"})
    assert not answer.fits
    assert Message("plan.no-engine") in answer.because


def test_skipped_data_is_told_from_cut_data() -> None:
    asked = {"model": "qwen2.5-7b", "method": "lora", "sequence": 131072}
    machine_of = Machine(gpus="1x12GB", host_ram="64GB")
    for allowed, skips in (("skip-data", True), ("shorter-seq", False)):
        way = plan(Job(**asked, hardware=machine_of, limits=Limits(allow=(allowed,)))).chosen
        assert way is not None
        assert way.skips_long is skips


def test_a_large_batch_is_planned_as_quickly() -> None:
    job = Job(model="tiny_llama", effective_batch=720_720, hardware=Machine(gpus="1x24GB", host_ram="64GB"))
    assert plan(job).fits


def test_another_model_is_the_last_resort() -> None:
    machine_of = Machine(gpus="1x8GB", host_ram="8GB")  # where its layers could rest only in 4 bits
    allow: tuple[Allowance, ...] = ("lora", "quantize", "smaller-model")
    way = plan(Job(model="qwen2.5-7b", hardware=machine_of, limits=Limits(allow=allow))).chosen
    assert way is not None
    assert way.shape.name == "qwen2.5-7b"
    assert way.levers.method == "qlora"
