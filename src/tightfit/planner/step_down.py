"""The next plan after memory ran out: the fastest of those that predict to use enough less where it was missing; and
after a run that left much of its cards unused, the faster one that would fit (`room_above`).

`step_down` changes how the training is computed, never what: model, method, sequence,
precision, optimizer and effective batch stay those of the last plan, unless the job's `limits.allow` names what may
change. What the user pinned stays pinned; a tier's levers are defaults and give way.

*Enough* is what was missing and a margin, in the phase and on the side where it was missing, both plans corrected by
what runs have measured. Every earlier failure goes on to count, and each asks for twice the margin of the one before it
on its side: a plan that failed cannot come again, and step-downs end after a few.

On the host, memory that is not locked is a lever of its own, for PyTorch rounds every locked block up to a power of
two. It is not priced in seconds, so it is tried last; where locking is what failed, first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tightfit.inputs.flags import TRAINING, spelt
from tightfit.job import Job
from tightfit.job.fields import FREE_LEVERS
from tightfit.memory import required_bytes
from tightfit.messages import Listing, Message, Said
from tightfit.planner import answer_question, question_of
from tightfit.planner.calibration import Place, correct, phase_bytes
from tightfit.planner.plan import Bounds, Plan, Remedy, Way
from tightfit.planner.question import Cap, Question
from tightfit.planner.reasons import lever_changes, remedy_message
from tightfit.planner.search import search, something_fits
from tightfit.planner.tiers import TIERS
from tightfit.priced import amounts
from tightfit.types import PhaseName

__all__ = ["Bounds", "NoWay", "Shortfall", "StepDown", "Tried", "locate", "step_down"]

Reason = Literal["memory", "fragmentation", "pinned"]
"""Too little; enough, but in pieces; locked memory that the host refused."""

MARGIN = 0.02  # of the card or of the host's RAM: asked for beyond what was missing, for what fails a moment later
MUCH = 0.15  # of the card: what a run must have left unused before anybody is told
WORTH = 0.05  # of the tokens a second: what a change must bring to be worth a sentence

NARROWING = frozenset(flag for flag, lever in FREE_LEVERS.items() if not lever.kept) | {"attention"}
"""Pins without which there would be more to choose from."""

_PLACES = [
    *("plan.failed-init", "plan.failed-forward", "plan.failed-loss", "plan.failed-backward"),
    *("plan.failed-step", "plan.failed-eval", "plan.failed-save"),
]
PLACES: dict[PhaseName, Message] = dict(zip(get_args(PhaseName), map(Message, _PLACES), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """What was missing when an attempt failed."""

    where: Place  # `gpu`: on one GPU; `host`: on one node
    missing_bytes: int = 0
    """What was asked for less what was free; 0: not known. With fragmentation: what was asked for."""
    phase: PhaseName | None = None  # None: not known, so the highest peak has to shrink
    reason: Reason = "memory"
    room_bytes: int | None = None  # GPU only: what tensors could have had in all (allocated + free); None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An attempt that failed for want of memory."""

    way: Way
    shortfall: Shortfall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDown:
    """The next plan."""

    plan: Plan  # its `chosen` is never None; its `because` begins with the sentences below
    because: tuple[Message, ...]  # what was missing, how much less is held, what changes, what it costs in time
    changed: tuple[Said, ...]  # `micro batch × accumulation 4 × 1 → 2 × 2`, lever by lever
    less_bytes: int  # how much less it predicts than the last plan where it was missing


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWay:
    """No plan with what is allowed would do."""

    because: tuple[Message, ...]  # what was missing, and what would help
    remedies: tuple[Remedy, ...] = ()  # costly changes that would help, first what does least to the result
    gpus_needed: int | None = None  # of these GPUs would do without a change; None: not known or none


