"""The footprint model against every measured run, and the published table of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import accuracy
import pytest
from rows import GIVEN, OWN, PACE, RESIDENT, Rehearsed, Row, levers_of, predict, read_rehearsed, read_rows, shape_of

from tables import table
from tightfit.types import Checkpointing, Levers

PEAK, HALF_OF_PEAKS, INIT, HOST = 0.05, 0.02, 0.07, 0.15
ROUNDING_BYTES = 2**20
"""Rows are rounded to a thousandth of a GiB; an empty start reads as nothing at all."""

ROWS = read_rows()
every_row = table("row", ROWS, ids=lambda row: row.id)


def off(predicted: int, measured: int) -> float:
    return max(abs(predicted - measured) - ROUNDING_BYTES, 0) / max(measured, ROUNDING_BYTES)


@pytest.mark.thorough
@every_row
def test_peak(row: Row) -> None:
    assert off(predict(row).gpu.peak_bytes, row.peak_bytes) <= PEAK


@every_row
def test_initialisation(row: Row) -> None:
    if row.init_bytes is None:
        assert row.note
    else:
        assert off(predict(row).gpu.init_peak_bytes, row.init_bytes) <= INIT


@every_row
def test_host(row: Row) -> None:
    if row.host_bytes is not None:
        assert off(predict(row).host.peak_bytes_per_rank, row.host_bytes) <= HOST


@every_row
def test_parameters_are_those_of_the_built_model(row: Row) -> None:
    levers, shape = levers_of(row.scenario), shape_of(row.scenario)
    if levers.method == "full":
        assert shape.parameters == row.parameters
    elif levers.method == "lora":
        assert shape.parameters + predict(row).trainable_parameters == row.parameters


@pytest.mark.parametrize("path", [GIVEN, OWN, PACE], ids=["given", "own", "pace"])
def test_half_of_the_peaks_are_close(path: Path) -> None:
    assert median(off(predict(row).gpu.peak_bytes, row.peak_bytes) for row in ROWS if row.source == path.name) <= (
        HALF_OF_PEAKS
    )


REHEARSED = read_rehearsed()


@table("row", REHEARSED, ids=lambda row: row.id)
def test_what_our_worker_held(row: Rehearsed) -> None:
    """Windows, capped attention scores, experts, fp16 after an overflow, weights on the host, packed matrices."""
    gpu = row.footprint.gpu
    assert off(gpu.peak_bytes, row.peak_bytes) <= 0.01
    assert off(gpu.init_peak_bytes, row.init_bytes) <= 0.03


@table("row", read_rehearsed(RESIDENT), ids=lambda row: row.id)
def test_ram_of_our_worker(row: Rehearsed) -> None:
    assert row.host_bytes is not None
    assert abs(row.footprint.host.peak_bytes_per_rank - row.host_bytes) <= 0.15 * 2**30


def test_no_row_stands_twice() -> None:
    names = [row.id for row in ROWS]
    assert len(names) == len(set(names))


def test_what_a_scenario_leaves_out() -> None:
    shortest = {"config": {"model_type": "llama"}, "world": 1, "stage": 0}
    assert levers_of(shortest) == Levers()
    full = levers_of({**shortest, "offload_optimizer": True, "ckpt": False, "zero": {"reduce_bucket_size": 7}})
    assert full.offload_optimizer == "cpu"
    assert full.checkpointing == Checkpointing(layers=0)
    assert full.buckets.reduce_bucket == 7


@pytest.mark.thorough
def test_the_page_and_the_readme_are_current() -> None:
    assert accuracy.main(["--check"]) == 0, "run: python benchmarks/accuracy.py"


@pytest.mark.thorough
def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "PAGE", accuracy.ROOT / "docs" / "no-such-page.md")
    assert accuracy.main(["--check"]) == 1


DEEPSPEED = """
import json
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two
n, layer, world = 7_615_616_512, 544_997_376, 8
print("FOUND " + json.dumps({
    "zero2 none none": two(n, world, cpu_offload=False)[1],
    "zero2 cpu none": two(n, world, cpu_offload=True)[1],
    "zero3 none none": three(n, layer, world, cpu_offload=False, cpu_offload_params=False)[1],
    "zero3 cpu none": three(n, layer, world, cpu_offload=True, cpu_offload_params=False)[1],
    "zero3 cpu cpu": three(n, layer, world)[1],
}))
"""


@pytest.mark.slow
def test_deepspeeds_estimator_is_quoted_rightly() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    for words, size in found.items():
        engine, optimizer, param = words.split()
        levers = Levers(engine=engine, offload_optimizer=optimizer, offload_param=param)
        assert accuracy.deepspeed_bytes(levers, 8, 7_615_616_512, 544_997_376) == size
