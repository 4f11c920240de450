"""What a step takes whose layers come from the host: who waits for whom, and what it is put down to."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tightfit.hardware.reached import reached
from tightfit.hardware.words import parse_hardware
from tightfit.memory.units import units_of
from tightfit.model.load import load_model
from tightfit.pace import pace, step_seconds
from tightfit.pace.rates import rates_of, slow_down
from tightfit.pace.stream import StreamClock, Turn, follow, update_s
from tightfit.types import STREAM, Buckets, Checkpointing, Levers, Lora

SHAPE = load_model("qwen2.5-7b")
CARD = parse_hardware("1xRTX4090", host_ram="256GB")
FULL = Levers(engine=STREAM, accumulation=8, loss="fused")
LORA = replace(FULL, method="lora", lora=Lora())
AT_ONCE = Turn(1.0, 2.0, streams=False, trains=False, up=0, down=0, summed=0, updated=0, updated_ahead=0, sent=0)
"""A unit that is there, and frozen."""


def walk(turns: list[Turn], *, waits: bool = True, ahead: float = 1.0, updates_ahead: bool = False) -> float:
    return follow(turns, waits=waits, through_host=False, ahead=ahead, updates_ahead=updates_ahead)


def test_a_model_that_stays_takes_its_arithmetic() -> None:
    assert walk([AT_ONCE] * 5) == 15


def test_copies_hide_behind_the_layers_before_them() -> None:
    """Two slots: each layer's copy has the other's turn to come in."""
    assert walk([AT_ONCE._replace(streams=True, up=1.0)] * 6) == 18


def test_a_slow_link_sets_the_pace_of_both_passes() -> None:
    """Two of six layers are there when a pass begins; of the other four each waits for its copy."""
    layers = [AT_ONCE._replace(streams=True, up=10.0)] * 6
    # The first copy of a pass begins after one layer; the last layer follows the last copy.
    assert walk(layers) == (2 + 4 * 10 + 2) + (1 + 4 * 10 + 1)


def test_a_layer_that_stays_spares_its_copies() -> None:
    layers = [AT_ONCE._replace(streams=True, up=10.0)] * 6
    for stay in range(1, 7):
        held = [AT_ONCE if index % 2 and index // 2 < stay else turn for index, turn in enumerate(layers)]
        assert walk(held) <= walk(layers)


def test_one_layer_alone_streams_through_one_slot() -> None:
    assert walk([AT_ONCE._replace(streams=True, up=10.0), AT_ONCE]) == 6  # and stays there


def test_clipping_waits_for_all_gradients() -> None:
    """The backward pass, the last gradients, the optimizer with each unit's copy behind it, the last forward."""
    trained = AT_ONCE._replace(trains=True, up=0.5, down=1.0, updated=3.0)
    assert walk([trained] * 4) == 4 * 2 + 1 + 4 * 3 + 0.5 + 1


def test_states_on_nvme_take_what_the_drive_does() -> None:
    """It reads and writes 12 bytes of each parameter, and all else is faster; the wait counts as link."""
    room = Buckets(optimizer_buffer_count=2)
    on_nvme = replace(FULL, offload_optimizer="nvme", checkpointing=Checkpointing(layers=None), buckets=room)
    slow, fast = pace(SHAPE, on_nvme, CARD), pace(SHAPE, replace(on_nvme, offload_optimizer="none"), CARD)
    rates = rates_of(CARD, "bf16")
    moved = 12 * SHAPE.parameters * (1 / rates.nvme_read + 1 / rates.nvme_write)
    assert moved < slow.step_s < moved + fast.step_s
    assert slow.causes["host link"] - fast.causes["host link"] == pytest.approx(slow.step_s - fast.step_s)
    assert slow.causes["host optimizer"] == pytest.approx(fast.causes["host optimizer"])
    assert sum(slow.causes.values()) == pytest.approx(slow.step_s)
    half = replace(on_nvme, buckets=Buckets(optimizer_buffer_count=16))  # the embedding and 13 of 28 layers stay
    assert fast.step_s + 0.4 * moved < pace(SHAPE, half, CARD).step_s < slow.step_s - 0.4 * moved


def test_without_clipping_the_optimizer_runs_beside_the_backward_pass() -> None:
    trained = AT_ONCE._replace(trains=True, up=0.5, down=1.0, updated=2.0)
    # the lowest unit is the last to be updated and the first that is wanted
    assert walk([trained] * 4, waits=False) == 4 * 2 + 1 + 2 + 0.5 + 1 + 3 * 1
    assert walk([trained] * 4, waits=False) < walk([trained] * 4)


def test_what_is_updated_ahead_is_there_when_the_norm_is() -> None:
    trained = AT_ONCE._replace(trains=True, up=0.5, down=1.0, updated=2.0, updated_ahead=2.0)
    # Three are updated beside the backward pass. The lowest one's gradients are the last that the norm needs.
    assert walk([trained] * 4, updates_ahead=True) == 4 * 2 + 1 + 2 + 0.5 + 1 + 3 * 1
    assert walk([trained] * 4, updates_ahead=True) == walk([trained] * 4, waits=False)


