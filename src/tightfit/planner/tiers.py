"""Named corners of the levers, for people who think in their guides' words.

A tier fixes how the training is computed, and some of what is trained: batch, sequence, 4-bit weights. Its values
are defaults. What the user said explicitly wins, and every costly value that a tier brings is printed. The plan
says whether the tier fits and what the free search would have done instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tightfit.job import Adapters, Job
from tightfit.planner import plan
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, strategy_name
from tightfit.types import ConfigError, Hardware, ModelShape, Precision, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What a name stands for."""

    name: str
    about: str
    engine: str
    offload_optimizer: str = "none"
    offload_param: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    sequence: int | None = None
    """None: the user's."""
    precision: Precision | None = None
    quantised: bool = False
    """4-bit weights under adapters."""
    frugal: bool = False
    """ZeRO-3 with little gathered at a time."""

    def levers(self) -> dict[str, Any]:
        """The free levers that it pins, under the names of the flags."""
        pins: dict[str, Any] = {
            "engine": self.engine,
            "offload_optimizer": self.offload_optimizer,
            "offload_param": self.offload_param,
            "checkpointing": "full",
            "micro_batch": self.micro_batch,
            "accum": self.accumulation,
        }
        if self.frugal:
            pins |= {"prefetch_bucket": 10_000_000, "persistence_threshold": 10_000}
            pins |= {"max_live_parameters": 100_000_000, "max_reuse_distance": 100_000_000}
        return pins


_BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}

TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier(
            name="deepspeed",
            about="ZeRO-2, for cards of more than 12 GB",
            engine="zero2",
            micro_batch=4,
            accumulation=4,
            sequence=2048,
        ),
        Tier(
            name="stage2_offload",
            about="ZeRO-2 with the optimizer on the host, for 6 to 12 GB",
            engine="zero2",
            offload_optimizer="cpu",
            micro_batch=3,
            accumulation=6,
            sequence=1792,
        ),
        Tier(
            name="stage3",
            about="ZeRO-3, for 4 to 6 GB",
            engine="zero3",
            micro_batch=2,
            accumulation=8,
            sequence=1536,
        ),
        Tier(
            name="minimal",
            about="ZeRO-3 with everything on the host, for less than 4 GB",
            engine="zero3",
            **_BOTH,  # type: ignore[arg-type]
            micro_batch=1,
            accumulation=16,
            sequence=1024,
        ),
        Tier(
            name="standard",
            about="ZeRO-3 with everything on the host, eight sequences a GPU",
            engine="zero3",
            **_BOTH,  # type: ignore[arg-type]
            accumulation=8,
        ),
        Tier(
            name="fp16_safe",
            about="standard in fp16, with a loss scale that starts low",
            engine="zero3",
            **_BOTH,  # type: ignore[arg-type]
            accumulation=8,
            precision="fp16",
        ),
        Tier(
            name="extreme",
            about="ZeRO-3 with everything on the host, one sequence of 512 tokens a GPU",
            engine="zero3",
            **_BOTH,  # type: ignore[arg-type]
            accumulation=1,
            sequence=512,
            precision="fp16",
        ),
        Tier(
            name="optimized",
            about="ZeRO-3 with everything on the host and little gathered at a time, 512 tokens",
            engine="zero3",
            **_BOTH,  # type: ignore[arg-type]
            accumulation=32,
            sequence=512,
            frugal=True,
        ),
        Tier(
            name="quantized",
            about="ZeRO-2 on 4-bit weights, 512 tokens",
            engine="zero2",
            accumulation=32,
            sequence=512,
            quantised=True,
        ),
        Tier(
            name="limit",
            about="ZeRO-2 on 4-bit weights, 256 tokens",
            engine="zero2",
            accumulation=64,
            sequence=256,
            quantised=True,
        ),
    )
}

BY_MEMORY = ((12, "deepspeed"), (6, "stage2_offload"), (4, "stage3"), (0, "minimal"))
"""GiB of the card, as sold: more than 12; from 6; from 4; less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """A tier's plan beside what the free search would do."""

    tier: Tier
    plan: Plan | None
    """None: the tier cannot run this job; `problem` says why."""
    problem: str = ""
    costs: tuple[str, ...] = ()
    """What it changes in the result, against what was asked, a sentence each."""
    free: Plan | None = None
    because: tuple[str, ...] = ()


def by_memory(hardware: Hardware) -> tuple[Tier, str]:
    """The tier for this card, and why."""
    size = round(hardware.gpu.memory_bytes / GIB)
    least, roomy = BY_MEMORY[0]
    name = roomy if size > least else next(name for least, name in BY_MEMORY[1:] if size >= least)
    return TIERS[name], f"--tier auto: a card of {size} GB gets {name} ({TIERS[name].about})."


