"""Bytes of layers that stream: what grows with what, on the GPU and on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.desk.estimate import compare, keep_most, price
from tightfit.hardware.named import read_hardware
from tightfit.memory import Scale, estimate, stream
from tightfit.memory.activations import activations
from tightfit.memory.host import LIBRARIES_BYTES, PROCESS_BYTES
from tightfit.memory.job import make_job
from tightfit.memory.units import units_of
from tightfit.messages import text
from tightfit.model.load import load_model
from tightfit.priced import Priced, verdict
from tightfit.types import Buckets, Checkpointing, ConfigError, Levers, Lora

SHAPE = load_model("qwen2.5-7b")
FULL = Levers(engine="stream", loss="fused", gradient_clipping=True)
ADAPTERS = replace(FULL, method="lora", lora=Lora())
ROOM_FOR_TWO = Buckets(optimizer_buffer_count=2)
PROCESS = PROCESS_BYTES + LIBRARIES_BYTES
PAGES = 28 * 8 * stream.PAGE  # what rounding up to huge pages may add


@pytest.mark.parametrize(
    ("levers", "each"),
    [
        ({}, 18),
        ({"gradient_clipping": False}, 14),
        ({"states": "bf16"}, 14),
        ({"states": "8bit"}, 12 + 8 / 256),
        ({"master_weights": False}, 14),
        ({"master_weights": False, "states": "8bit"}, 8 + 8 / 256),
        ({"precision": "fp32"}, 16),
        ({"update": "ahead"}, 30),
        ({"update": "ahead", "gradient_clipping": False}, 14),
        ({"update": "ahead", "states": "bf16", "master_weights": False}, 16),
        ({"update": "ahead", "precision": "fp32"}, 28),
    ],
)
@pytest.mark.parametrize("gpus", [1, 4])
def test_what_full_training_takes_of_the_host(levers: dict[str, Any], each: float, gpus: int) -> None:
    """All ranks together: one copy of the weights, and a part of everything else each."""
    asked = replace(FULL, **levers)
    held = estimate(SHAPE, asked, gpus).host.peak_bytes_per_node
    two = 0 if asked.gradient_clipping else 2 * 4 * max(unit.trained for unit in _all(asked))
    assert held == pytest.approx(gpus * PROCESS + each * SHAPE.parameters + two, abs=gpus * PAGES)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("levers", [{}, {"states": "8bit"}, {"master_weights": False, "gradient_clipping": False}])
def test_states_on_nvme_leave_two_buffers_in_ram(levers: dict[str, Any], gpus: int) -> None:
    in_ram, on_nvme = (
        estimate(SHAPE, replace(FULL, **levers, offload_optimizer=place, buckets=ROOM_FOR_TWO), gpus).host
        for place in ("none", "nvme")
    )
    held = {"master_weights", "optimizer_states"}
    states = gpus * sum(in_ram.phases["step"].components.get(name, 0) for name in held)
    assert on_nvme.nvme_bytes_per_node == pytest.approx(states, abs=gpus * PAGES)
    share = max(unit.trained for unit in _all(FULL)) / SHAPE.parameters
    largest = share * states + gpus * stream.PAGE
    saved = in_ram.peak_bytes_per_node - on_nvme.peak_bytes_per_node
    assert states - 2 * largest - gpus * PAGES < saved < states - largest + gpus * PAGES
    assert not held & on_nvme.phases["step"].components.keys()
    assert in_ram.nvme_bytes_per_node == 0
    more = Buckets(optimizer_buffer_count=12)  # ten stay: the embedding and nine layers
    some = estimate(SHAPE, replace(FULL, **levers, offload_optimizer="nvme", buckets=more), gpus).host
    kept = sum(unit.trained for unit in _all(FULL)[:10]) / SHAPE.parameters * states
    assert on_nvme.nvme_bytes_per_node - some.nvme_bytes_per_node == pytest.approx(kept, abs=gpus * PAGES)
    end = max(unit.trained for unit in _all(FULL)) / SHAPE.parameters * states  # as large a buffer as one of two was
    grown = some.peak_bytes_per_node - on_nvme.peak_bytes_per_node
    assert kept - end - gpus * PAGES < grown <= kept + gpus * PAGES


def _all(levers: Levers) -> list[Any]:
    units = units_of(SHAPE, levers)
    return [units.before, *units.layers, units.after]


def test_layers_that_stay_leave_the_host_where_nothing_of_them_trains() -> None:
    layer = units_of(SHAPE, ADAPTERS).layers[0].bytes
    for levers, kept in ((FULL, 0), (ADAPTERS, 7 * layer)):
        none, some = (estimate(SHAPE, replace(levers, resident=count), 1) for count in (0, 7))
        assert some.gpu.peak_bytes - none.gpu.peak_bytes == 7 * layer
        assert none.host.peak_bytes_per_node - some.host.peak_bytes_per_node == pytest.approx(kept, abs=PAGES)
    everything = estimate(SHAPE, replace(ADAPTERS, resident=SHAPE.n_layers), 1)
    assert everything.host.peak_bytes_per_node == PROCESS
    assert "gathered_weights" not in everything.gpu.phases["backward"].components


def test_a_window_keeps_as_often_as_it_has_micro_batches_and_works_once() -> None:
    one, four = (estimate(SHAPE, replace(ADAPTERS, accumulation=count), 1).gpu.phases["backward"] for count in (1, 4))
    kept = activations(SHAPE, ADAPTERS).kept
    assert four.components["recompute"] == one.components["recompute"]
    assert four.components["activations"] - one.components["activations"] == pytest.approx(3 * kept, rel=0.05)


def test_what_waits_on_the_host_is_not_on_the_gpu() -> None:
    here, away = (
        estimate(SHAPE, replace(ADAPTERS, accumulation=8, checkpointing=Checkpointing(layers=None, offload=offload)), 1)
        for offload in (False, True)
    )
    kept = 8 * activations(SHAPE, ADAPTERS).kept
    assert away.host.peak_bytes_per_node - here.host.peak_bytes_per_node == pytest.approx(kept, rel=0.05)
    assert here.gpu.peak_bytes - away.gpu.peak_bytes > 0.7 * kept


def test_scales_of_packed_weights_stay_on_the_gpu() -> None:
    packed = replace(ADAPTERS, method="qlora")
    job = make_job(SHAPE, packed, 1, None)
    ends = units_of(SHAPE, packed).before.bytes + units_of(SHAPE, packed).after.bytes
    adapters = job.weights.trainable_numel * job.weights.trainable_width
    assert stream.hold_always(job)["weights"] == ends + adapters + job.weights.scales_bytes
    assert stream.home_bytes(units_of(SHAPE, packed), packed) < 0.26 * SHAPE.parameters * 2


@pytest.mark.parametrize("levers", [FULL, ADAPTERS, replace(FULL, accumulation=8), replace(ADAPTERS, resident=9)])
@pytest.mark.parametrize("layers", [None, 0, 5])
def test_a_floor_is_never_above_what_is_held(levers: Levers, layers: int | None) -> None:
    hardware, depth = read_hardware("1xRTX4090"), Checkpointing(layers=layers)
    scale = Scale(SHAPE, levers, hardware)
    assert max(*scale.floor.held(depth), scale.floor.after) <= scale.totals(depth).peak
    whole = estimate(SHAPE, replace(levers, checkpointing=depth), 1, hardware)
    assert scale.totals(depth).peak == whole.gpu.peak_bytes


def test_as_many_layers_stay_as_fit() -> None:
    hardware = read_hardware("1x16GB", host_ram="256GB")
    levers = keep_most(SHAPE, FULL, 1, hardware)
    assert 0 < levers.resident < SHAPE.n_layers
    for more, fits in ((0, True), (1, False)):
        assert price(SHAPE, replace(levers, resident=levers.resident + more), 1, hardware).fits is fits
    assert keep_most(SHAPE, FULL, 1, None).resident == 0
    with pytest.raises(ConfigError, match="2 nodes"):
        keep_most(SHAPE, FULL, 8, read_hardware("2x4xH100"))


def test_a_gpu_without_room_for_two_layers_is_told_which() -> None:
    said = verdict(price(SHAPE, FULL, 1, read_hardware("1x4GB", host_ram="256GB")))
    assert said.id == "price.stream-too-large"
    assert "number 1 with 0.4 GiB, and 2 of its size" in text(said.id, **said.fields)


def test_a_comparison_has_every_engine_and_updates_ahead_where_layers_stream() -> None:
    rows = compare(SHAPE, replace(FULL, update="ahead"), 4, read_hardware("4xRTX4090", host_ram="512GB"))
    ahead = [isinstance(row, Priced) and row.levers.update == "ahead" for _, row in rows]
    assert sum(ahead) == 1
    assert sum(isinstance(row, Priced) for _, row in rows) > 8
