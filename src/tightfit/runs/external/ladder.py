"""The next way to compute a training whose model is not known: one rung down a fixed ladder.

Where the model is known, the planner finds the next config and says how much less it holds. Here nothing can be
priced, so the order is fixed, the cheapest first: smaller micro batches (with as much accumulation more, so that the
effective batch stays), activations computed again, the next ZeRO stage, the optimizer on the host, the weights too,
little gathered at a time. What changes the training comes last, and only where it was allowed: 4-bit weights under
adapters, then shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.job.known import block_in
from tightfit.messages import Message, Said
from tightfit.runs.external.config import ExternalTraining, Knobs

SHORTEST = 128
FRUGAL: tuple[tuple[str, int | bool], ...] = (
    ("stage3_prefetch_bucket_size", 10_000_000),
    ("stage3_param_persistence_threshold", 10_000),
    ("stage3_max_live_parameters", 100_000_000),
    ("stage3_max_reuse_distance", 100_000_000),
)
LIMIT_TOKENS = 256


_NEXT_SCHEME = Message("external.next-scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class NextConfig:
    """Another way to compute the training."""

    knobs: Knobs
    changed: tuple[Said, ...]
    because: Said = _NEXT_SCHEME
    crosses: bool = False  # a checkpoint of the last way cannot be resumed with its optimizer
    costs: tuple[Said, ...] = ()  # what it changes in the training, as the user allowed


_LAID_OUT_BY = ("stage", "offload_optimizer", "offload_param", "quantised")
"""Knobs by which a trainer lays out its checkpoint: its optimizer cannot be resumed with others."""


def rungs(external: ExternalTraining, now: Knobs, allow: frozenset[str], *, host: bool = False) -> Iterator[NextConfig]:
    """Every next way that this config can be changed to, the cheapest first; `host`: it is RAM that was missing."""

    def step(knobs: Knobs, changed: Message, *costs: Message) -> NextConfig:
        crosses = any(getattr(knobs, name) != getattr(now, name) for name in _LAID_OUT_BY)
        return NextConfig(knobs=knobs, changed=(changed,), crosses=crosses, costs=costs)

    if host:
        if {now.offload_optimizer, now.offload_param} & {"cpu", "nvme"} and now.pin_memory is not False:
            yield step(replace(now, pin_memory=False), Message("external.unpinned"))
        return
    micro, accumulation = now.micro_batch, now.accumulation
    if micro is not None and accumulation is not None and micro >= 2:
        smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        more = accumulation * (micro // smaller)
        word = Message(
            "external.smaller-batch",
            micro=micro,
            accumulation=accumulation,
            new_micro=smaller,
            new_accumulation=more,
        )
        yield step(replace(now, micro_batch=smaller, accumulation=more), word)
    if now.checkpointing is False:
        yield step(replace(now, checkpointing=True), Message("external.recomputes"))
    if now.stage is not None:
        values = external.deepspeed.values if external.deepspeed is not None else {}
        live = block_in(values, "zero_optimization").get("stage3_max_live_parameters")
        is_frugal = isinstance(live, int | float) and live <= dict(FRUGAL)["stage3_max_live_parameters"]
        if now.stage < 2:
            yield step(replace(now, stage=2), Message("external.stage", old=now.stage, new=2))
        elif now.offload_optimizer == "none":
            yield step(replace(now, offload_optimizer="cpu"), Message("external.optimizer-on-host"))
        elif now.stage == 2:
            yield step(replace(now, stage=3), Message("external.stage", old=2, new=3))
        elif now.offload_param == "none":
            yield step(replace(now, offload_param="cpu"), Message("external.weights-on-host"))
        elif external.deepspeed is not None and not is_frugal:
            yield step(replace(now, buckets=FRUGAL), Message("external.gathers-little"))
    # what changes the training
    if "quantize" in allow and now.quantised is False:
        costs = Message("external.quantized-cost")
        yield step(replace(now, quantised=True), Message("external.quantized"), costs)
    length = now.sequence
    if "shorter-seq" in allow and external.is_llamafactory and length is not None and length // 2 >= SHORTEST:
        shorter = length // 2
        id_ = "external.shorter-limit" if now.quantised and shorter <= LIMIT_TOKENS else "external.shorter"
        costs = Message("external.shorter-cost", new=shorter, old=length)
        yield step(replace(now, sequence=shorter), Message(id_, old=length, new=shorter), costs)


def would_help(external: ExternalTraining, now: Knobs, allow: frozenset[str]) -> tuple[Message, ...]:
    """What was not allowed, or cannot be written here."""
    said = []
    if now.quantised is False and "quantize" not in allow:
        said.append(Message("external.allow-quantize"))
    if external.is_llamafactory and "shorter-seq" not in allow and (now.sequence or 0) >= 2 * SHORTEST:
        said.append(Message("external.allow-shorter"))
    return tuple(said)