def test_what_there_was_no_time_for_follows_in_the_order_of_the_forward_pass() -> None:
    trained = AT_ONCE._replace(trains=True, up=0.5, down=1.0, updated=3.0, updated_ahead=4.0)
    # Of four the upper two go ahead: from 3 on, and from 7 to 11. The norm is known at 9; then the lower two.
    assert walk([trained] * 4, updates_ahead=True) == 11 + 3 + 3 + 0.5 + 3 * 1
    assert walk([trained] * 4, updates_ahead=True) < walk([trained] * 4)


@pytest.mark.parametrize("accumulation", [1, 8])
def test_an_update_ahead_is_never_slower(accumulation: int) -> None:
    for states, cause in {"fp32": "host optimizer", "8bit": "host link"}.items():
        waiting = replace(FULL, accumulation=accumulation, states=states)
        late, ahead = pace(SHAPE, waiting, CARD), pace(SHAPE, replace(waiting, update="ahead"), CARD)
        assert ahead.step_s < late.step_s
        assert ahead.causes[cause] < late.causes[cause]
        assert ahead.causes["arithmetic"] == pytest.approx(late.causes["arithmetic"])
        at_once = replace(waiting, gradient_clipping=False)
        assert step_seconds(SHAPE, replace(at_once, update="ahead"), CARD) == step_seconds(SHAPE, at_once, CARD)


def test_gradients_that_cannot_leave_hold_up_the_layers_below() -> None:
    trained = AT_ONCE._replace(trains=True, down=10.0)
    assert walk([trained] * 4) == 2 + 4 * 10 + 4


def test_frozen_layers_at_the_bottom_stream_forwards_alone() -> None:
    frozen = AT_ONCE._replace(back=None, streams=True, up=10.0)
    # all four come once, the first two beside the backward pass that does not need them
    assert walk([frozen] * 4 + [AT_ONCE]) == 4 * 10 + 1 + 1


@pytest.mark.parametrize(
    "levers",
    [FULL, replace(FULL, update="ahead"), LORA, replace(LORA, method="qlora")],
    ids=["full", "ahead", "lora", "qlora"],
)
@pytest.mark.parametrize("cards", ["1xRTX4090", "4xRTX4090", "8xA100-80GB"])
def test_causes_add_up_to_the_step(levers: Levers, cards: str) -> None:
    hardware = parse_hardware(cards, host_ram="512GB")
    for changed in (
        levers,
        replace(levers, resident=20),
        replace(levers, checkpointing=Checkpointing(layers=None, offload=True)),
        replace(levers, checkpointing=Checkpointing(layers=0)),
    ):
        found = pace(SHAPE, changed, hardware)
        assert sum(found.causes.values()) == pytest.approx(found.step_s)
        assert found.low_s < found.step_s < found.high_s
        assert min(found.causes.values()) > 0
        clock = StreamClock(SHAPE, changed, hardware, rates_of(hardware, "bf16"))
        assert clock.seconds(changed.checkpointing, changed.resident) == pytest.approx(found.step_s, abs=1e-9)


def test_what_a_step_waits_for_is_called_by_its_name() -> None:
    adapters = pace(SHAPE, replace(LORA, accumulation=1, micro_batch=1, sequence=128), CARD)
    assert next(iter(adapters.causes)) == "host link"
    assert "host optimizer" not in adapters.causes
    weights = pace(SHAPE, replace(FULL, accumulation=1, sequence=128), CARD)
    assert next(iter(weights.causes)) == "host optimizer"
    assert pace(SHAPE, replace(FULL, accumulation=64), CARD).causes["arithmetic"] > 0.5


def test_a_step_on_a_slow_link_takes_its_copies_and_no_more_with_more_micro_batches() -> None:
    """28 layers pass the link twice but for those that are there: as long as it takes longer than the arithmetic."""
    few = replace(LORA, sequence=256)
    link = rates_of(CARD, "bf16").host_link
    size = sum(unit.bytes for unit in units_of(SHAPE, few).layers)
    bytes_s = 2 * size * 26 / 28 / link
    one, two = (step_seconds(SHAPE, replace(few, accumulation=count), CARD) for count in (1, 2))
    assert bytes_s < one < 1.25 * bytes_s
    assert one <= two < 1.1 * one


@pytest.mark.parametrize("levers", [FULL, replace(FULL, update="ahead"), LORA], ids=["full", "ahead", "lora"])
def test_time_falls_with_each_layer_that_stays_and_rises_with_each_that_recomputes(levers: Levers) -> None:
    for changed in (levers, replace(levers, accumulation=1, sequence=256)):
        clock = StreamClock(SHAPE, changed, CARD, rates_of(CARD, "bf16"))
        for depth in (Checkpointing(layers=0), Checkpointing(layers=None)):
            times = [clock.seconds(depth, count) for count in range(SHAPE.n_layers + 1)]
            assert all(more <= fewer + 1e-9 for fewer, more in pairwise(times))
        for resident in (0, 13, 28):
            times = [clock.seconds(Checkpointing(layers=count), resident) for count in range(SHAPE.n_layers + 1)]
            assert all(shallower <= deeper + 1e-9 for shallower, deeper in pairwise(times))


