"""Whether a run is well: three lights, and warnings of what has not happened yet.

Everything is judged from what was seen so far, and costs arithmetic alone. A light that has nothing to go by is
unknown, and never green. A trend is four medians in a row that rise, so that neither a single spike nor noise makes
one; it is worth a warning where it gets to the end of the memory before the run gets to its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from tightfit.messages import Said
from tightfit.priced import GIB
from tightfit.runs.events import Step
from tightfit.runs.lines import MIB, duration, loss_words, size_words

Colour = Literal["green", "yellow", "red", "unknown"]

FULL, BRIM = 0.90, 0.97
"""Shares of a memory above which the light is yellow, and red."""
NEAR = 0.03
"""The share of a card that has to stay free: a longer batch, or a library's buffer, takes as much."""
HOST_LOW = 0.10
FEW = 8
"""Steps below which nothing is said about a trend."""
TREND = 16
WINDOW = 200
"""The last steps that the loss is judged by."""
FLAT = 0.01
WORSE = 1.5
FALLS = 3
"""Times in a row that a loss scale is halved before it is a trend; one or two find the right scale."""
RECENT = 20
"""Steps after which a scale that fell no further has found its place."""
RETRY_STEPS = 50
"""Steps whose retries of the allocator count; those of the first steps, which find their size, are soon forgotten."""
HORIZON_S = 300.0
"""Host RAM that lasts for longer is no news."""
TREND_S = 120.0
"""What starts takes much at once: only what falls for so long is a trend."""
OOM_KINDS = frozenset(
    {"device-oom", "fragmentation", "other-process", "host-oom", "pinned-memory", "shared-memory", "out_of_memory"}
)
"""Kinds of causes, and of ranks' last words, in which memory ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """One of the three."""

    name: str
    colour: Colour
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    lights: tuple[Light, Light, Light]
    warnings: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A memory, and what is held of it; None: nobody says."""

    name: str
    used_bytes: int | None
    total_bytes: int | None

    @property
    def share(self) -> float | None:
        known = self.used_bytes is not None and self.total_bytes
        return (self.used_bytes or 0) / (self.total_bytes or 1) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan says about memory."""

    peak_bytes: int
    required_bytes: int
    ranks_here: int
    offloads: bool
    """Whether something that trains lives in host RAM."""
    on_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is judged."""

    memories: tuple[Held, ...]
    """GPUs; or host RAM, where it stands in for them."""
    host: Held
    host_free: tuple[tuple[float, int], ...] = ()
    """Moments in seconds, and what was free then."""
    has_run: bool = False
    steps: Sequence[Step] = ()
    """Of this start, the newest last."""
    planned: Planned | None = None
    own: tuple[Held, ...] = ()
    """Of the memories, those that the run is on."""
    oom: Said | None = None
    """What was said when memory ran out last; None: it did not."""
    oom_is_last: bool = False
    """Whether the run has not made a step since."""


def judged(seen: Seen) -> Health:
    """Lights and warnings."""
    return Health(lights=(_memory(seen), _loss(seen), _oom(seen)), warnings=_warnings(seen))


# --- lights -------------------------------------------------------------------------------------


def _memory(seen: Seen) -> Light:
    name = f"memory under {FULL:.0%}".replace("%", " %")
    known = [(held.share, held.name) for held in seen.memories if held.share is not None]
    if not known:
        return Light(name=name, colour="unknown", text="nobody says how much is used")
    share, where = max(known)
    colour: Colour = "green" if share < FULL else "yellow" if share < BRIM else "red"
    return Light(name=name, colour=colour, text=f"{100 * share:.0f} % of {where}")


