"""The fastest way that fits: candidates, prices, the choice, and what to change when nothing fits.

`plan` is the one public function; `tightfit.plan` is the same, and `plan_within` the same with all that can bound a
search; `plan_tier` plans with one of the named corners of the levers, whose values stand in `tiers.py`, and says what
the free search would do instead. `limits.py` turns the question round (the longest sequence, the largest model),
`step_down.py` has the next plan after one that ran out of memory, or left much unused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from time import perf_counter

from tightfit.inputs.flags import AUTO, LEVERS, meant
from tightfit.inputs.layouts import check_layout, find_stream_obstacle
from tightfit.job import Job, Limits
from tightfit.job.file import adapter_dtype_of, dump_job, hardware_of, levers_of, model_of, pinned
from tightfit.memory import Scale
from tightfit.memory.pipeline import find_depth_obstacle
from tightfit.messages import Listing, Message, Said
from tightfit.planner import costly, reasons
from tightfit.planner.calibration import Calibration
from tightfit.planner.candidates import check_states, rests_on_nvme, rooms_for_states
from tightfit.planner.certainty import choose
from tightfit.planner.plan import Bounds, Plan, Remedy, Way
from tightfit.planner.question import Question
from tightfit.planner.saving import is_open, settle_saving
from tightfit.planner.search import SearchResult, list_strategies, search, search_strategy
from tightfit.planner.team import Task
from tightfit.planner.tiers import STANDS_IN, TIERS, Tier, apply_tier, by_memory, from_card_down
from tightfit.planner.trainers import Abilities, check_pins
from tightfit.priced import GIB, amounts, strategy_name
from tightfit.types import DDP, FSDP2, STREAM, ConfigError, Hardware, Levers, Lora, ModelShape, UserError

__all__ = ["Bounds", "Plan", "Remedy", "Tiered", "Way", "all_tiers", "plan", "plan_tier", "plan_within", "question_of"]

SEQUENCES_A_GPU = 4  # the effective batch where none was asked for
LEAST_WARM_UP = 0.02
"""Of all steps together: whether compiling that takes less pays is not asked, since no more than that could be lost."""


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
    """The fastest way to run the job; its own model and hardware, unless others are given. A job's tier is applied
    first. `said`: what the inputs' readers had to say. `partial`, `every_gpu` and `engines` bound the search: see
    `Bounds`."""
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
    if job.precision == "fp16" and hardware.gpu.fp16 is False and job.levers.get("engine") not in (FSDP2, DDP, STREAM):
        # DeepSpeed refuses what a processor does not compute itself; the others leave it to torch, which can do without
        job = replace(job, precision=STANDS_IN)
        said = (*said, Message("plan.no-fp16", name=hardware.gpu.name, stands_in=STANDS_IN))
    question = question_of(job, shape, hardware).within(bounds)
    check_pins(question.trainer, question.base, shape, question.pinned)
    if question.base.streams and (obstacle := find_stream_obstacle(question.base, hardware.nodes)) is not None:
        raise ConfigError(obstacle)
    if question.ours:
        check_states(question.base, question.pinned, hardware)
    answer = answer_question(job, question, said, advice=bounds.advice)
    answer = settle_saving(answer, is_open=bounds.saving_is_open)
    if answer.chosen is None or not costs:
        return answer
    return replace(answer, chosen=replace(answer.chosen, changes=(*costs, *answer.chosen.changes)))


def answer_question(job: Job, question: Question, said: tuple[Said, ...] = (), *, advice: bool = True) -> Plan:
    """The best way that a question allows; where there is none, the best with what the job allows to be changed.
    `advice`: see `Bounds`."""
    began = perf_counter()
    found = search(question)
    changed: tuple[Remedy, ...] = ()
    if found.best is None and job.limits.allow:
        changed = costly.mildest_changes(question, job.limits.allow)
        if changed:
            found.ways.append(changed[-1].way)
    chosen = choose(found.ways)
    faster = costly.compress(question, chosen) if chosen is not None and not changed and advice else None
    if faster is not None and "compress" in job.limits.allow:
        changed, chosen = (faster,), faster.way
        found.ways.append(chosen)
    spared: tuple[Said, ...] = ()
    if chosen is not None and not changed:
        found, chosen, spared = _spare_compiling(job, question, found, chosen)
    others = reasons.in_order(reasons.mark_equal(chosen, (way for way in found.ways if way is not chosen)))
    chosen_for = "" if chosen is None else reasons.chosen_for(chosen, others)
    if chosen is not None:
        chosen = replace(
            chosen,
            because=(*reasons.of_choice(question, chosen), *spared),
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
        chosen_for=chosen_for,
    )
    if faster is not None and not changed:
        answer = replace(answer, remedies=(faster,))
    if chosen is None and advice:
        needed = costly.count_gpus(question, batch_asked=job.effective_batch is not None)
        answer = replace(answer, remedies=costly.remedies(question), gpus_needed=needed)
    return replace(answer, because=reasons.of_plan(answer, question, said), search_s=perf_counter() - began)


def _spare_compiling(
    job: Job, question: Question, found: SearchResult, chosen: Way
) -> tuple[SearchResult, Way, tuple[Said, ...]]:
    """What is chosen where compiling takes longer than it can win back in the steps that there are, which only a short
    job can show."""
    steps, warm_up_s = reasons.steps_of(job, question.effective_batch), chosen.pace.warm_up_s
    if not warm_up_s or "compile" in question.pinned or steps is None or not chosen.is_paced:
        return found, chosen, ()
    took_s = steps * chosen.pace.step_s
    if warm_up_s < LEAST_WARM_UP * took_s:
        return found, chosen, ()
    plain = search(question.without_compiler)
    instead = choose(plain.ways)
    if instead is None or steps * instead.pace.step_s > took_s + warm_up_s:
        return found, chosen, ()
    won_s = max(0.0, steps * instead.pace.step_s - took_s)
    said = Message("plan.compiling-does-not-pay", warm_up=warm_up_s, won=won_s, steps=steps)
    return plain, instead, (said,)


def question_of(job: Job, shape: ModelShape, hardware: Hardware, *, every_gpu: bool = False) -> Question:
    """What is asked of the search, with the effective batch that every candidate must keep. Where the CPU stands in for
    GPUs, both of its ranks run: that is what it is there for."""
    base, fixed = levers_of(job, shape), pinned(job)
    check_layout(base, shape, hardware.world)
    if (obstacle := find_depth_obstacle(shape, base)) is not None:
        raise ConfigError(obstacle)
    batch, lora, ranks = job.effective_batch, job.lora, base.data_ranks(hardware.world)
    if not batch and {"micro_batch", "accumulation"} <= fixed:
        batch = base.micro_batch * base.accumulation * ranks
    elif not batch:
        least = base.micro_batch if "micro_batch" in fixed else base.accumulation if "accumulation" in fixed else 1
        batch = ranks * least * -(-SEQUENCES_A_GPU * base.pipeline_parallel // least)
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
    batch, base = question.effective_batch, question.base
    ranks = base.data_ranks(question.hardware.world)
    flags = {name: getattr(base, name) for name in ("micro_batch", "accumulation") if name in question.pinned}
    steps = ranks * prod(flags.values())
    both = {"micro_batch", "accumulation"} <= question.pinned
    if batch % steps == 0 and (not both or batch == steps):
        return
    if batch < ranks and not flags and list_strategies(question):  # with which several GPUs have a sequence together
        return
    below = batch // steps * steps
    shared = base.ranks_per_sample if base.ranks_per_sample > 1 else None
    near = [steps] if both or below == 0 else [below, below + steps]
    raise ConfigError(
        Message(
            "plan.uneven-batch",
            batch=batch,
            gpus=question.hardware.world,
            shared=shared,
            near=Listing(map(str, near), "or"),
            **flags,
        )
    )


def settle_selection(shape: ModelShape, levers: Levers, hardware: Hardware) -> Levers:
    """The levers with the fastest selection of what recomputes that fits, in place of `auto`, or the one that is
    nearest to fitting; all else stays."""
    question = Question(
        shape=shape,
        base=levers,
        pinned=frozenset({*(lever.name for lever in LEVERS.values()), "buckets", "optimizer_buffer_count"}),
        hardware=hardware,
        effective_batch=levers.micro_batch * levers.accumulation * levers.data_ranks(hardware.world),
        margin=Limits().margin,
        trainer=Abilities(trainer=levers.trainer),
        every_gpu=True,
    )
    way = search_strategy(question, Task(levers)).way
    if way is None:
        raise ConfigError(Message("plan.nothing-to-select", model=shape.name))
    return way.levers


def settle_states(shape: ModelShape, levers: Levers, hardware: Hardware) -> Levers:
    """The levers with as many units' states in RAM as a plan keeps there, where the others rest on an NVMe: few, where
    what layers keep would have no room to wait there as well."""
    if not rests_on_nvme(levers):
        return levers
    ways = [replace(levers, buckets=room) for room in rooms_for_states(shape, levers, hardware)]
    depth, ram = levers.checkpointing, hardware.host_ram_bytes
    if ram is None or not depth.offload or depth.select == AUTO:
        return ways[0]
    return next((way for way in ways if Scale(shape, way, hardware).host_bytes(depth) <= ram), ways[-1])


# --- named tiers --------------------------------------------------------------------------------


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
        raise ConfigError(Message("plan.unknown-tier", name=name, hint=meant(name, [*TIERS, "auto", "all"])))
    tiers = from_card_down(hardware) if name == "auto" else [TIERS[name]]
    bounds = Bounds(calibration=calibration, saving_is_open=is_open(explicit, job))
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
                pace=way.pace_words,
                size=way.footprint.gpu.required_bytes / GIB,
            )
        )
    return replace(found, free=free, because=tuple(said))


def all_tiers(
    job: Job, shape: ModelShape, hardware: Hardware, explicit: frozenset[str], calibration: Calibration | None = None
) -> list[Tiered]:
    """Every tier side by side."""
    bounds = Bounds(calibration=calibration, advice=False, saving_is_open=is_open(explicit, job))
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
