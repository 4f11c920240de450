"""fp16 that survives: the plan's loss scale, skipped steps, a streak with the layer that began it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Ran, edit, run_ranks, write_plan
from small_models import MIXTRAL

from tightfit.train.events import Events
from tightfit.train.loop import OverflowWatch

SMALL = {"model": "tiny_llama", "seq": 64, "effective_batch": 4, "max_steps": 3, "data": "shipped:text"}
LARGEST_POWER = 30


def with_scale(folder: Path, power: int) -> Path:
    """Another first loss scale, in both files that hold it."""
    edit(folder, training__first_scale_power=power)
    path = folder / "deepspeed.json"
    if path.exists():
        config = json.loads(path.read_text())
        config["fp16"]["initial_scale_power"] = power
        path.write_text(json.dumps(config))
    return folder


def run_well(folder: Path) -> Ran:
    ran = run_ranks(folder)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    return ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same job in fp32."""
    folder = tmp_path_factory.mktemp("whole")
    return run_well(write_plan(folder, 2, **SMALL, engine="fsdp2", precision="fp32", learning_rate=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("zero1", marks=pytest.mark.slow),
        "zero2",
        pytest.param("zero3", marks=pytest.mark.slow),
        pytest.param("fsdp2", marks=pytest.mark.slow),
    ],
)
def test_the_scale_starts_where_the_plan_says_and_losses_follow_fp32(tmp_path: Path, engine: str, whole: Ran) -> None:
    half = run_well(write_plan(tmp_path / "half", 2, **SMALL, engine=engine, precision="fp16", learning_rate=1e-3))
    assert {step["loss_scale"] for step in half.of("step")} == {2.0**12}
    assert not any(step["skipped"] for step in half.of("step"))
    assert half.losses == pytest.approx(whole.losses, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_overflows_are_skipped_the_scale_falls_and_the_streak_names_a_layer(tmp_path: Path, engine: str) -> None:
    folder = with_scale(write_plan(tmp_path, 2, **SMALL, engine=engine, precision="fp16"), LARGEST_POWER)
    ran = run_well(folder)
    steps = ran.of("step")
    assert all(step["skipped"] for step in steps)
    scales = [step["loss_scale"] for step in steps]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < 2.0**LARGEST_POWER
    streak = ran.of("overflow")[-1]
    assert streak["streak"] == len(steps)
    assert "layers." in streak["layer"]
    assert streak["where"] == "backward"


SHARED: dict[str, dict[str, Any]] = {
    "layers": {"tensor_parallel": 2},
    "experts": {"model": MIXTRAL, "expert_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SHARED)
def test_ranks_that_share_parts_scale_as_others_do(tmp_path: Path, what: str) -> None:
    """Gradients of several meshes have one loss scale, and overflow together."""
    flags = {**SMALL, "engine": "fsdp2", "precision": "fp16", "learning_rate": 1e-3, **SHARED[what]}
    whole = run_well(write_plan(tmp_path / "whole", 2, **{**flags, "tensor_parallel": 1, "expert_parallel": 1}))
    shared = run_well(write_plan(tmp_path / "shared", 2, **flags))
    assert [step["loss_scale"] for step in shared.of("step")] == [2.0**12] * 3
    assert not any(step["skipped"] for step in shared.of("step"))
    assert shared.losses == pytest.approx(whole.losses, rel=2e-3)
    norms = [[step["grad_norm"] for step in ran.of("step")] for ran in (shared, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)
    over = run_well(with_scale(write_plan(tmp_path / "over", 2, **flags), LARGEST_POWER))
    assert all(step["skipped"] for step in over.of("step"))
    assert [step["loss_scale"] for step in over.of("step")] == [2.0 ** (LARGEST_POWER - n) for n in (1, 2, 3)]


@pytest.mark.thorough
def test_the_unsharded_engine_refuses_fp16(tmp_path: Path) -> None:
    folder = edit(write_plan(tmp_path, 2, **SMALL, engine="zero1", precision="fp16"), levers__engine="zero0")
    ran = run_ranks(folder)
    assert ran.codes == [2, 2]
    assert "zero0 cannot train in fp16" in "".join(ran.stderr)


@pytest.mark.thorough
def test_a_processor_without_fp16_is_named(tmp_path: Path) -> None:
    """A plan from another machine: on this one bf16 would have stood in."""
    ran = run_ranks(write_plan(tmp_path, 2, **SMALL, engine="zero2", precision="fp16"), fp16=False)
    assert ran.codes == [2, 2]
    assert "this processor does not compute it: plan again on this machine" in ran.stderr[0]
    assert "Traceback" not in ran.stderr[0]


class Layer(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Stack(torch.nn.Module):
    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(factor) for factor in factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("factors", "layer", "where"),
    [([1.0, 1e30, 1e30, 1.0], "layers.2", "forward"), ([1e-10, 1e5, 1e5, 1.0], "layers.1", "backward")],
)
def test_the_layer_that_began_is_named(tmp_path: Path, factors: list[float], layer: str, where: str) -> None:
    model, events = Stack(factors), Events(tmp_path, speaks=True)
    watch = OverflowWatch(model, events)
    for step in range(1, 3):
        out = model(torch.ones(2, requires_grad=True))
        (out.sum() * (1e38 if where == "backward" else 1.0)).backward()
        watch.after_step(step, skipped=True, loss_scale=2.0**12)
    events.close()
    said = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["streak"], each["layer"], each["where"]) for each in said] == [(2, layer, where)]


@pytest.mark.parametrize(("where", "layer"), [("forward", "layers.4"), ("backward", "layers.8")])
def test_of_ranks_with_other_layers_the_one_that_began_is_named(tmp_path: Path, where: str, layer: str) -> None:
    """A rank that sees what another hands on is not the one."""
    events = Events(tmp_path, speaks=True)
    told = ["{}", json.dumps({where: "layers.4"}), json.dumps({where: "layers.8"}), "{}"]
    watch = OverflowWatch(Stack([1.0]), events, lambda _: told)
    for step in range(1, 3):
        watch.after_step(step, skipped=True, loss_scale=1.0)
    events.close()
    said = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["layer"], each["where"]) for each in said] == [(layer, where)]


def test_a_good_step_ends_the_streak(tmp_path: Path) -> None:
    watch = OverflowWatch(Stack([1.0, 1.0]), Events(tmp_path, speaks=False))
    outcomes: list[Any] = []
    for skipped in (True, True, False, True):
        watch.after_step(1, skipped=skipped, loss_scale=1.0)
        outcomes.append(watch.streak)
    assert outcomes == [1, 2, 0, 1]