def tiered(name: str, job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str]) -> Tiered:
    """One tier, or `auto`; `explicit` names the fields of the job that the user set (`sequence`, `levers.engine`)."""
    said: tuple[str, ...] = ()
    if name == "auto":
        tier, sentence = by_memory(hardware)
        said = (sentence,)
    elif name in TIERS:
        tier = TIERS[name]
    else:
        from tightfit.inputs.flags import meant

        raise ConfigError(f"--tier knows no {name!r}{meant(name, [*TIERS, 'auto', 'all'])}")
    free = plan(replace(job, tier=None), shape, hardware)
    return replace(_planned(tier, job, shape, hardware, explicit), free=free, because=(*said, *_instead(free)))


def all_tiers(job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str]) -> list[Tiered]:
    """Every tier side by side."""
    return [_planned(tier, job, shape, hardware, explicit) for tier in TIERS.values()]


def _planned(tier: Tier, job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str]) -> Tiered:
    try:
        changed, costs = applied(tier, job, hardware, explicit)
        return Tiered(tier=tier, plan=_with_costs(plan(changed, shape, hardware), costs), costs=costs)
    except UserError as error:
        return Tiered(tier=tier, plan=None, problem=str(error))


def _with_costs(answer: Plan, costs: tuple[str, ...]) -> Plan:
    """Each of its ways says what the tier changes, so that files and JSON know it without the tier."""
    ways = [replace(way, changes=(*costs, *way.changes)) for way in answer.alternatives]
    chosen = answer.chosen and replace(answer.chosen, changes=(*costs, *answer.chosen.changes))
    return replace(answer, chosen=chosen, alternatives=tuple(ways))


def applied(tier: Tier, job: Job, hardware: Hardware, explicit: frozenset[str]) -> tuple[Job, tuple[str, ...]]:
    """The job with the tier's values wherever the user said nothing, and what that changes in the result."""
    costs: list[str] = []
    changes: dict[str, Any] = {"tier": tier.name}
    if tier.sequence is not None and "sequence" not in explicit:
        changes["sequence"] = tier.sequence
        if tier.sequence != job.sequence:
            costs.append(f"sequences of {tier.sequence} tokens instead of {job.sequence}")
    if tier.precision is not None and "precision" not in explicit and tier.precision != job.precision:
        changes["precision"] = tier.precision
        costs.append(f"{tier.precision} instead of {job.precision}")
    if tier.quantised and job.method != "qlora":
        if "method" in explicit and job.method == "full":
            raise ConfigError(f"--tier {tier.name} trains adapters on 4-bit weights: it needs --method lora or qlora")
        changes["method"] = "qlora"
        costs.append("4-bit weights (NF4) instead of 16-bit ones")
        if job.method == "full":
            changes["lora"] = job.lora if job.lora != Adapters() else Adapters()
            costs.append(f"adapters of rank {job.lora.rank} instead of every weight")
    pins = {key: value for key, value in tier.levers().items() if f"levers.{key}" not in explicit}
    levers = {**pins, **{key: value for key, value in job.levers.items() if f"levers.{key}" in explicit}}
    changes["levers"] = levers
    if "effective_batch" in explicit and job.effective_batch is not None:
        changes["levers"] = _kept_batch(levers, job.effective_batch, hardware.world, explicit)
    else:
        batch = int(levers["micro_batch"]) * int(levers["accum"]) * hardware.world
        changes["effective_batch"] = batch
        costs.append(f"an effective batch of {batch}")
    return replace(job, **changes), tuple(costs)


def _kept_batch(levers: dict[str, Any], batch: int, world: int, explicit: frozenset[str]) -> dict[str, Any]:
    """The asked batch wins: the tier's accumulation follows it, then its micro batch."""
    share = batch // world
    if "levers.accum" in explicit or batch % world:
        return levers
    micro = next(size for size in range(min(int(levers["micro_batch"]), max(share, 1)), 0, -1) if share % size == 0)
    return {**levers, "micro_batch": micro, "accum": share // micro}


def _instead(free: Plan) -> tuple[str, ...]:
    if free.chosen is None:
        return ("The free search finds nothing that fits without changing the training.",)
    way = free.chosen
    return (
        f"The free search, with {way.levers.sequence} tokens and an effective batch of {free.effective_batch}, would "
        f"take {strategy_name(way.levers)}, {way.levers.micro_batch} × {way.levers.accumulation}: "
        f"{way.pace.tokens_per_s:,.0f} tokens/s in {way.footprint.gpu.required_bytes / GIB:.1f} GiB.",
    )
