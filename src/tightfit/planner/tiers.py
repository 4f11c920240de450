"""Named corners of the levers, for people who think in their guides' words.

A tier fixes how the training is computed, and some of what is trained: batch, sequence, 4-bit weights; its values
stand in `tier_values.py`. The plan says whether the tier fits and what the free search would have done instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.job import Job
from tightfit.messages import Listing, Message, Said
from tightfit.planner import plan_within
from tightfit.planner.calibration import Calibration
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.tier_values import TIERS, Tier, apply_tier, by_memory, from_card_down
from tightfit.priced import GIB, amounts, strategy_name
from tightfit.types import ConfigError, Hardware, ModelShape, UserError

__all__ = ["TIERS", "Tier", "Tiered", "all_tiers", "apply_tier", "by_memory", "plan_tier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """A tier's plan beside what the free search would do."""

    tier: Tier
    plan: Plan | None  # None: the tier cannot run this job; `problem` says why
    problem: str = ""
    costs: tuple[Said, ...] = ()  # what it changes in the result, against what was asked, a sentence each
    free: Plan | None = None
    because: tuple[Said, ...] = ()

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def without_it(self) -> Message | None:
        """What would run without the tier, which does not; None: nothing would, or the tier does."""
        way = self.free.chosen if self.free is not None else None
        if self.fits or way is None:
            return None
        needed, size = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
        changes = Listing(way.changes, ";") if way.changes else Message("plan.training-stays")
        return Message("plan.leave-tier-out", way=strategy_name(way.levers), needed=needed, size=size, changes=changes)


def plan_tier(
    name: str,
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    explicit: frozenset[str],
    calibration: Calibration | None = None,
) -> Tiered:
    """One tier, or `auto`; `explicit` names the fields of the job that the user set (`sequence`, `levers.engine`)."""
    if name not in (*TIERS, "auto"):
        from tightfit.inputs.flags import meant

        raise ConfigError(Message("plan.unknown-tier", name=name, hint=meant(name, [*TIERS, "auto", "all"])))
    tiers = from_card_down(hardware) if name == "auto" else [TIERS[name]]
    bounds = Bounds(calibration=calibration)
    free = plan_within(bounds, replace(job, tier=None), shape, hardware)
    for tier in tiers:
        # A change of the training is no advice where the training fits as it is, or where a smaller tier may.
        advised = replace(bounds, advice=not free.fits and tier is tiers[-1])
        found = _plan_with(tier, job, shape, hardware, explicit, advised)
        if found.fits:
            break
    said: list[Said] = []
    if name == "auto":  # which tier the card alone would get, and why it is another
        usual, sentence = by_memory(hardware)
        said.append(sentence)
        if found.tier is not usual and found.fits:
            said.append(Message("plan.tier-next", name=usual.name, next=found.tier.name))
        elif found.tier is not usual:
            said.append(Message("plan.no-tier-holds", name=usual.name))
    way = free.chosen
    if way is None:
        said.append(Message("plan.free-search-nothing"))
    else:
        said.append(
            Message(
                "plan.free-search",
                sequence=way.levers.sequence,
                batch=free.effective_batch,
                way=strategy_name(way.levers),
                micro_batch=way.levers.micro_batch,
                accumulation=way.levers.accumulation,
                tokens=way.pace.tokens_per_s,
                size=way.footprint.gpu.required_bytes / GIB,
            )
        )
    return replace(found, free=free, because=tuple(said))


def all_tiers(
    job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str], calibration: Calibration | None = None
) -> list[Tiered]:
    """Every tier side by side."""
    bounds = Bounds(calibration=calibration, advice=False)
    return [_plan_with(tier, job, shape, hardware, explicit, bounds) for tier in TIERS.values()]


def _plan_with(
    tier: Tier, job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str], bounds: Bounds
) -> Tiered:
    try:
        changed, costs = apply_tier(tier, job, hardware, explicit)
        answer = plan_within(bounds, changed, shape, hardware)
        # each of its ways says what the tier changes, so that files and JSON know it without the tier
        ways = [replace(way, changes=(*costs, *way.changes)) for way in answer.alternatives]
        chosen = answer.chosen and replace(answer.chosen, changes=(*costs, *answer.chosen.changes))
        answer = replace(answer, chosen=chosen, alternatives=tuple(ways))
        return Tiered(tier=tier, plan=answer, costs=costs)
    except UserError as error:
        return Tiered(tier=tier, plan=None, problem=str(error))
