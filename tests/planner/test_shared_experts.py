"""Experts that GPUs share: what is refused and how to mend it, what is priced, and when a plan takes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import find_compile_obstacle, levers_from_flags
from tightfit.inputs.layouts import check_layout, find_expert_obstacle
from tightfit.job.file import job_from_flags
from tightfit.memory import estimate
from tightfit.memory.feedforward import BUSIEST_EXPERT, busiest_load
from tightfit.model.load import load_model, shape_from_config
from tightfit.pace import Clock, KernelChoice, pace
from tightfit.planner import Plan, plan
from tightfit.types import Checkpointing, ConfigError, Levers, ModelShape

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "vocab_size": 32_000,
}
ATTENTION = {"method": "lora", "lora_targets": "q_proj,v_proj"}
SHARED: dict[str, Any] = {"engine": "fsdp2", "expert_parallel": 4}


@pytest.fixture(scope="module")
def mixtral() -> ModelShape:
    return shape_from_config(MIXTRAL, "mixtral")


@pytest.mark.parametrize(
    ("flags", "world", "says"),
    [
        ({"engine": "zero3"}, 8, "needs --engine fsdp2"),
        ({"expert_parallel": 3}, None, "use 2, 4 or 8"),
        ({"expert_parallel": 8}, 12, "use 2 or 4"),
        ({"shard_within": 2}, 8, "use 2"),
        ({"tensor_parallel": 2}, 8, "--tensor-parallel 2 needs layers of attention and an MLP"),
        ({"pipeline_parallel": 4}, 8, "use 2"),
        ({"method": "lora"}, 8, "name other layers with --lora-targets"),
    ],
)
def test_what_cannot_be_shared_says_what_would_do(
    mixtral: ModelShape, flags: dict[str, Any], world: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_layout(levers_from_flags({**SHARED, **flags}, mixtral), mixtral, world)


@pytest.mark.parametrize(
    "more", [{}, ATTENTION, {"shard_within": 4}, {"sequence_parallel": 2}, {"offload_param": "cpu"}]
)
def test_what_can_be_shared_is(mixtral: ModelShape, more: dict[str, Any]) -> None:
    levers = levers_from_flags({**SHARED, **more}, mixtral)
    check_layout(levers, mixtral, 8)
    assert find_expert_obstacle(levers, mixtral, 8) is None


def test_a_model_without_experts_has_none_to_share() -> None:
    shape = load_model("tiny_llama")
    with pytest.raises(ConfigError, match="needs a model with experts"):
        check_layout(Levers(engine="fsdp2", expert_parallel=2), shape, 8)


def test_layers_whose_tokens_travel_are_not_compiled(mixtral: ModelShape) -> None:
    assert "--compile off" in str(find_compile_obstacle(Levers(engine="fsdp2", expert_parallel=2), mixtral))


def test_the_busiest_rank_is_priced(mixtral: ModelShape) -> None:
    """Of a single expert on each GPU as much as of that; several even out."""
    assert busiest_load(8, 8) == 1 + BUSIEST_EXPERT
    assert busiest_load(128, 8) == 1 + BUSIEST_EXPERT / 4
    assert busiest_load(128, 1) == 1
    said = [str(each) for each in estimate(mixtral, Levers(engine="fsdp2", expert_parallel=8), 8).because]
    assert any("the busiest is taken to get 50% more tokens" in each for each in said)


@pytest.mark.parametrize("again", [0, 2, None])
@pytest.mark.parametrize("gpus", ["8xH200", "2x8xL40S"])
@pytest.mark.parametrize("more", [{}, {"shard_within": 8}, {"lora_targets": "q_proj", "method": "lora"}])
def test_a_search_counts_the_seconds_of_a_plan(
    mixtral: ModelShape, again: int | None, gpus: str, more: dict[str, Any]
) -> None:
    hardware = parse_hardware(gpus)
    levers = levers_from_flags({**SHARED, **more, "accum": 2}, mixtral)
    levers = replace(levers, checkpointing=Checkpointing(layers=again))
    times = Clock(mixtral, levers, hardware).times(levers, KernelChoice(levers.attention, levers.scan, levers.buckets))
    assert times[-1 if again is None else again] == pytest.approx(pace(mixtral, levers, hardware).step_s, rel=1e-9)


def test_what_is_gathered_shrinks_and_what_rests_does_not(mixtral: ModelShape) -> None:
    """A quarter of the experts, which are nearly all of a layer."""
    levers = Levers(engine="fsdp2", checkpointing=Checkpointing(layers=None))
    whole, shared = (estimate(mixtral, replace(levers, expert_parallel=each), 8).gpu.phases for each in (1, 4))
    gathered = [each["forward"].components["gathered_weights"] for each in (whole, shared)]
    assert gathered[1] < 0.35 * gathered[0]
    for part in ("weights", "optimizer_states"):
        assert shared["step"].components[part] == whole["step"].components[part]


def plan_for(folder: Path, config: dict[str, Any], gpus: str) -> Plan:
    model = folder / "config.json"
    model.write_text(json.dumps(config))
    flags = {"model": str(model), "method": "full", "seq": 512, "effective_batch": 8, "output": str(folder / "run")}
    return plan(job_from_flags(flags), None, parse_hardware(gpus, host_ram="1TB"))


def test_a_plan_shares_experts_that_slow_links_would_carry_for_few_tokens(tmp_path: Path) -> None:
    found = plan_for(tmp_path, MIXTRAL, "8xL40S")
    assert found.chosen is not None
    assert found.chosen.levers.expert_parallel == 8
    tried = {way.levers.expert_parallel for way in found.alternatives if way.levers.is_fsdp2}
    assert {1, 2, 4} <= tried


def test_a_plan_for_a_model_without_experts_tries_none(tmp_path: Path) -> None:
    dense = {key: value for key, value in MIXTRAL.items() if "experts" not in key}
    found = plan_for(tmp_path, {**dense, "model_type": "mistral"}, "8xL40S")
    assert {way.levers.expert_parallel for way in found.alternatives} == {1}