def _loss(seen: Seen) -> Light:
    name = "loss falling"

    def light(colour: Colour, text: str) -> Light:
        return Light(name=name, colour=colour, text=text)

    if not seen.has_run:
        return light("unknown", "no run is watched")
    made = [step for step in seen.steps if not step.skipped][-WINDOW:]
    if made and (made[-1].loss is None or not math.isfinite(made[-1].loss)):
        return light("red", f"no, it is no number since step {_first_bad(made):,}")
    losses = [step.loss for step in made if step.loss is not None and math.isfinite(step.loss)]
    if len(losses) < FEW:
        return light("unknown", "too few steps yet")
    if not any(losses[-FEW:]):
        return light("red", "no, it is exactly 0, so nothing is learned: try precision bf16 or fp32")
    first, *_, last = quarters(losses)
    words = f"{loss_words(first)} → {loss_words(last)} in {len(losses)} steps"
    if last > WORSE * first and first > 0:
        return light("red", f"no, it rises: {words}")
    if abs(last - first) <= FLAT * abs(first):
        return light("yellow", f"no, it is flat: {words}")
    return light("green", words) if last < first else light("yellow", f"no, it rises: {words}")


def _first_bad(made: Sequence[Step]) -> int:
    bad = made[-1].step
    for step in reversed(made):
        if step.loss is not None and math.isfinite(step.loss):
            break
        bad = step.step
    return bad


def _oom(seen: Seen) -> Light:
    if seen.oom is None:
        colour: Colour = "green" if seen.has_run else "unknown"
        return Light(name="no OOM", colour=colour, text="" if seen.has_run else "no run is watched")
    return Light(name="no OOM", colour="red" if seen.oom_is_last else "yellow", text=seen.oom)


# --- warnings -----------------------------------------------------------------------------------


def _warnings(seen: Seen) -> tuple[str, ...]:
    found = [
        *_near(seen),
        _above_plan(seen),
        _growing(seen),
        _host_growing(seen),
        _host_low(seen),
        _retries(seen.steps),
        _scale(seen.steps),
    ]
    return tuple(said for said in found if said is not None)


def _near(seen: Seen) -> list[str]:
    """Cards with next to nothing left. Of a card that the run is on, what its allocator keeps for later counts as free:
    what tensors need at their most is set against the card."""
    said = []
    for held in seen.memories:
        used, total = held.used_bytes, held.total_bytes
        if held in seen.own and (need := _needed(seen)) is not None:
            used = need
        if used is None or not total or used < total * (1 - NEAR):
            continue
        left = size_words(max(0, total - used))
        said.append(f"{held.name} has {left} of {size_words(total)} left: a longer batch may not fit")
    return said


def _needed(seen: Seen) -> int | None:
    """What the run needs of its card at its most: tensors as measured, and what stands beside them as planned."""
    peak = max((step.peak_bytes or 0 for step in seen.steps), default=0)
    if not peak or seen.planned is None:
        return None
    return peak + max(0, seen.planned.required_bytes - seen.planned.peak_bytes)


def _above_plan(seen: Seen) -> str | None:
    peak = max((step.peak_bytes or 0 for step in seen.steps), default=0)
    if seen.planned is None or peak <= seen.planned.peak_bytes * 1.05:
        return None
    more = 100 * (peak / max(1, seen.planned.peak_bytes) - 1)
    return f"the peak of {size_words(peak)} is {more:.0f} % above the plan's {size_words(seen.planned.peak_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A memory that grows from step to step."""

    per_step_bytes: float
    full_at: int | None
    """The step at which nothing is left; None: the limit is not known."""