def step_down(
    last: Plan, shortfall: Shortfall, *, bounds: Bounds | None = None, before: tuple[Tried, ...] = ()
) -> StepDown | NoWay:
    """The next plan after `last` failed; `before`: the attempts before it, whose lessons still hold.

    Pass the calibration with what the failed attempt has taught already: the last plan is corrected by it as well.
    Without the bounds' `advice`, where there is none, what would help is not looked for: that takes most of the time.
    """
    assert last.chosen is not None, "what has no way was never tried"
    bounds = bounds or Bounds()
    tried = (*before, Tried(way=last.chosen, shortfall=shortfall))
    variants = tuple(_variants(last, bounds, tried))
    question = next((each for each in variants if something_fits(each)), variants[-1])
    answer = answer_question(_job_so_far(last), question, advice=bounds.advice)
    if answer.chosen is None and not bounds.advice:
        return NoWay(because=(_missing(shortfall),))
    if answer.chosen is None:
        return _no_way(last, answer, question, tried[-1], margin_bytes(tried[-1], before, bounds))
    return _describe_step(last, answer, bounds, tried)


def locate(shortfall: Shortfall, way: Way) -> Shortfall:
    """The shortfall in the phase that the prediction counts it in: the plain loss is largest when its backward begins,
    so what fails there shows as one of the backward pass, whose own layers come later and may need far less."""
    phases = way.footprint.gpu.phases
    if shortfall.where != "gpu" or shortfall.phase != "backward" or way.levers.loss != "plain":
        return shortfall
    larger = phases["loss"].total_bytes > phases["backward"].total_bytes
    return replace(shortfall, phase="loss") if larger else shortfall


# --- what is asked ------------------------------------------------------------------------------


def _job_so_far(last: Plan) -> Job:
    """The job with the batch that was trained with so far. A tier was applied already, and its levers give way."""
    job = replace(last.job, effective_batch=last.effective_batch)
    if job.tier not in TIERS:
        return replace(job, tier=None)
    own = TIERS[str(job.tier)].levers()
    kept = {name: value for name, value in job.levers.items() if own.get(name) != value}
    return replace(job, tier=None, levers=kept)


def _variants(last: Plan, bounds: Bounds, tried: tuple[Tried, ...]) -> Iterator[Question]:
    """What to ask, one after another, until something fits."""
    way, shortfall = tried[-1].way, tried[-1].shortfall
    # whether it is the engine that has memory locked; offloaded activations always are
    places = {way.levers.offload_optimizer, way.levers.offload_param}
    locks = way.levers.streams or (places != {"none"} and not way.levers.checkpointing.offload)
    question = same_training_question(last, bounds)
    caps = [_caps(each, tried[:number], bounds) for number, each in enumerate(tried)]
    if sum(each.way.levers.compile == "layers" and each.shortfall.where == "gpu" for each in tried) > 1:
        # twice more than was predicted of it: what the compiler makes here is not what was priced
        question = question.without_compiler
    every = replace(question, caps=tuple(cap for found in caps for cap in found))
    pageable = replace(question.base, buckets=replace(question.base.buckets, pin_memory=False))
    if shortfall.where == "gpu":
        yield every
        return
    if shortfall.reason != "pinned":
        yield every
    elif way.levers.buckets.pin_memory and locks:
        earlier = tuple(cap for found in caps[:-1] for cap in found)
        yield replace(question, base=pageable, caps=earlier)
    yield replace(every, base=pageable)


def same_training_question(last: Plan, bounds: Bounds) -> Question:
    """What trains the same as the last plan did, changes that were allowed then included."""
    assert last.chosen is not None
    now, shape = last.chosen.levers, last.chosen.shape
    question = question_of(_job_so_far(last), shape, last.hardware).within(bounds)
    base = replace(
        question.base,
        **{name: getattr(now, name) for name in TRAINING},
        buckets=replace(question.base.buckets, pin_memory=now.buckets.pin_memory),
    )
    return replace(question, base=base)


