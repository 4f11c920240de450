"""Whether a run is well: three lights, its pace beside the planned one, and warnings of what has not happened yet.

Everything is judged from what was seen so far, and costs arithmetic alone. A light that has nothing to go by is
unknown, and never green. A trend is four medians in a row that rise, so that neither a single spike nor noise makes
one; it is worth a warning where it gets to the end of the memory before the run gets to its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from tightfit.messages import Listing, Message, Said
from tightfit.priced import GIB
from tightfit.runs.events import Step
from tightfit.runs.lines import MIB, duration, loss_words, size_words
from tightfit.runs.records import WorkerFile

Colour = Literal["green", "yellow", "red", "unknown"]

FULL, BRIM = 0.90, 0.97  # shares of a memory above which the light is yellow, and red
NEAR = 0.03  # the share of a card that has to stay free: a longer batch, or a library's buffer, takes as much
HOST_LOW = 0.10
FEW = 8  # steps below which nothing is said about a trend
TREND = 16
WINDOW = 200  # the last steps that the loss is judged by
FLAT = 0.01
WORSE = 1.5
FALLS = 3  # times in a row that a loss scale is halved before it is a trend; one or two find the right scale
RECENT = 20  # steps after which a scale that fell no further has found its place
RETRY_STEPS = 50
"""Steps whose retries of the allocator count; those of the first steps, which find their size, are soon forgotten."""
SLOW = 0.5  # the share of the planned pace below which something is wrong, and not only the prediction
SETTLED = 2  # steps that warm up kernels and caches
SHORT = 0.8  # the share of a step's planned tokens below which there are few
IDLE, CROWDED = 50.0, 1.25  # a card that is busy for less of the time (%) waits; processes a core, above which they do
HORIZON_S = 300.0  # host RAM that lasts for longer is no news
TREND_S = 120.0  # what starts takes much at once: only what falls for so long is a trend
OOM_KINDS = frozenset(  # kinds of causes, and of ranks' last words, in which memory ran out
    {"device-oom", "fragmentation", "other-process", "host-oom", "pinned-memory", "shared-memory", "out_of_memory"}
)


class Light(NamedTuple):
    name: str  # for programs
    title: Message  # what is so, so that no mark beside it can turn it into its opposite
    colour: Colour
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceJudged:
    share: float  # of the planned tokens per second
    said: Message  # that, and why it is so little, where it is

    @property
    def is_slow(self) -> bool:
        return self.share < SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    lights: tuple[Light, Light, Light]
    warnings: tuple[Said, ...]
    pace: PaceJudged | None = None  # None: no pace was planned, or there are too few steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A memory, and what is held of it; None: nobody says."""

    name: Said
    used_bytes: int | None
    total_bytes: int | None
    use_percent: float | None = None  # of the time, how much the card was busy
    others: int = 0  # processes on it that are not the run's

    @property
    def share(self) -> float | None:
        known = self.used_bytes is not None and self.total_bytes
        return (self.used_bytes or 0) / (self.total_bytes or 1) if known else None

    @property
    def free_bytes(self) -> int | None:
        known = self.used_bytes is not None and self.total_bytes is not None
        return max(0, (self.total_bytes or 0) - (self.used_bytes or 0)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    memories: tuple[Held, ...]  # GPUs; or host RAM, where it stands in for them
    host: Held
    host_free: tuple[tuple[float, int], ...] = ()  # moments in seconds, and what was free then
    has_run: bool = False
    steps: Sequence[Step] = ()  # of this start, the newest last
    worker: WorkerFile | None = None  # None: nobody knows the plan
    own: tuple[Held, ...] = ()  # of the memories, those that the run is on
    oom: Said | None = None  # what was said when memory ran out last; None: it did not
    oom_is_last: bool = False  # whether the run has not made a step since
    is_unexplained: bool = False  # it failed, and nobody has said why
    load_per_core: float | None = None  # processes that run or wait


def judge_health(seen: Seen) -> Health:
    memory: tuple[Colour, Said] = "unknown", Message("runs.use-unknown")
    known = [(held.share, held) for held in seen.memories if held.share is not None]
    if known:
        share, held = max(known, key=lambda each: (each[0], str(each[1].name)))
        said = Message("runs.share-of", percent=100 * share, where=held.name)
        memory = "green" if share < FULL else "yellow" if share < BRIM else "red", said
    oom: tuple[Colour, Said] = ("green", "") if seen.has_run else ("unknown", Message("runs.no-run"))
    if seen.is_unexplained:
        oom = "unknown", Message("runs.end-unexplained")
    if seen.oom is not None:
        oom = "red" if seen.oom_is_last else "yellow", seen.oom
    percent, loss = f"{100 * FULL:.0f}", _judge_loss(seen)
    lights = (
        Light(f"memory under {percent} %", Message(_MEMORY_TITLES[memory[0]], percent=percent), *memory),
        Light("loss falling", Message(_LOSS_TITLES[loss[0]]), *loss),
        Light("no OOM", Message(_OOM_TITLES[oom[0]]), *oom),
    )
    pace = _judge_pace(seen)
    slow = () if pace is None or not pace.is_slow else (pace.said,)
    return Health(lights=lights, warnings=(*slow, *_find_warnings(seen)), pace=pace)


_MEMORY_TITLES = {
    "green": "runs.memory-under",
    "yellow": "runs.memory-over",
    "red": "runs.memory-over",
    "unknown": "runs.memory",
}
_LOSS_TITLES = {
    "green": "runs.loss-falling",
    "yellow": "runs.loss-not-falling",
    "red": "runs.loss-not-falling",
    "unknown": "runs.loss-course-unknown",
}
_OOM_TITLES = {
    "green": "runs.no-oom",
    "yellow": "runs.oom-before",
    "red": "runs.oom-now",
    "unknown": "runs.oom-unknown",
}


def _judge_pace(seen: Seen) -> PaceJudged | None:
    worker = seen.worker
    steps = [step for step in seen.steps[SETTLED:] if not step.compiled and step.tokens_per_s]
    if worker is None or not worker.tokens_per_s or len(steps) < FEW:
        return None
    pace = median(step.tokens_per_s or 0.0 for step in steps)
    fields = {"share": 100 * pace / worker.tokens_per_s, "pace": pace, "planned": worker.tokens_per_s}
    said = Message("runs.pace-share", **fields)
    if pace < SLOW * worker.tokens_per_s:
        said = Message("runs.pace-slow", share=said, why=Listing(_find_brakes(seen, steps, worker), ";"))
    return PaceJudged(share=pace / worker.tokens_per_s, said=said)


def _find_brakes(seen: Seen, steps: Sequence[Step], worker: WorkerFile) -> Sequence[Message]:
    """Why a run is slower than planned: all that can be seen, or that nothing can."""
    few = []
    tokens = [step.tokens for step in steps if step.tokens is not None]
    planned = (worker.tokens_per_s or 0.0) * (worker.step_s or 0.0)
    if tokens and median(tokens) < SHORT * planned:
        few = [Message("runs.few-tokens", tokens=median(tokens), planned=planned)]
    found = [*few]
    counts = [step.alloc_retries for step in steps if step.alloc_retries is not None][-RETRY_STEPS - 1 :]
    if counts and counts[-1] > counts[0]:
        found.append(Message("runs.allocator-is-busy"))
    found += [Message("runs.card-is-shared", name=held.name, others=held.others) for held in seen.own if held.others]
    if seen.load_per_core is not None and seen.load_per_core > CROWDED:
        found.append(Message("runs.cores-are-crowded", load=seen.load_per_core))
    uses = [(held.use_percent, held.name) for held in seen.own if held.use_percent is not None]
    if uses and min(use for use, _ in uses) < IDLE:
        use, name = min(uses, key=lambda each: each[0])
        found.append(Message("runs.card-waits", name=name, use=use))
    took = [step.step_s for step in steps if step.step_s is not None]
    if took and worker.step_s and found in ([], few) and median(took) > worker.step_s / SLOW:
        found.append(Message("runs.pace-unexplained", step=duration(median(took)), planned=duration(worker.step_s)))
    return found or [Message("runs.pace-unknown")]


def _judge_loss(seen: Seen) -> tuple[Colour, Message]:
    if not seen.has_run:
        return "unknown", Message("runs.no-run")
    made = [step for step in seen.steps if not step.skipped][-WINDOW:]
    numbers = [(at, step.loss) for at, step in enumerate(made) if step.loss is not None and math.isfinite(step.loss)]
    bad_from = numbers[-1][0] + 1 if numbers else 0
    if bad_from < len(made):
        return "red", Message("runs.loss-no-number", step=made[bad_from].step)
    losses = [loss for _, loss in numbers]
    if len(losses) < FEW:
        return "unknown", Message("runs.few-steps")
    if not any(losses[-FEW:]):
        return "red", Message("runs.loss-is-zero")
    first, *_, last = quarters(losses)
    course = Message("runs.loss-course", first=loss_words(first), last=loss_words(last), steps=len(losses))
    if abs(last - first) <= FLAT * abs(first):
        return "yellow", Message("runs.loss-flat", course=course)
    if last < first:
        return "green", course
    return "red" if last > WORSE * first and first > 0 else "yellow", Message("runs.loss-rises", course=course)


def _find_warnings(seen: Seen) -> Iterator[Message]:
    worker, peak = seen.worker, max((step.peak_bytes or 0 for step in seen.steps), default=0)
    # What the run needs of its card at its most: tensors as measured, and what stands beside them as planned.
    need = None
    if peak and worker is not None:
        need = peak + max(0, worker.required_bytes - worker.peak_bytes)
    # Cards with next to nothing left. Of a card that the run is on, what its allocator keeps for later counts as free:
    # what tensors need at their most is set against the card.
    for held in seen.memories:
        used, total = held.used_bytes if need is None or held not in seen.own else need, held.total_bytes
        if used is not None and total and used >= total * (1 - NEAR):
            left = size_words(max(0, total - used))
            yield Message("runs.nearly-full", name=held.name, left=left, total=size_words(total))
    if worker is not None and peak > worker.peak_bytes * 1.05:
        more, planned = 100 * (peak / max(1, worker.peak_bytes) - 1), size_words(worker.peak_bytes)
        yield Message("runs.above-plan", peak=size_words(peak), more=more, planned=planned)
    of_card = [(step.step, step.now_bytes) for step in seen.steps[2:] if step.now_bytes is not None]
    totals = [held.total_bytes for held in seen.own if held.total_bytes is not None]
    room = max(0, min(totals) - need) if totals and need is not None else None
    of_ranks = [(step.step, step.host_bytes) for step in seen.steps[2:] if step.host_bytes is not None]
    free, ranks = seen.host.free_bytes, 1 if worker is None else worker.gpus_per_node
    gpu, host = growth(of_card, room, 32 * MIB), growth(of_ranks, None if free is None else free // ranks, 64 * MIB)
    last = seen.steps[-1].steps if seen.steps else None
    for found, leaks, fills in ((gpu, "runs.gpu-leaks", "runs.gpu-fills"), (host, "runs.ram-leaks", "runs.ram-fills")):
        if found is None:
            continue
        size = size_words(int(found.per_step_bytes))
        if found.full_at is None:
            yield Message(leaks, size=size)
        elif last is None or found.full_at <= last:
            of = "" if last is None else Message("runs.of-steps", steps=last)
            yield Message(fills, size=size, step=found.full_at, of=of)
    if free is not None and seen.host.total_bytes:
        offloads = worker is not None and worker.offload_optimizer == "cpu"
        under = Message("runs.offload-lives-there") if offloads else ""
        lasts, whole = _lasts_s(seen.host_free), seen.host.total_bytes
        if free < HOST_LOW * whole:
            yield Message("runs.ram-low", left=size_words(free), total=size_words(whole), under=under)
        elif lasts is not None and lasts < HORIZON_S:
            yield Message("runs.ram-lasts", left=size_words(free), time=duration(lasts), under=under)
    # The allocator had to free its cache and try again: the next time may be the one that fails.
    counts = [step.alloc_retries for step in seen.steps if step.alloc_retries is not None][-RETRY_STEPS - 1 :]
    if counts and counts[-1] > counts[0]:
        yield Message("runs.allocator-retries", times=counts[-1] - counts[0], steps=len(counts) - 1)
    scales = [(step.step, step.loss_scale) for step in seen.steps if step.loss_scale is not None]
    falls: list[tuple[int, float]] = []
    for (before, above), (after, scale) in pairwise(scales):
        if scale > above:
            falls = []
        elif scale < above:
            falls = [*falls, (after, scale)] if falls else [(before, above), (after, scale)]
    if len(falls) > FALLS and scales[-1][0] - falls[-1][0] <= RECENT:
        (since, top), (_, now) = falls[0], falls[-1]
        yield Message("runs.scale-falls", times=len(falls) - 1, top=top, now=now, step=since)


class Growth(NamedTuple):
    per_step_bytes: float
    full_at: int | None  # the step at which nothing is left; None: the limit is not known


def growth(values: Sequence[tuple[int, int]], room_bytes: int | None, least_bytes: int) -> Growth | None:
    """Of steps and what was held after each; None: it does not grow. `least_bytes`: what is worth a word."""
    if len(values) < TREND:
        return None
    medians, quarter = quarters([held for _, held in values]), len(values) // 4
    low, high = sorted(held for _, held in values[:quarter]), sorted(held for _, held in values[-quarter:])
    overlaps = low[3 * quarter // 4] >= high[quarter // 4]  # as noise does
    grown = medians[-1] - medians[0]
    rises = all(earlier < later for earlier, later in pairwise(medians))
    if not rises or overlaps or grown < max(least_bytes, 0.01 * medians[0]):
        return None
    first, *_, last = quarters([step for step, _ in values])
    per_step = grown / max(1.0, last - first)
    full = None if room_bytes is None else values[-1][0] + math.ceil(room_bytes / per_step)
    return Growth(per_step_bytes=per_step, full_at=full)


def quarters(values: Sequence[float]) -> list[float]:
    """The medians of four parts, in order."""
    cuts = [round(len(values) * part / 4) for part in range(5)]
    return [median(values[start:stop]) for start, stop in pairwise(cuts)]


def _lasts_s(free: Sequence[tuple[float, int]]) -> float | None:
    """Seconds until nothing is left, as it has fallen so far; None: it does not fall."""
    if len(free) < 4 * FEW or free[-1][0] - free[0][0] < TREND_S:
        return None
    medians = quarters([size for _, size in free])
    fallen = medians[0] - medians[-1]
    if fallen < GIB // 4 or any(later >= earlier for earlier, later in pairwise(medians)):
        return None
    pace = fallen / max(1e-9, (free[-1][0] - free[0][0]) * 3 / 4)
    return free[-1][1] / pace
