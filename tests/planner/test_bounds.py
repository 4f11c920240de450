"""What bounds a search: the engines that can be started, and the bytes that must stay within the margin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.job import Job, Machine
from tightfit.memory import required_bytes
from tightfit.planner import plan
from tightfit.planner.question import needed_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("engines", [{"zero2"}, {"zero1", "zero3"}, {"fsdp2"}])
def test_only_the_named_engines_are_considered(engines: set[str]) -> None:
    """Also on fewer GPUs than there are."""
    job = Job(model="tiny_llama", effective_batch=8, hardware=Machine(gpus="8xRTX4090", host_ram="64GB"))
    answer = plan(job, engines=frozenset(engines))
    assert answer.chosen is not None
    assert {way.levers.engine for way in (answer.chosen, *answer.alternatives)} == engines
    free = plan(job).chosen
    assert free is not None
    assert free.pace.step_s <= answer.chosen.pace.step_s


@pytest.mark.thorough
def test_building_the_model_needs_the_card_and_the_steps_the_margin_too() -> None:
    way = plan(Job(model="qwen1.5-0.5b", hardware=Machine(gpus="1x24GB", host_ram="64GB"))).chosen
    assert way is not None
    gpu, card = way.footprint.gpu, way.hardware.gpu.memory_bytes
    assert gpu.init_peak_bytes <= gpu.peak_bytes
    assert needed_bytes(way.footprint, way.hardware) == gpu.required_bytes
    steps = gpu.required_bytes
    most = next(held for held in range(card, 0, -(2**20)) if required_bytes(held, way.hardware, 1) <= card)
    for held in (most, most + 2**21):
        init = replace(gpu, init_peak_bytes=held, required_bytes=required_bytes(held, way.hardware, 1))
        needed = needed_bytes(replace(way.footprint, gpu=init), way.hardware)
        assert needed == (steps if held == most else init.required_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize(("gpus", "compiled"), [("1xP40", False), ("1xV100-16GB", True)])
def test_layers_are_compiled_for_cards_on_which_triton_runs(gpus: str, compiled: bool) -> None:
    way = plan(Job(model="qwen1.5-0.5b", method="lora", hardware=Machine(gpus=gpus, host_ram="64GB"))).chosen
    assert way is not None
    assert (way.levers.compile == "layers") == compiled


@pytest.mark.thorough
def test_a_job_too_short_to_compile_gets_the_plan_of_compile_off() -> None:
    job = Job(model="llama-3.1-8b", method="lora", max_steps=2, hardware=Machine(gpus="1xRTX4090", host_ram="64GB"))
    short, off = plan(job).chosen, plan(replace(job, levers={"compile": "off"})).chosen
    assert short is not None
    assert off is not None
    assert short.levers == off.levers
