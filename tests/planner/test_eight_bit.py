"""8-bit optimizers are planned only where a checkpoint can hold their states: parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
from small_questions import machine, preset

from tightfit.job import Adapters, Job, Limits
from tightfit.messages import Message
from tightfit.planner import plan, plan_tier
from tightfit.planner.candidates import strategies
from tightfit.planner.limits import longest_sequence
from tightfit.planner.plan import Plan
from tightfit.planner.tiers import TIERS
from tightfit.types import ConfigError, Engine, Levers, Optimizer

KINDS: tuple[Optimizer, ...] = ("adamw8bit", "paged_adamw8bit")
FOUR = machine("4x24GB", "128GB")


def planned(word: str = "4x24GB", model: str = "tiny_llama", **job: Any) -> Plan:
    return plan(Job(model=model, **{"optimizer": "adamw8bit", **job}), preset(model), machine(word, "128GB"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_only_engines_that_keep_states_by_parameter_are_considered(kind: Optimizer, method: str) -> None:
    answer = planned(optimizer=kind, method=method, lora=Adapters(rank=4))
    ways = (answer.chosen, *answer.alternatives)
    assert {way.levers.engine for way in ways if way is not None} == {"ddp", "zero0", "fsdp2"}
    assert answer.chosen is not None
    assert Message("plan.zero-left-out") in answer.because


def test_other_optimizers_have_every_engine() -> None:
    engines = {levers.engine for levers in strategies(Levers(), frozenset(), FOUR)}
    assert engines == {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "stream"}
    assert Message("plan.zero-left-out") not in planned(optimizer="adamw").because


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_pinned_stage_is_refused_with_what_to_use(engine: Engine, kind: Optimizer) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(optimizer=kind, levers={"engine": engine})
    assert str(refused.value) == (
        f"under {engine} the states of --optimizer {kind} belong to no parameter alone, so no checkpoint can hold "
        "them: use --engine fsdp2, --engine zero0, --engine ddp or --optimizer adamw"
    )


def test_what_is_advised_depends_on_what_runs() -> None:
    """No ZeRO-0 in fp16, no FSDP2 on Hygon's stack, none without fp32
    weights, no 8-bit states on the host."""
    with pytest.raises(ConfigError, match=r"use --engine fsdp2, --engine ddp or --optimizer adamw$"):
        planned(precision="fp16", levers={"engine": "zero2"})
    with pytest.raises(ConfigError, match=r"use --engine zero0, --engine ddp or --optimizer adamw$"):
        planned("8xK100-64GB", levers={"engine": "zero2"})
    with pytest.raises(ConfigError, match=r"use --engine ddp or --optimizer adamw$"):
        planned("8xK100-64GB", precision="fp16", levers={"engine": "zero2"})
    with pytest.raises(ConfigError, match=r"trains pure bf16 here: use --optimizer adamw$"):
        planned(master_weights=False)
    with pytest.raises(ConfigError, match=r"can hold them: use --optimizer adamw$"):
        planned(levers={"engine": "zero3", "offload_optimizer": "cpu"})


@pytest.mark.parametrize("engine", ["zero0", "fsdp2"])
def test_what_is_advised_is_planned(engine: Engine) -> None:
    way = planned(levers={"engine": engine}).chosen
    assert way is not None
    assert (way.levers.engine, way.levers.optimizer) == (engine, "adamw8bit")


@pytest.mark.parametrize("name", [name for name, tier in TIERS.items() if tier.offload_optimizer == "none"])
@pytest.mark.parametrize(("word", "engine"), [("4x24GB", "fsdp2"), ("4xK100-64GB", "zero0")])
def test_a_tier_gives_way_to_an_engine_that_can_save(name: str, word: str, engine: Engine) -> None:
    job = Job(model="tiny_llama", optimizer="adamw8bit", method="lora")
    found = plan_tier(name, job, preset("tiny_llama"), machine(word, "128GB"), frozenset({"optimizer", "method"}))
    assert found.plan is not None
    assert found.plan.chosen is not None
    assert found.plan.chosen.levers.engine == engine
    assert plan(Job(model="tiny_llama", tier=name, method="lora", optimizer="adamw8bit"), None, machine(word)).fits


@pytest.mark.parametrize("name", [name for name, tier in TIERS.items() if tier.offload_optimizer != "none"])
def test_a_tier_on_the_host_says_what_to_use(name: str) -> None:
    job = Job(model="tiny_llama", optimizer="adamw8bit")
    found = plan_tier(name, job, preset("tiny_llama"), FOUR, frozenset({"optimizer"}))
    assert found.plan is None
    assert found.problem.endswith("use --optimizer adamw")


def test_an_engine_that_was_named_beside_a_tier_stays() -> None:
    job = Job(model="tiny_llama", optimizer="adamw8bit", levers={"engine": "zero0"})
    found = plan_tier("stage3", job, preset("tiny_llama"), FOUR, frozenset({"optimizer", "levers.engine"}))
    assert found.plan is not None
    assert found.plan.chosen is not None
    assert found.plan.chosen.levers.engine == "zero0"


def test_the_largest_that_fits_is_asked_of_the_same_engines() -> None:
    job = Job(model="tiny_llama", optimizer="adamw8bit")
    way = longest_sequence(job, preset("tiny_llama"), FOUR).plan.chosen
    assert way is not None
    assert way.levers.engine in ("ddp", "zero0", "fsdp2")
    with pytest.raises(ConfigError, match="use --engine fsdp2"):
        longest_sequence(Job(model="tiny_llama", optimizer="adamw8bit", levers={"engine": "zero2"}), *_tiny())


def _tiny() -> tuple[Any, Any]:
    return preset("tiny_llama"), FOUR


def test_another_trainer_saves_in_its_own_way() -> None:
    job = Job(model="tiny_llama", optimizer="adamw8bit", levers={"engine": "zero2"})
    way = plan(job, *_tiny(), partial=False, engines=frozenset({"zero0", "zero1", "zero2", "zero3"})).chosen
    assert way is not None
    assert way.levers.engine == "zero2"


@pytest.mark.thorough
def test_the_allowed_change_is_one_that_can_be_saved() -> None:
    hardware = machine("4x24GB", "32GB")
    job = Job(model="7b_mamba", limits=Limits(allow=("8bit-optimizer",)))
    way = plan(job, preset("7b_mamba"), hardware).chosen
    assert way is not None
    assert (way.levers.optimizer, way.levers.engine) == ("adamw8bit", "fsdp2")
    assert way.changes == (Message("plan.cost-8bit"),)