def growth(values: Sequence[tuple[int, int]], room_bytes: int | None, least_bytes: int) -> Growth | None:
    """Of steps and what was held after each; None: it does not grow. `least_bytes`: what is worth a word."""
    if len(values) < TREND:
        return None
    medians = quarters([held for _, held in values])
    if any(later <= earlier for earlier, later in pairwise(medians)):
        return None
    quarter = len(values) // 4
    low, high = sorted(held for _, held in values[:quarter]), sorted(held for _, held in values[-quarter:])
    if low[3 * quarter // 4] >= high[quarter // 4]:  # they overlap, as noise does
        return None
    grown = medians[-1] - medians[0]
    if grown < max(least_bytes, 0.01 * medians[0]):
        return None
    first, *_, last = quarters([step for step, _ in values])
    per_step = grown / max(1.0, last - first)
    full = None if room_bytes is None else values[-1][0] + math.ceil(room_bytes / per_step)
    return Growth(per_step_bytes=per_step, full_at=full)


def quarters(values: Sequence[float]) -> list[float]:
    """The medians of four parts, in order."""
    cuts = [round(len(values) * part / 4) for part in range(5)]
    return [median(values[start:stop]) for start, stop in pairwise(cuts)]


def _growing(seen: Seen) -> str | None:
    values = [(step.step, step.now_bytes) for step in seen.steps[2:] if step.now_bytes is not None]
    totals = [held.total_bytes for held in seen.own if held.total_bytes is not None]
    need = _needed(seen)
    room = max(0, min(totals) - need) if totals and need is not None else None
    found = growth(values, room, 32 * MIB)
    return _growth_words(found, seen.steps, "GPU memory", "the card")


def _host_growing(seen: Seen) -> str | None:
    values = [(step.step, step.host_bytes) for step in seen.steps[2:] if step.host_bytes is not None]
    free, ranks = _free(seen.host), 1 if seen.planned is None else seen.planned.ranks_here
    found = growth(values, None if free is None else free // ranks, 64 * MIB)
    return _growth_words(found, seen.steps, "the ranks' host memory", "the RAM")


def _growth_words(found: Growth | None, steps: Sequence[Step], what: str, whole: str) -> str | None:
    if found is None:
        return None
    last, said = steps[-1].steps, f"{what} grows by {size_words(int(found.per_step_bytes))} a step"
    if found.full_at is None:
        return f"{said}, as if something were kept that should not be"
    if last is not None and found.full_at > last:
        return None
    return f"{said}, and fills {whole} at about step {found.full_at:,}" + ("" if last is None else f" of {last:,}")


def _free(held: Held) -> int | None:
    if held.total_bytes is None or held.used_bytes is None:
        return None
    return max(0, held.total_bytes - held.used_bytes)


def _host_low(seen: Seen) -> str | None:
    free, total = _free(seen.host), seen.host.total_bytes
    if free is None or not total:
        return None
    lives = seen.planned is not None and seen.planned.offloads
    under = ", and the offloaded states live there" if lives else ""
    if free < HOST_LOW * total:
        return f"host RAM is running out: {size_words(free)} of {size_words(total)} left{under}"
    lasts = _lasts_s(seen.host_free)
    if lasts is not None and lasts < HORIZON_S:
        return f"host RAM is running out: at this pace the {size_words(free)} left last {duration(lasts)}{under}"
    return None


def _lasts_s(free: Sequence[tuple[float, int]]) -> float | None:
    """Seconds until nothing is left, as it has fallen so far; None: it does not fall."""
    if len(free) < 4 * FEW or free[-1][0] - free[0][0] < TREND_S:
        return None
    medians = quarters([size for _, size in free])
    if any(later >= earlier for earlier, later in pairwise(medians)):
        return None
    if medians[0] - medians[-1] < GIB // 4:
        return None
    pace = (medians[0] - medians[-1]) / max(1e-9, (free[-1][0] - free[0][0]) * 3 / 4)
    return free[-1][1] / pace


def _retries(steps: Sequence[Step]) -> str | None:
    """The allocator had to free its cache and try again: the next time may be the one that fails."""
    counts = [step.alloc_retries for step in steps if step.alloc_retries is not None][-RETRY_STEPS - 1 :]
    if not counts or counts[-1] <= counts[0]:
        return None
    more = counts[-1] - counts[0]
    times, since = "once" if more == 1 else f"{more:,} times", len(counts) - 1
    when = "step" if since == 1 else f"{since} steps"
    return f"the allocator had to free its cache and retry {times} in the last {when}: memory is within the margin"


def _scale(steps: Sequence[Step]) -> str | None:
    scales = [(step.step, step.loss_scale) for step in steps if step.loss_scale is not None]
    falls: list[tuple[int, float]] = []
    for (before, above), (after, scale) in pairwise(scales):
        if scale > above:
            falls = []
        elif scale < above:
            falls = [*falls, (after, scale)] if falls else [(before, above), (after, scale)]
    if len(falls) <= FALLS or scales[-1][0] - falls[-1][0] > RECENT:
        return None
    (since, top), (_, now) = falls[0], falls[-1]
    return (
        f"the loss scale fell {len(falls) - 1} times in a row, from {top:,.0f} to {now:,.0f} since step {since:,}: "
        "fp16 overflows, and precision bf16 would not"
    )
