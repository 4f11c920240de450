"""The fastest way that fits: candidates, prices, the choice, and what to change when nothing fits.

`plan` is the one public function; `tightfit.plan` is the same, and `plan_within` the same with all that can bound a
search. `limits.py` turns the question round (the longest sequence, the largest model), `tiers.py` holds the named
corners of the levers, `step_down.py` has the next plan after one that ran out of memory, or left much unused.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from time import perf_counter

from tightfit.job import Job
from tightfit.job.file import adapter_dtype_of, dump_job, hardware_of, levers_of, model_of, pinned
from tightfit.messages import Listing, Message, Said
from tightfit.planner import costly, reasons
from tightfit.planner.candidates import check_states
from tightfit.planner.plan import Bounds, Plan, Remedy, Way
from tightfit.planner.question import Question
from tightfit.planner.search import search
from tightfit.planner.tier_values import STANDS_IN, TIERS, apply_tier, from_card_down
from tightfit.planner.trainers import Abilities, check_pins
from tightfit.types import FSDP2, ConfigError, Hardware, Lora, ModelShape

__all__ = ["Bounds", "Plan", "Remedy", "Way", "answered", "plan", "plan_within", "question_of"]

SEQUENCES_A_GPU = 4  # the effective batch where none was asked for


def plan(
    job: Job,
    shape: ModelShape | None = None,
    hardware: Hardware | None = None,
    said: tuple[Said, ...] = (),
    *,
    partial: bool = True,
    every_gpu: bool = False,
    engines: frozenset[str] | None = None,
) -> Plan:
    """The fastest way to run the job; its own model and hardware, unless others are given.

    A job's tier is applied first. `said`: what the inputs' readers had to say. `partial`, `every_gpu` and `engines`
    bound the search: see `Bounds`.
    """
    bounds = Bounds(partial=partial, every_gpu=every_gpu, engines=engines)
    return plan_within(bounds, job, shape, hardware, said)


def plan_within(
    bounds: Bounds,
    job: Job,
    shape: ModelShape | None = None,
    hardware: Hardware | None = None,
    said: tuple[Said, ...] = (),
) -> Plan:
    """See `plan`; with what earlier runs have taught, where the bounds bring it."""
    shape = shape or model_of(job)
    hardware = hardware or hardware_of(job)
    costs: tuple[Said, ...] = ()
    if job.tier is not None and "engine" not in job.levers:  # a pinned engine shows that the tier was applied already
        if job.tier == "auto":  # the first that fits; where none does, how far the smallest is from it
            *larger, smallest = from_card_down(hardware)
            for tier in larger:
                found = plan_within(replace(bounds, advice=False), replace(job, tier=tier.name), shape, hardware, said)
                if found.fits:
                    return found
            return plan_within(bounds, replace(job, tier=smallest.name), shape, hardware, said)
        if job.tier == "all":
            raise ConfigError(Message("plan.tier-all"))
        explicit = frozenset({*dump_job(job), *(f"levers.{lever}" for lever in job.levers)})
        job, costs = apply_tier(TIERS[job.tier], job, hardware, explicit)
    if job.precision == "fp16" and hardware.gpu.fp16 is False and job.levers.get("engine") != FSDP2:
        # DeepSpeed refuses what a processor does not compute itself; FSDP2 leaves it to torch, which can do without
        job = replace(job, precision=STANDS_IN)
        said = (*said, Message("plan.no-fp16", name=hardware.gpu.name, stands_in=STANDS_IN))
    question = question_of(job, shape, hardware).within(bounds)
    check_pins(question.trainer, question.base, shape, question.pinned)
    if question.ours:
        check_states(question.base, question.pinned, hardware)
    answer = answer_question(job, question, said, advice=bounds.advice)
    if answer.chosen is None or not costs:
        return answer
    return replace(answer, chosen=replace(answer.chosen, changes=(*costs, *answer.chosen.changes)))


def answer_question(job: Job, question: Question, said: tuple[Said, ...] = (), *, advice: bool = True) -> Plan:
    """The best way that a question allows; where there is none, the best with what the job allows to be changed.

    `advice`: see `Bounds`.
    """
    began = perf_counter()
    found = search(question)
    changed: tuple[Remedy, ...] = ()
    if found.best is None and job.limits.allow:
        changed = costly.mildest_changes(question, job.limits.allow)
        if changed:
            found.ways.append(changed[-1].way)
    chosen = found.best
    others = reasons.in_order(way for way in found.ways if way is not chosen)
    if chosen is not None:
        chosen = replace(
            chosen,
            because=reasons.of_choice(question, chosen),
            changes=tuple(remedy.cost for remedy in changed),
            skips_long=any(remedy.allowance == "skip-data" for remedy in changed),
        )
    answer = Plan(
        job=job,
        shape=question.shape,
        hardware=question.hardware,
        effective_batch=question.effective_batch,
        chosen=chosen,
        alternatives=others,
        considered=found.considered,
        search_s=0.0,
        because=(),
        hours=None if chosen is None else reasons.hours(job, question.effective_batch, chosen),
        unproven=reasons.unproven(question.hardware),
    )
    if chosen is None and advice:
        needed = costly.count_gpus(question, batch_asked=job.effective_batch is not None)
        answer = replace(answer, remedies=costly.remedies(question), gpus_needed=needed)
    return replace(answer, because=reasons.of_plan(answer, question, said), search_s=perf_counter() - began)


def question_of(job: Job, shape: ModelShape, hardware: Hardware, *, every_gpu: bool = False) -> Question:
    """What is asked of the search, with the effective batch that every candidate must keep.

    Where the CPU stands in for GPUs, both of its ranks run: that is what it is there for.
    """
    base, fixed = levers_of(job, shape), pinned(job)
    batch, lora = job.effective_batch, job.lora
    if not batch and {"micro_batch", "accumulation"} <= fixed:
        batch = base.micro_batch * base.accumulation * hardware.world
    elif not batch:
        least = base.micro_batch if "micro_batch" in fixed else base.accumulation if "accumulation" in fixed else 1
        batch = hardware.world * least * -(-SEQUENCES_A_GPU // least)
    question = Question(
        shape=shape,
        base=base,
        pinned=fixed,
        hardware=hardware,
        effective_batch=batch,
        margin=job.limits.margin,
        adapters=Lora(
            rank=lora.rank,
            targets=None if isinstance(lora.targets, str) else lora.targets,
            dtype=adapter_dtype_of(job),
            dropout=lora.dropout,
        ),
        trainer=Abilities(trainer=job.trainer),
        partial=job.trainer == "tightfit",
        every_gpu=every_gpu or hardware.gpu.vendor == "cpu",
    )
    if job.effective_batch is not None:
        _check_batch(question)
    return question


def _check_batch(question: Question) -> None:
    """A ConfigError for a batch that the GPUs, with what is pinned, cannot share evenly."""
    world, batch, base = question.hardware.world, question.effective_batch, question.base
    flags = {name: getattr(base, name) for name in ("micro_batch", "accumulation") if name in question.pinned}
    steps = world * prod(flags.values())
    both = {"micro_batch", "accumulation"} <= question.pinned
    if batch % steps == 0 and (not both or batch == steps):
        return
    below = batch // steps * steps
    near = [steps] if both or below == 0 else [below, below + steps]
    raise ConfigError(
        Message("plan.uneven-batch", batch=batch, gpus=world, near=Listing(map(str, near), "or"), **flags)
    )
