"""Named corners of the levers, with the values that the users' notes give them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_questions import card, machine, preset

from tightfit.job import Job, Machine
from tightfit.messages import Message
from tightfit.planner import all_tiers, plan, plan_tier
from tightfit.planner.tiers import TIERS, apply_tier, by_memory
from tightfit.types import ConfigError, Gpu, Hardware, Method

VALUES = {
    # name: engine, optimizer, weights, micro batch, accumulation, tokens
    "deepspeed": ("zero2", "none", "none", 4, 4, 2048),
    "stage2_offload": ("zero2", "cpu", "none", 3, 6, 1792),
    "stage3": ("zero3", "none", "none", 2, 8, 1536),
    "minimal": ("zero3", "cpu", "cpu", 1, 16, 1024),
    "standard": ("zero3", "cpu", "cpu", 1, 8, None),
    "fp16_safe": ("zero3", "cpu", "cpu", 1, 8, None),
    "extreme": ("zero3", "cpu", "cpu", 1, 1, 512),
    "optimized": ("zero3", "cpu", "cpu", 1, 32, 512),
    "quantized": ("zero2", "none", "none", 1, 32, 512),
    "limit": ("zero2", "none", "none", 1, 64, 256),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_tier_has_the_values_of_its_note(name: str) -> None:
    tier = TIERS[name]
    found = (tier.engine, tier.offload_optimizer, tier.offload_param, tier.micro_batch, tier.accumulation)
    assert (*found, tier.sequence) == VALUES[name]
    assert (tier.precision == "fp16") == (name in ("fp16_safe", "extreme"))
    assert tier.quantised == (name in ("quantized", "limit"))
    assert tier.frugal == (name == "optimized")


STANDS_IN = Message("plan.no-fp16", name="CPU", stands_in="bf16")


def cpu(*, fp16: bool | None) -> Hardware:
    gpu = Gpu(name="CPU", vendor="cpu", memory_bytes=12 * 2**30, fp16=fp16)
    return Hardware(gpu=gpu, gpus_per_node=2, host_ram_bytes=24 * 2**30)


@pytest.mark.parametrize("tier", ["fp16_safe", "extreme", None])
def test_where_the_processor_has_no_fp16_bf16_stands_in(tier: str | None) -> None:
    """Whether the user or a tier says fp16; what torch does without DeepSpeed stays as it was asked for."""
    asked = Job(model="tiny_mamba", tier=tier) if tier else Job(model="tiny_mamba", precision="fp16")
    found = plan(asked, None, cpu(fp16=False))
    assert found.chosen is not None
    assert (found.job.precision, found.chosen.levers.precision) == ("bf16", "bf16")
    assert STANDS_IN in found.because
    assert not any("fp16" in str(change) for change in found.chosen.changes)
    for other in (cpu(fp16=True), cpu(fp16=None)):
        kept = plan(asked, None, other)
        assert kept.chosen is not None
        assert kept.chosen.levers.precision == "fp16"
        assert STANDS_IN not in kept.because
    fsdp2 = plan(Job(model="tiny_mamba", precision="fp16", levers={"engine": "fsdp2"}), None, cpu(fp16=False))
    assert fsdp2.chosen is not None
    assert fsdp2.chosen.levers.precision == "fp16"


def test_no_other_tier_is_known() -> None:
    assert list(TIERS) == list(VALUES)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (3, "minimal"),
        (4, "stage3"),
        (5, "stage3"),
        (6, "stage2_offload"),
        (8, "stage2_offload"),
        (12, "stage2_offload"),
        (16, "deepspeed"),
        (24, "deepspeed"),
    ],
)
def test_auto_goes_by_the_size_of_the_card(size: int, name: str) -> None:
    tier, why = by_memory(machine(f"1x{size}GB"))
    assert tier.name == name
    assert f"{size} GB" in str(why)
    assert name in str(why)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 5])
def test_auto_goes_on_to_a_tier_that_fits(size: int) -> None:
    """A 1.8B model under the usual tier for the card needs 5.4 GiB."""
    job = Job(model="qwen1.5-1.8b", method="lora", sequence=2048, effective_batch=16, precision="fp16")
    explicit = frozenset({"method", "sequence", "effective_batch", "precision"})
    shape, hardware = preset("qwen1.5-1.8b"), machine(f"1x{size}GB", "32GB")
    found = plan_tier("auto", job, shape, hardware, explicit)
    assert found.tier.name == "minimal"
    assert found.fits
    assert "stage3 does not hold this training: minimal is the next that does." in map(str, found.because)
    assert plan(replace(job, tier="auto"), shape, hardware).fits


def test_where_no_tier_fits_and_the_free_search_does_nothing_costly_is_advised() -> None:
    job = Job(model="qwen1.5-1.8b", method="lora", sequence=2048, effective_batch=16, precision="fp16")
    explicit = frozenset({"method", "sequence", "effective_batch", "precision"})
    found = plan_tier("stage3", job, preset("qwen1.5-1.8b"), machine("1x4GB", "32GB"), explicit)
    assert not found.fits
    assert found.plan is not None
    assert found.plan.remedies == ()
    assert found.without_it is not None
    assert "leave --tier out, and FSDP2, optimizer + weights on CPU fits in 3." in str(found.without_it)
    assert "(the training stays as it is)" in str(found.without_it)


def test_auto_goes_by_the_size_on_the_box() -> None:
    """A driver reports a little less than 12 GB for a card of 12."""
    assert by_memory(card(machine("1x12GB"), 12_282 * 2**20))[0].name == "stage2_offload"


MODELS = [("qwen1.5-0.5b", "full"), ("qwen1.5-0.5b", "lora"), ("1b_mamba", "full"), ("1b_mamba", "lora")]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "method"), MODELS)
def test_every_tier_is_planned_for_every_kind_of_model(model: str, method: Method) -> None:
    job = Job(model=model, method=method)
    found = all_tiers(job, preset(model), machine("2x24GB"), frozenset({"method"}))
    assert [each.tier.name for each in found] == list(TIERS)
    for each in found:
        if method == "full" and each.tier.quantised:
            assert each.plan is None
            assert each.problem == (
                f"--tier {each.tier.name} trains adapters on 4-bit weights: it needs --method lora or qlora"
            )
            continue
        assert each.plan is not None, each.problem
        way = each.plan.chosen or each.plan.alternatives[0]
        tier = each.tier
        assert (way.levers.engine, way.levers.micro_batch) == (tier.engine, tier.micro_batch)
        assert (way.levers.offload_optimizer, way.levers.offload_param) == (tier.offload_optimizer, tier.offload_param)
        assert way.levers.checkpointing.layers is None
        if way.world == 2:
            assert way.levers.accumulation == tier.accumulation


def test_every_costly_value_is_said() -> None:
    job = Job(model="qwen1.5-0.5b", method="full")
    _, costs = apply_tier(TIERS["limit"], job, machine("2x24GB"), frozenset())
    assert tuple(map(str, costs)) == (
        "sequences of 256 tokens instead of 2048",
        "4-bit weights (NF4) instead of 16-bit ones",
        "adapters of rank 8 instead of every weight",
        "an effective batch of 128",
    )
    _, costs = apply_tier(TIERS["fp16_safe"], job, machine("2x24GB"), frozenset())
    assert tuple(map(str, costs)) == ("fp16 instead of bf16", "an effective batch of 16")


@pytest.mark.thorough
def test_what_was_said_explicitly_wins() -> None:
    job = Job(
        model="qwen1.5-0.5b",
        method="lora",
        sequence=3000,
        precision="bf16",
        effective_batch=12,
        levers={"offload_param": "none", "checkpointing": "none"},
    )
    said = frozenset(
        {"sequence", "precision", "effective_batch", "method", "levers.offload_param", "levers.checkpointing"}
    )
    found = plan_tier("extreme", job, preset("qwen1.5-0.5b"), machine("2x24GB"), said)
    assert found.costs == ()
    assert found.plan is not None
    assert found.plan.chosen is not None
    levers = found.plan.chosen.levers
    assert (levers.sequence, levers.precision) == (3000, "bf16")
    assert (levers.engine, levers.offload_optimizer, levers.offload_param) == ("zero3", "cpu", "none")
    assert levers.checkpointing.layers == 0
    assert found.plan.chosen.effective_batch == 12


def test_an_asked_batch_is_kept_by_any_tier() -> None:
    for name, tier in TIERS.items():
        job = Job(model="qwen1.5-0.5b", method="lora", effective_batch=10)
        changed, costs = apply_tier(tier, job, machine("2x24GB"), frozenset({"effective_batch"}))
        assert changed.effective_batch == 10
        assert changed.levers["micro_batch"] * changed.levers["accum"] * 2 == 10, name
        assert not [cost for cost in costs if "batch" in str(cost)]


def test_a_tier_stands_beside_what_the_free_search_would_do() -> None:
    found = plan_tier(
        "auto", Job(model="qwen1.5-0.5b", method="lora"), preset("qwen1.5-0.5b"), machine("1x8GB"), frozenset()
    )
    assert found.tier.name == "stage2_offload"
    assert found.free is not None
    assert found.free.chosen is not None
    assert found.plan is not None
    assert found.plan.chosen is not None
    assert found.free.chosen.pace.tokens_per_s > found.plan.chosen.pace.tokens_per_s
    assert str(found.because[0]).startswith("--tier auto: a card of 8 GB gets stage2_offload")
    assert str(found.because[1]).startswith("The free search, with 2048 tokens and an effective batch of 4")


def test_an_unknown_tier_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean stage3"):
        plan_tier("stage_3", Job(model="tiny_llama"), preset("tiny_llama"), machine("1x8GB"), frozenset())


def test_the_public_function_applies_a_jobs_tier() -> None:
    machine_of = Machine(gpus="1x24GB", host_ram="64GB")
    way = plan(Job(model="qwen1.5-0.5b", tier="minimal", hardware=machine_of)).chosen
    assert way is not None
    assert (way.levers.engine, way.levers.offload_param, way.levers.sequence) == ("zero3", "cpu", 1024)
    assert "sequences of 1024 tokens instead of 2048" in map(str, way.changes)
    kept = plan(Job(model="qwen1.5-0.5b", tier="minimal", sequence=512, hardware=machine_of)).chosen
    assert kept is not None
    assert kept.levers.sequence == 512, "what the job says wins"
    with pytest.raises(ConfigError, match="name one tier"):
        plan(Job(model="qwen1.5-0.5b", tier="all", hardware=machine_of))
