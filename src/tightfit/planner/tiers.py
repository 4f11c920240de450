"""What the named corners of the levers are, and what becomes of a job in one of them.

The values are those of the guides that the names come from. What the user said explicitly wins, and whatever a
tier changes in the result is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tightfit.job import Job
from tightfit.job import Tier as TierName
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.messages import Message
from tightfit.planner.candidates import BY_PARAMETER, FRUGAL, has_fsdp2
from tightfit.priced import GIB
from tightfit.types import READ_TOGETHER, ConfigError, Hardware, Precision


@dataclass(frozen=True, slots=True)
class Tier:
    """What a name stands for."""

    name: TierName
    said: str  # the id of what it is for
    engine: str
    offload_optimizer: str = "none"
    offload_param: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    sequence: int | None = None  # None: the user's
    precision: Precision | None = None
    quantised: bool = False  # 4-bit weights under adapters
    frugal: bool = False  # ZeRO-3 with little gathered at a time

    @property
    def about(self) -> Message:
        return Message(self.said)

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
            pins |= {**FRUGAL, "persistence_threshold": 10_000}
        return pins


TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("deepspeed", "plan.tier-deepspeed", "zero2", micro_batch=4, accumulation=4, sequence=2048),
        Tier("stage2_offload", "plan.tier-stage2-offload", "zero2", "cpu", "none", 3, accumulation=6, sequence=1792),
        Tier("stage3", "plan.tier-stage3", "zero3", micro_batch=2, accumulation=8, sequence=1536),
        Tier("minimal", "plan.tier-minimal", "zero3", "cpu", "cpu", accumulation=16, sequence=1024),
        Tier("standard", "plan.tier-standard", "zero3", "cpu", "cpu", accumulation=8),
        Tier("fp16_safe", "plan.tier-fp16-safe", "zero3", "cpu", "cpu", accumulation=8, precision="fp16"),
        Tier("extreme", "plan.tier-extreme", "zero3", "cpu", "cpu", sequence=512, precision="fp16"),
        Tier("optimized", "plan.tier-optimized", "zero3", "cpu", "cpu", accumulation=32, sequence=512, frugal=True),
        Tier("quantized", "plan.tier-quantized", "zero2", accumulation=32, sequence=512, quantised=True),
        Tier("limit", "plan.tier-limit", "zero2", accumulation=64, sequence=256, quantised=True),
    )
}

STANDS_IN: Precision = "bf16"  # for fp16 on a processor that does not compute it

BY_MEMORY = ((12, "deepspeed"), (6, "stage2_offload"), (4, "stage3"), (0, "minimal"))
"""GiB of the card, as sold: more than 12; from 6; from 4; less."""


def by_memory(hardware: Hardware) -> tuple[Tier, Message]:
    """The tier for this card, and why."""
    size = round(hardware.gpu.memory_bytes / GIB)
    least, roomy = BY_MEMORY[0]
    name = roomy if size > least else next(name for least, name in BY_MEMORY[1:] if size >= least)
    return TIERS[name], Message("plan.tier-by-card", size=size, name=name, about=TIERS[name].about)


def from_card_down(hardware: Hardware) -> list[Tier]:
    """The tier for this card, and those for smaller ones, which a larger model needs."""
    names = [name for _, name in BY_MEMORY]
    return [TIERS[name] for name in names[names.index(by_memory(hardware)[0].name) :]]


def apply_tier(tier: Tier, job: Job, hardware: Hardware, explicit: frozenset[str]) -> tuple[Job, tuple[Message, ...]]:
    """The job with the tier's values wherever the user said nothing, and what that changes in the result."""
    costs: list[Message] = []
    changes: dict[str, Any] = {"tier": tier.name}
    if tier.sequence is not None and "sequence" not in explicit:
        changes["sequence"] = tier.sequence
        if tier.sequence != job.sequence:
            costs.append(Message("plan.tier-sequence", sequence=tier.sequence, asked=job.sequence))
    if tier.precision is not None and "precision" not in explicit and tier.precision != job.precision:
        changes["precision"] = tier.precision
        computed = STANDS_IN if tier.precision == "fp16" and hardware.gpu.fp16 is False else tier.precision
        if computed != job.precision:
            costs.append(Message("plan.tier-precision", computed=computed, precision=job.precision))
    if tier.quantised and job.method != "qlora":
        if "method" in explicit and job.method == "full":
            raise ConfigError(Message("plan.tier-needs-adapters", name=tier.name))
        changes["method"] = "qlora"
        costs.append(Message("plan.tier-four-bits"))
        if job.method == "full":
            changes["lora"] = job.lora
            costs.append(Message("plan.tier-adapters", rank=job.lora.rank))
    own = tier.levers()
    kept = tier.engine in BY_PARAMETER or tier.offload_optimizer != "none"
    if job.optimizer in EIGHT_BIT and not kept and job.trainer == "tightfit":
        # The tier's engine could not save 8-bit states. A tier that has states on the host stays as it is: 8-bit ones
        # cannot go there. Other trainers save them in a way of their own.
        own["engine"] = "fsdp2" if has_fsdp2(hardware) else "zero0"
    pins = {key: value for key, value in own.items() if f"levers.{key}" not in explicit}
    levers = {**pins, **{key: value for key, value in job.levers.items() if f"levers.{key}" in explicit}}
    changes["levers"] = levers
    ranks = max(1, hardware.world // prod(int(levers.get(name, 1)) for name in READ_TOGETHER))
    if "effective_batch" in explicit and job.effective_batch is not None:
        share, rest = divmod(job.effective_batch, ranks)
        if "levers.accum" not in explicit and not rest:  # the tier's accumulation follows, then its micro batch
            most = min(int(levers["micro_batch"]), max(share, 1))
            micro = next(size for size in range(most, 0, -1) if share % size == 0)
            changes["levers"] = {**levers, "micro_batch": micro, "accum": share // micro}
    else:
        batch = int(levers["micro_batch"]) * int(levers["accum"]) * ranks
        changes["effective_batch"] = batch
        costs.append(Message("plan.tier-batch", batch=batch))
    return replace(job, **changes), tuple(costs)