def _caps(failed: Tried, earlier: tuple[Tried, ...], bounds: Bounds) -> tuple[Cap, ...]:
    """What the next plan has to stay below, for this failure."""
    shortfall, margin = failed.shortfall, margin_bytes(failed, earlier, bounds)
    held = _held_bytes(failed.way, shortfall, bounds)
    less = Cap(where=shortfall.where, phase=shortfall.phase, most_bytes=max(0, held - shortfall.missing_bytes - margin))
    if shortfall.where == "host" or shortfall.room_bytes is None:
        return (less,)
    return less, Cap(where="gpu", phase=None, most_bytes=max(0, shortfall.room_bytes - margin))


def margin_bytes(failed: Tried, earlier: tuple[Tried, ...], bounds: Bounds) -> int:
    """What is asked for beyond what was missing: twice as much after each earlier failure on this side, and never more
    than half of what is left, which a small phase on a large card would fall below at once."""
    shortfall, hardware = failed.shortfall, failed.way.hardware
    have = hardware.gpu.memory_bytes if shortfall.where == "gpu" else hardware.host_ram_bytes
    held = _held_bytes(failed.way, shortfall, bounds)
    times = sum(each.shortfall.where == shortfall.where for each in earlier)
    usual = int((held if have is None else have) * MARGIN) << times
    return min(usual, max(0, held - shortfall.missing_bytes) // 2)


def _held_bytes(way: Way, shortfall: Shortfall, bounds: Bounds) -> int:
    """What is now believed that a way held where it failed."""
    known = bounds.calibration
    correction = None if known is None else known.correction(way.shape, way.levers, way.hardware)
    footprint = correct(way.footprint, correction, way.hardware)
    return phase_bytes(footprint, shortfall.where, shortfall.phase, way.hardware)


# --- what is answered ---------------------------------------------------------------------------


def _describe_step(last: Plan, answer: Plan, bounds: Bounds, tried: tuple[Tried, ...]) -> StepDown:
    way, failed = answer.chosen, tried[-1]
    assert way is not None
    new = way.changes
    way = replace(way, changes=(*failed.way.changes, *new), skips_long=way.skips_long or failed.way.skips_long)
    held, now = _held_bytes(failed.way, failed.shortfall, bounds), _held_bytes(way, failed.shortfall, bounds)
    changed = (*lever_changes(failed.way, way), *new)
    because = [_missing(failed.shortfall)]
    if held > now:  # otherwise it is the same pages, not locked any more
        margin = margin_bytes(failed, tried[:-1], bounds)
        less, before, after, said_margin = amounts(held - now, held, now, max(1, margin))
        enough: Said = ""
        if held - now >= failed.shortfall.missing_bytes + margin:
            asked = "plan.missing-and-margin" if failed.shortfall.missing_bytes else "plan.margin-alone"
            enough = Message(asked, margin=said_margin)
        where = Message("plan.on-a-gpu" if failed.shortfall.where == "gpu" else "plan.on-a-node")
        because.append(Message("plan.predicts-less", less=less, where=where, after=after, before=before, enough=enough))
    because.append(Message("plan.what-changes", changes="; ".join(map(str, changed))))
    share = way.pace.step_s / failed.way.pace.step_s - 1
    if way.is_paced and abs(share) < 0.005:
        because.append(Message("plan.as-fast"))
    elif way.is_paced:
        because.append(Message("plan.step-slower" if share > 0 else "plan.step-faster", share=abs(share)))
    if failed.way.levers.buckets.pin_memory and not way.levers.buckets.pin_memory:
        because.append(Message("plan.not-locked"))
    rest = list(answer.because)
    for index, said in enumerate(rest):  # what only a failure rules out is said so
        if isinstance(said, Message) and said.fields.get("missing") == Message("plan.does-not-fit"):
            rest[index] = Message("plan.faster-but-too-much", way=said.fields["way"])
    plan = replace(answer, job=last.job, chosen=way, because=(*because, *rest))
    return StepDown(plan=plan, because=tuple(because), changed=changed, less_bytes=held - now)


def _missing(shortfall: Shortfall) -> Message:
    place = "" if shortfall.phase is None else PLACES[shortfall.phase]
    size = amounts(max(shortfall.missing_bytes, 1))[0]
    if shortfall.reason == "fragmentation":
        if not shortfall.missing_bytes:
            return Message("plan.no-large-piece", place=place)
        return Message("plan.no-piece", size=size, place=place)
    lacked = Message("plan.was-missing", size=size) if shortfall.missing_bytes else ""
    if shortfall.reason == "pinned":
        return Message("plan.ran-out-of-locked", place=place, lacked=lacked)
    where = "plan.ran-out-of-gpu" if shortfall.where == "gpu" else "plan.ran-out-of-host"
    return Message(where, place=place, lacked=lacked)


def _no_way(last: Plan, answer: Plan, question: Question, failed: Tried, margin: int) -> NoWay:
    needed = max(1, failed.shortfall.missing_bytes + margin)
    said = [_missing(failed.shortfall), Message("plan.no-other-way", size=amounts(needed)[0])]
    pins = [name for name in _job_so_far(last).levers if name in NARROWING]
    if pins and something_fits(unpin(question)):  # what the user pinned is all that is in the way
        names = " and ".join(map(spelt, pins)) if len(pins) < 3 else ", ".join(map(spelt, pins))
        said.append(Message("plan.without-pins", names=names, count=len(pins)))
    said += [remedy_message("plan.change-would-help", remedy) for remedy in answer.remedies]
    if not answer.remedies:
        said.append(Message("plan.no-change-helps"))
    if answer.gpus_needed is not None:
        said.append(Message("plan.gpus-would-do", gpus=answer.gpus_needed))
    return NoWay(because=tuple(said), remedies=answer.remedies, gpus_needed=answer.gpus_needed)


def unpin(question: Question) -> Question:
    """The same with every free lever free."""
    return replace(question, pinned=question.pinned - {*NARROWING, "accumulation", "buckets"})


# --- the way up ---------------------------------------------------------------------------------


def room_above(plan: Plan, measured_peak_bytes: int, *, bounds: Bounds | None = None) -> Plan | None:
    """The faster plan, where the run left much of the card unused and there is one; None: there is none.

    The plan was the fastest that was predicted to fit. A faster one fits where the run took less than predicted, which
    the calibration now knows, or where a pinned lever or a tier was in the way. Pass the calibration with what the run
    has taught already. Where no pace is claimed, none is promised.
    """
    way = plan.chosen
    if way is None or not way.is_paced or unused_share(way, measured_peak_bytes) <= MUCH:
        return None
    asked = same_training_question(plan, bounds or Bounds())
    free = unpin(asked)
    for question in (asked, free) if free.pinned != asked.pinned else (asked,):
        best = search(question, nearest=False).best
        if best is not None and best.pace.tokens_per_s > way.pace.tokens_per_s * (1 + WORTH):
            best = replace(best, changes=way.changes, skips_long=way.skips_long)
            peak, size = amounts(max(measured_peak_bytes, 1), way.hardware.gpu.memory_bytes)
            said = Message(
                "plan.way-up",
                peak=peak,
                size=size,
                left=unused_share(way, measured_peak_bytes),
                changes=Listing(lever_changes(way, best), ";"),
                tokens=best.pace.tokens_per_s,
                share=best.pace.tokens_per_s / way.pace.tokens_per_s - 1,
            )
            return replace(plan, chosen=best, alternatives=(), because=(said,))
    return None


def unused_share(way: Way, measured_peak_bytes: int) -> float:
    """The share of the card that was left, what lies beside the tensors counted as used."""
    required = required_bytes(max(measured_peak_bytes, 0), way.hardware, way.levers.groups)
    return 1 - required / way.hardware.gpu.memory_bytes
