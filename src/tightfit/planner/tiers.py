"""Named corners of the levers, for people who think in their guides' words.

A tier fixes how the training is computed, and some of what is trained: batch, sequence, 4-bit weights; its values
stand in `tier_values.py`. The plan says whether the tier fits and what the free search would have done instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.job import Job
from tightfit.planner import plan_within
from tightfit.planner.calibration import Calibration
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.tier_values import TIERS, Tier, applied, by_memory
from tightfit.priced import GIB, strategy_name
from tightfit.types import ConfigError, Hardware, ModelShape, UserError

__all__ = ["TIERS", "Tier", "Tiered", "all_tiers", "applied", "by_memory", "tiered"]


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


def tiered(
    name: str,
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    explicit: frozenset[str],
    calibration: Calibration | None = None,
) -> Tiered:
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
    free = plan_within(Bounds(calibration=calibration), replace(job, tier=None), shape, hardware)
    found = _planned(tier, job, shape, hardware, explicit, calibration)
    return replace(found, free=free, because=(*said, *_instead(free)))


def all_tiers(
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    explicit: frozenset[str],
    calibration: Calibration | None = None,
) -> list[Tiered]:
    """Every tier side by side."""
    return [_planned(tier, job, shape, hardware, explicit, calibration) for tier in TIERS.values()]


def _planned(
    tier: Tier,
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    explicit: frozenset[str],
    calibration: Calibration | None,
) -> Tiered:
    try:
        changed, costs = applied(tier, job, hardware, explicit)
        answer = plan_within(Bounds(calibration=calibration), changed, shape, hardware)
        return Tiered(tier=tier, plan=_with_costs(answer, costs), costs=costs)
    except UserError as error:
        return Tiered(tier=tier, plan=None, problem=str(error))


def _with_costs(answer: Plan, costs: tuple[str, ...]) -> Plan:
    """Each of its ways says what the tier changes, so that files and JSON know it without the tier."""
    ways = [replace(way, changes=(*costs, *way.changes)) for way in answer.alternatives]
    chosen = answer.chosen and replace(answer.chosen, changes=(*costs, *answer.chosen.changes))
    return replace(answer, chosen=chosen, alternatives=tuple(ways))


def _instead(free: Plan) -> tuple[str, ...]:
    if free.chosen is None:
        return ("The free search finds nothing that fits without changing the training.",)
    way = free.chosen
    return (
        f"The free search, with {way.levers.sequence} tokens and an effective batch of {free.effective_batch}, would "
        f"take {strategy_name(way.levers)}, {way.levers.micro_batch} × {way.levers.accumulation}: "
        f"{way.pace.tokens_per_s:,.0f} tokens/s in {way.footprint.gpu.required_bytes / GIB:.1f} GiB.",
    )
