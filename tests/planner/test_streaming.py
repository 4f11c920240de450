"""Layers that stream from the host are chosen where that is fastest, with as many of them on the GPU as fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_questions import GIB, ask, card, machine, preset

from tightfit.job import Job, Limits
from tightfit.memory import estimate
from tightfit.messages import id_of
from tightfit.model.load import shape_from_config
from tightfit.pace import pace
from tightfit.planner import Bounds, plan, plan_within
from tightfit.planner.plan import Plan, Way
from tightfit.planner.question import excess_bytes
from tightfit.planner.search import list_strategies, search
from tightfit.planner.step_down import Shortfall, StepDown, step_down
from tightfit.planner.stream import WORTH
from tightfit.types import STREAM, Hardware

pytestmark = pytest.mark.thorough

DESKTOP = machine("1xRTX4090", "128GB")


def planned(model: str, hardware: Hardware, **job: Any) -> Plan:
    return plan_within(Bounds(advice=False), Job(model=model, **job), preset(model), hardware)


def way_of(answer: Plan) -> Way:
    assert answer.chosen is not None
    return answer.chosen


def test_adapters_of_a_model_that_is_larger_than_the_card() -> None:
    answer = planned("qwen2.5-32b", DESKTOP, method="lora", sequence=1024, effective_batch=16)
    way = way_of(answer)
    assert way.levers.streams
    others = [other.pace.step_s for other in answer.alternatives if other.fits]
    assert others
    assert way.pace.step_s < min(others)
    said = [id_of(each) for each in way.because]
    assert "plan.layers-stream" in said
    assert "plan.updated-on-host" not in said  # nothing of the layers trains


@pytest.mark.parametrize(
    ("model", "gib", "asked"),
    [
        ("qwen1.5-1.8b", 8, {"sequence": 1024, "effective_batch": 16}),
        ("qwen2.5-7b", 14, {"sequence": 1024, "effective_batch": 2, "method": "lora"}),
    ],
)
def test_no_other_split_is_faster_and_no_fewer_layers_stay(model: str, gib: int, asked: dict[str, Any]) -> None:
    """Against every number of layers that recompute and that stay, with the kernels and the micro batch of the way."""
    question = ask(model, card(DESKTOP, gib * GIB), levers={"engine": STREAM}, **asked)
    best = search(question).best
    assert best is not None
    levers, shape = best.levers, question.shape
    for depth in range(0, shape.n_layers + 1, 3):
        for resident in range(0, shape.n_layers + 1, 3):
            tried = replace(levers, checkpointing=replace(levers.checkpointing, layers=depth), resident=resident)
            if not excess_bytes(question, estimate(shape, tried, 1, question.hardware)):
                assert pace(shape, tried, question.hardware).step_s * (1 + WORTH) >= best.pace.step_s
    assert (levers.resident > 0) == (levers.method == "lora")  # in full training all weights come anew
    if levers.resident:
        fewer = replace(levers, resident=levers.resident - 1)
        assert pace(shape, fewer, question.hardware).step_s > best.pace.step_s


def test_no_layer_stays_that_saves_next_to_nothing() -> None:
    """On a fast card behind a fast link copies hide behind the layers' arithmetic."""
    hardware = card(machine("1xH200", "125GB"), 12 * GIB)
    question = ask("llama-3.1-8b", hardware, method="lora", sequence=4096, effective_batch=8, levers={"engine": STREAM})
    best = search(question).best
    assert best is not None
    assert best.levers.resident == 0
    kept = replace(best.levers, resident=1)
    assert not excess_bytes(question, estimate(question.shape, kept, 1, hardware))
    assert pace(question.shape, kept, hardware).step_s < best.pace.step_s