def test_narrower_states_are_updated_faster() -> None:
    """By the host's cores, which look 8-bit ones up on a CPU alone."""
    short = replace(FULL, accumulation=1)
    assert step_seconds(SHAPE, replace(short, states="bf16"), CARD) < step_seconds(SHAPE, short, CARD)
    rates, here = rates_of(CARD, "bf16"), replace(CARD, gpu=replace(CARD.gpu, vendor="cpu"))
    bytes_moved = {"fp32": 30, "bf16": 22, "8bit": 18}
    for states, moved in bytes_moved.items():
        found = update_s(10**9, replace(short, states=states), here, rates)
        assert found == pytest.approx(moved * 10**9 / rates.host_optimizer)


SCALES = 2 * 4 / 256  # bytes of an element's part of both moments' scales


@pytest.mark.parametrize(
    ("changed", "up", "down"),
    [
        ({}, 4 + 4 + 2, 4 + 2 + 2),  # gradient, fp32 copy, moments; fp32 copy, moments, weight
        ({"master_weights": False}, 4 + 2 + 2, 2 + 2),  # gradient, moments, weight; moments, weight
        ({"precision": "fp32"}, 4 + 2 + 4, 2 + 4),
    ],
    ids=["copies", "pure", "fp32"],
)
def test_8bit_states_pass_the_link_to_be_updated(changed: dict[str, Any], up: int, down: int) -> None:
    """Behind each unit its weights go up, on the same way; as long as the backward pass runs, gradients go down."""
    levers = replace(FULL, accumulation=1, sequence=128, states="8bit", **changed)
    rates, width = rates_of(CARD, levers.precision), 4 if "precision" in changed else 2
    trained, link = SHAPE.parameters, rates.host_link
    slow = rates._replace(host_memory=1e15)
    assert update_s(trained, levers, CARD, slow) == pytest.approx(trained * (max(up, down) + SCALES) / link)
    short = rates._replace(host_memory=link / 10)  # all of it goes through the host's memory
    assert update_s(trained, levers, CARD, short) == pytest.approx(trained * (up + down + 2 * SCALES) / link * 10)

    clock = StreamClock(SHAPE, levers, CARD, slow)
    turns = clock.turns(levers.checkpointing, 0)
    updated = trained * (max(up + width, down) + SCALES) / link
    assert sum(turn.updated for turn in turns) == pytest.approx(updated)
    assert updated < clock.seconds(levers.checkpointing, 0)
    (layer,) = {turn.updated_ahead for turn in turns if turn.streams}
    held = units_of(SHAPE, levers).layers[0].trained
    assert layer == pytest.approx(held * (max(up + width, down + 4) + SCALES) / link)
    at_once = replace(levers, gradient_clipping=False)
    assert layer in {turn.updated for turn in StreamClock(SHAPE, at_once, CARD, slow).turns(levers.checkpointing, 0)}

    found = pace(SHAPE, levers, parse_hardware("1xH200", host_ram="256GB"))  # whose host's memory is fast
    assert next(iter(found.causes)) == "host link"
    assert "host optimizer" not in found.causes
    assert next(iter(found.rates)) == "host_link"


def test_gpus_that_update_8bit_states_share_the_hosts_memory() -> None:
    """Each passes a quarter through its own link, and all of them together through one memory."""
    levers, rates = replace(FULL, states="8bit"), rates_of(CARD, "bf16")
    four = parse_hardware("4xRTX4090", host_ram="256GB")
    assert update_s(4 * 10**9, levers, four, rates) == pytest.approx(update_s(10**9, levers, CARD, rates))
    whole = rates_of(four, "bf16").host_memory * 4
    memory = reached(four).host_memory.value * reached(four).host_memory_share.value
    assert whole == pytest.approx(memory)


@pytest.mark.parametrize("group", ["host_link", "host_optimizer", "products"])
def test_a_slower_machine_takes_longer(group: str) -> None:
    rates = rates_of(CARD, "bf16")
    small = replace(FULL, accumulation=1, sequence=512)
    usual = StreamClock(SHAPE, small, CARD, rates).seconds(small.checkpointing, 0)
    assert StreamClock(SHAPE, small, CARD, slow_down(rates, group, 1.5)).seconds(small.checkpointing, 0) > usual


def test_gpus_of_a_machine_share_the_optimizer_and_not_the_layers() -> None:
    """Each brings all layers to itself, and updates a quarter of them at a quarter of the host's rate."""
    small = replace(FULL, accumulation=1, sequence=128)
    one = pace(SHAPE, small, parse_hardware("1x24GB", host_ram="256GB"))
    four = pace(SHAPE, small, parse_hardware("4x24GB", host_ram="256GB"))
    assert four.causes["host optimizer"] == pytest.approx(one.causes["host optimizer"], rel=0.5)
    assert four.causes["communication"] > 0
