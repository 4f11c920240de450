"""Plans to render: built by hand from levers, with the real footprint and a pace that says nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import released_at_once
from tightfit.job import Job, Machine
from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.planner.plan import Plan, Way
from tightfit.types import Checkpointing, Hardware, Levers, Lora, ModelShape, Pace

MakePlan = Callable[..., Plan]

PACE = Pace(step_s=1.0, tokens_per_s=1.0, causes={})

SHARDED = (
    ("zero0", "none", "none"),
    ("zero1", "none", "none"),
    ("zero1", "cpu", "none"),
    ("zero2", "none", "none"),
    ("zero2", "cpu", "none"),
    ("zero3", "none", "none"),
    ("zero3", "none", "cpu"),
    ("zero3", "cpu", "none"),
    ("zero3", "cpu", "cpu"),
    ("zero3", "nvme", "none"),
    ("zero3", "cpu", "nvme"),
    ("zero3", "nvme", "nvme"),
    ("fsdp2", "none", "none"),
    ("fsdp2", "cpu", "cpu"),
)
"""Engine, where the optimizer is, where the weights are."""


def _grid() -> tuple[Levers, ...]:
    """Every engine and offload with every precision and method, the batches and checkpointing varied beside."""
    batches = ((1, 1), (2, 4), (3, 2))
    keeping = (Checkpointing(layers=None), Checkpointing(layers=0), Checkpointing(layers=1))
    made = []
    for index, (place, precision, method) in enumerate(
        product(SHARDED, ("bf16", "fp16", "fp32"), ("full", "lora", "qlora"))
    ):
        micro, accumulation = batches[index % len(batches)]
        made.append(
            Levers(
                engine=place[0],
                offload_optimizer=place[1],
                offload_param=place[2],
                precision=precision,
                method=method,
                lora=None if method == "full" else Lora(rank=4),
                micro_batch=micro,
                accumulation=accumulation,
                checkpointing=keeping[index % 2 + (index % 5 == 0)],
                sequence=128,
            )
        )
    for place, optimizer in product(SHARDED, ("adamw8bit", "paged_adamw8bit", "adafactor", "sgd")):
        if place[1] == "none":
            made.append(replace(made[0], engine=place[0], offload_param=place[2], optimizer=optimizer))
    swapped = (levers.method == "qlora" and levers.offload_param == "nvme" for levers in made)  # which is refused
    return tuple(released_at_once(levers) for levers, never in zip(made, swapped, strict=True) if not never)


GRID = _grid()
WORLDS = ("1x24GB", "2x24GB", "6x32GB", "2x4x80GB")


@cache
def shape_named(name: str) -> ModelShape:
    return load_model(name)


def make_plan(levers: Levers, hardware: Hardware | None = None, job: Job | None = None) -> Plan:
    """A plan whose chosen way has these levers."""
    hardware = hardware or parse_hardware("2x24GB")
    job = job or Job(
        model="tiny_llama",
        method=levers.method,
        sequence=levers.sequence,
        hardware=Machine(nvme_path="/nvme/swap"),
    )
    assert isinstance(job.model, str)
    shape = shape_named(job.model)
    way = Way(
        shape=shape,
        levers=levers,
        hardware=hardware,
        footprint=estimate(shape, levers, hardware.world, hardware),
        pace=PACE,
        fits=True,
        gpu_limit_bytes=int(hardware.gpu.memory_bytes * 0.96),
    )
    return Plan(
        job=job,
        shape=shape,
        hardware=hardware,
        effective_batch=way.effective_batch,
        chosen=way,
        alternatives=(),
        considered=1,
        search_s=0.0,
        because=("It is the only one.",),
    )


@pytest.fixture(name="make_plan", scope="session")
def _make_plan() -> MakePlan:
    return make_plan


@pytest.fixture(scope="session")
def grid() -> tuple[Levers, ...]:
    return GRID


@pytest.fixture(scope="session")
def plans() -> tuple[Plan, ...]:
    """The grid on one, two, six and twice four GPUs in turn."""
    return tuple(make_plan(levers, parse_hardware(WORLDS[index % len(WORLDS)])) for index, levers in enumerate(GRID))