@pytest.mark.parametrize("gib", [5, 8, 11])
def test_fewer_layers_that_hold_more_do_not_stay_instead(gib: int) -> None:
    """Every other layer has experts: which layers stay depends on how many do, and so does how large they are."""
    experts = {"decoder_sparse_step": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    layers = {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes = {"intermediate_size": 2048, "shared_expert_intermediate_size": 2048, "vocab_size": 32000}
    shape = shape_from_config({"model_type": "qwen2_moe", **experts, **layers, **sizes}, "every other")
    asked: dict[str, Any] = {"method": "lora", "sequence": 1024, "effective_batch": 8, "levers": {"engine": STREAM}}
    question = ask(shape, card(DESKTOP, gib * GIB), **asked)
    best = search(question).best
    assert best is not None
    assert not excess_bytes(question, estimate(shape, best.levers, 1, question.hardware))
    more = replace(best.levers, resident=best.levers.resident + 1)
    assert pace(shape, more, question.hardware).step_s <= best.pace.step_s


def test_a_model_whose_states_do_not_fit_in_ram_names_narrower_ones() -> None:
    job = Job(model="qwen2.5-7b", effective_batch=32)
    small = machine("1xRTX4090", "124GB")
    answer = plan(job, preset("qwen2.5-7b"), small)
    assert answer.chosen is None
    first = answer.remedies[0]
    assert first.allowance == "states"
    assert (first.way.levers.states, first.way.levers.engine) == ("bf16", STREAM)
    allowed = plan(replace(job, limits=Limits(allow=("states",))), preset("qwen2.5-7b"), small)
    assert way_of(allowed).levers == first.way.levers
    assert way_of(allowed).changes


def test_what_waits_on_the_host_to_save_time_leaves_the_system_a_tenth_of_the_ram() -> None:
    for ram, least in (("32GB", 0.6), ("64GB", 0.8)):
        hardware = machine("1xRTX3060-12GB", ram)
        best = search(ask("llama-3.1-8b", hardware, method="lora", sequence=2048, effective_batch=8)).best
        assert best is not None
        assert best.levers.checkpointing.offload
        assert least < best.footprint.host.peak_bytes_per_node / (hardware.host_ram_bytes or 0) <= 0.9


@pytest.mark.parametrize(("ram", "place"), [("96GB", "nvme"), ("192GB", "none")])
def test_states_go_to_the_nvme_where_ram_is_short(ram: str, place: str) -> None:
    small = replace(machine("1xRTX4090", ram), nvme_bytes=1000 * GIB)
    answer = planned("qwen2.5-7b", small, effective_batch=32)
    way = way_of(answer)
    assert (way.levers.engine, way.levers.offload_optimizer, way.levers.offload_param) == (STREAM, place, "none")
    assert way.fits
    assert way.footprint.host.peak_bytes_per_node <= (small.host_ram_bytes or 0)
    if place == "nvme":  # no more states would have room
        assert way.footprint.host.peak_bytes_per_node <= 0.9 * (small.host_ram_bytes or 0)
        count = way.levers.buckets.optimizer_buffer_count + 1
        more = replace(way.levers, buckets=replace(way.levers.buckets, optimizer_buffer_count=count))
        held = estimate(way.shape, more, 1, small).host.peak_bytes_per_node
        assert held > 0.9 * (small.host_ram_bytes or 0)
    assert ("plan.states-in-file" in [id_of(each) for each in way.because]) == (place == "nvme")
    others = [each.pace.step_s for each in answer.alternatives if each.fits]
    assert others
    assert way.pace.step_s < min(others)
    unfit = planned("qwen2.5-7b", replace(small, nvme_bytes=20 * GIB), effective_batch=32)
    assert (unfit.chosen is None) == (place == "nvme")


def test_layers_are_updated_ahead_where_ram_has_room_for_a_second_set_of_states() -> None:
    small, large = (machine("1xRTX4070", ram) for ram in ("48GB", "64GB"))
    late, ahead = (way_of(planned("qwen1.5-1.8b", each, effective_batch=2)) for each in (small, large))
    assert [late.levers.update, ahead.levers.update] == ["waits", "ahead"]
    assert ahead.pace.step_s < late.pace.step_s
    second = 12 * late.shape.parameters
    needed = [way.footprint.host.peak_bytes_per_node for way in (late, ahead)]
    assert needed[1] - needed[0] == pytest.approx(second, rel=0.05)
    assert needed[0] < 0.9 * 48 * GIB < needed[0] + second
    assert "plan.updated-on-host" in [id_of(each) for each in late.because]
    (said,) = (each for each in ahead.because if id_of(each) == "plan.updated-ahead")
    assert f"{(needed[1] - needed[0]) / GIB:.1f} GiB" in said.text("en")
    pinned = planned("qwen1.5-1.8b", large, effective_batch=2, levers={"update": "waits"})
    assert way_of(pinned).levers.update == "waits"
    free = planned("qwen1.5-1.8b", large, effective_batch=2, clip=0.0)
    assert way_of(free).levers.update == "waits"  # there is nothing to wait for


@pytest.mark.parametrize(
    ("asked", "is_exact"),
    [
        ({}, True),
        ({"precision": "fp32", "master_weights": False}, True),
        ({"states": "bf16"}, False),
        ({"states": "8bit"}, False),
        ({"master_weights": False}, False),
    ],
)
@pytest.mark.parametrize("how", [{"update": "waits"}, {"update": "ahead"}, {"clip": 0.0}], ids=str)
def test_only_exact_updates_are_called_so(how: dict[str, Any], asked: dict[str, Any], is_exact: bool) -> None:
    levers = {"engine": STREAM} | {name: value for name, value in how.items() if name == "update"}
    rest = {name: value for name, value in how.items() if name == "clip"}
    way = way_of(planned("qwen1.5-0.5b", machine("1xRTX4090", "64GB"), levers=levers, **rest, **asked))
    (said,) = (each for each in way.because if id_of(each).startswith("plan.updated-"))
    assert ("AdamW" in said.text("en"), "AdamW" in said.text("zh")) == (is_exact, is_exact)
    assert ("pass through the GPU" in said.text("en")) == (asked.get("states") == "8bit")
    assert not said.text("en").endswith(" ")


@pytest.mark.parametrize(
    ("ram", "says"),
    [
        ("256GB", "as you asked, though RAM has room for them:"),
        (None, "rest on the NVMe, as you asked:"),
        ("96GB", "since RAM has no room for them:"),
    ],
)
def test_states_that_were_sent_to_the_nvme_are_there_as_asked(ram: str | None, says: str) -> None:
    levers = {"engine": STREAM, "offload_optimizer": "nvme"}
    way = way_of(planned("qwen2.5-7b", machine("1xRTX4090", ram, "1TB"), effective_batch=32, levers=levers))
    (said,) = (each for each in way.because if id_of(each).startswith("plan.states-in-file"))
    assert says in said.text("en")


def test_where_nothing_fits_the_largest_layer_is_named() -> None:
    answer = planned("qwen2.5-7b", machine("1x4GB", "256GB"), levers={"engine": STREAM})
    assert answer.chosen is None
    assert {way.levers.update for way in answer.alternatives} == {"waits"}  # ahead would take as much, and RAM beside
    said = [each.text("en") for each in answer.because]
    assert any("GiB more than the card has" in each for each in said)
    assert "The largest layer is number 1 with 0.4 GiB, and 2 of its size are on the GPU at once." in said


def test_what_fits_on_the_card_does_not_stream() -> None:
    answer = planned("llama-3.1-8b", machine("1xA100-80GB"), method="lora")
    assert not any(way.levers.streams for way in (way_of(answer), *answer.alternatives))


@pytest.mark.parametrize(
    ("hardware", "job"),
    [
        (machine("2x1xRTX4090"), {}),
        (machine("1xRTX4090"), {"trainer": "llamafactory"}),
        (machine("1xRTX4090"), {"levers": {"offload_param": "cpu"}}),
        (machine("1xRTX4090"), {"optimizer": "adamw8bit"}),
        (machine("1xK100-64GB"), {}),
        (replace(DESKTOP, gpu=replace(DESKTOP.gpu, vendor="cpu")), {}),
    ],
    ids=["nodes", "trainer", "pinned place", "optimizer", "dcu", "cpu"],
)
def test_where_nothing_streams(hardware: Hardware, job: dict[str, Any]) -> None:
    assert not any(levers.streams for levers in list_strategies(ask("qwen1.5-0.5b", hardware, **job)))


def test_a_number_that_was_asked_for_is_kept() -> None:
    levers = {"engine": STREAM, "resident": 3}
    assert way_of(planned("qwen1.5-1.8b", card(DESKTOP, 12 * GIB), levers=levers)).levers.resident == 3


def test_layers_stay_where_the_host_has_no_room_for_them() -> None:
    answer = planned(
        "llama-3.1-8b",
        card(machine("1xRTX4090", "8GB"), 15 * GIB),
        method="lora",
        effective_batch=1,
        levers={"engine": STREAM, "checkpointing": "full"},
    )
    way = way_of(answer)
    assert 0 < way.levers.resident < 32
    assert way.footprint.host.peak_bytes_per_node <= 8 * GIB


def test_a_run_that_ran_out_goes_on_with_less_on_the_card() -> None:
    answer = planned("qwen2.5-32b", DESKTOP, method="lora", sequence=1024, effective_batch=16)
    before = way_of(answer)
    shortfall = Shortfall(where="gpu", missing_bytes=GIB, phase=before.footprint.gpu.peak_phase)
    found = step_down(answer, shortfall, bounds=Bounds(advice=False))
    assert isinstance(found, StepDown)
    after = way_of(found.plan)
    assert after.levers.streams
    assert after.footprint.gpu.peak_bytes <= before.footprint.gpu.peak_bytes - GIB
    assert after.levers != before.levers


def test_gpus_of_a_machine_have_one_copy_on_the_host() -> None:
    levers = {"engine": STREAM, "checkpointing": "full+offload"}
    one, four = (
        way_of(planned("qwen2.5-7b", machine(word, "256GB"), effective_batch=64, levers=levers))
        for word in ("1xRTX4090", "4xRTX4090")
    )
    assert four.world == 4
    assert four.footprint.host.peak_bytes_per_node < 1.1 * one.footprint.host.peak_bytes_per_node
    assert four.pace.tokens_per_s > 3 * one.pace.tokens_per_s
