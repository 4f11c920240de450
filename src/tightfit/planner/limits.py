"""The question turned round: for given hardware, the longest sequence, the largest micro batch, the largest model.

Memory grows with each of them, so the largest that fits is found by bisection on the candidates that hold least.
All GPUs take part: a longer sequence on one of eight is not what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tightfit.job import Job, Wanted
from tightfit.job.file import levers_of
from tightfit.messages import Message, Said
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS
from tightfit.planner import plan_within, question_of
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.search import something_fits
from tightfit.types import ConfigError, Hardware, ModelShape, UserError

STEP_TOKENS = 64
MOST_TOKENS = 2**22
MOST_SEQUENCES = 2**14
FREE = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest that fits, and the plan for it."""

    wanted: Wanted
    value: int | str | None  # tokens, sequences or a model's name; None: not even the smallest fits
    plan: Plan  # for that value, or for the smallest where nothing fits
    because: tuple[Said, ...]


def longest_sequence(job: Job, shape: ModelShape, hardware: Hardware, bounds: Bounds = FREE) -> Limit:
    """In steps of 64 tokens, up to what the model was made for."""
    known = shape.max_positions
    most = max(1, min(known or MOST_TOKENS, MOST_TOKENS) // STEP_TOKENS)
    steps, found = _largest(lambda steps: replace(job, sequence=steps * STEP_TOKENS), most, shape, hardware, bounds)
    tokens = steps * STEP_TOKENS
    is_all = steps and known is not None and tokens + STEP_TOKENS > known
    said = (Message("plan.made-for", name=shape.name, known=known),) if is_all else ()
    return Limit(wanted="seq", value=tokens or None, plan=found, because=said)


def largest_micro_batch(job: Job, shape: ModelShape, hardware: Hardware, bounds: Bounds = FREE) -> Limit:
    """Sequences in one forward pass of one GPU, without accumulation unless that is pinned."""
    if "micro_batch" in job.levers:
        raise ConfigError(Message("plan.max-and-micro-batch"))
    levers = levers_of(job, shape)

    def asked(micro: int) -> Job:
        batch = micro * levers.accumulation * levers.data_ranks(hardware.world)
        return replace(job, effective_batch=batch, levers={**job.levers, "micro_batch": micro})

    micro, found = _largest(asked, MOST_SEQUENCES, shape, hardware, bounds)
    said = Message("plan.batch-follows", micro=micro or 1)
    return Limit(wanted="micro-batch", value=micro or None, plan=found, because=(said,))


def largest_model(job: Job, hardware: Hardware, names: Iterable[str] = tuple(PRESETS), bounds: Bounds = FREE) -> Limit:
    """Of the presets, the one with the most parameters that fits."""
    shapes = sorted((load_model(name) for name in names), key=lambda shape: -shape.parameters)
    for shape in shapes:
        asked = replace(job, model=shape.name)
        try:
            if _fits(asked, shape, hardware, bounds):
                found = _plan(asked, shape, hardware, bounds)
                return Limit(wanted="model", value=shape.name, plan=found, because=())
        except UserError:
            continue  # adapters for layers that this model does not have
    smallest = shapes[-1]
    return Limit(
        wanted="model",
        value=None,
        plan=_plan(replace(job, model=smallest.name), smallest, hardware, bounds),
        because=(Message("plan.not-even", name=smallest.name),),
    )


def _fits(job: Job, shape: ModelShape, hardware: Hardware, bounds: Bounds) -> bool:
    return something_fits(question_of(job, shape, hardware).within(replace(bounds, every_gpu=True)))


def _plan(job: Job, shape: ModelShape, hardware: Hardware, bounds: Bounds) -> Plan:
    return plan_within(replace(bounds, every_gpu=True), job, shape, hardware)


def _largest(
    asked: Callable[[int], Job], most: int, shape: ModelShape, hardware: Hardware, bounds: Bounds
) -> tuple[int, Plan]:
    """The largest count up to `most` that fits, by doubling and bisection; 0: none. With the plan for it, or for 1."""
    low, high = 0, 1
    while high <= most and _fits(asked(high), shape, hardware, bounds):
        low, high = high, high * 2
    high = min(high, most + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(asked(middle), shape, hardware, bounds) else (low, middle)
    return low, _plan(asked(low or 1), shape, hardware, bounds)
