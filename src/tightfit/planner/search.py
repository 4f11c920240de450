"""The search: price what can be run, keep the fastest that fits.

Time is cheap to predict and memory is not, so every candidate is timed, and memory is predicted only for those
that can still win. `ladder.py` finds how many layers must recompute. The answer is that of trying everything,
which a test compares.

Fewer GPUs than there are is a way as well: where the links are slow or the host's RAM is short, it can be the
faster one, or the only one. That is also what makes the answer monotone: a machine with more GPUs can do
whatever a smaller one can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from tightfit.pace import Clock, pace
from tightfit.planner.candidates import Corner, complexity, corners, frugal, strategies
from tightfit.planner.ladder import Floors, Ladder, Sizes, Weighed, distance
from tightfit.planner.plan import Way
from tightfit.planner.question import Question, correction_of, excess_share
from tightfit.types import Levers

TIE_S = 2e-9
"""Two times that may round to the same, whatever the order in which they were summed up."""


@dataclass(slots=True)
class Found:
    """The best of each strategy, and how many candidates were priced."""

    ways: list[Way] = field(default_factory=list)
    """One a strategy: its fastest that fits, or the one nearest to fitting."""
    timed: set[float] = field(default_factory=set)
    """Distinct predictions of a step's seconds."""
    weighed: Sizes = field(default_factory=set)

    @property
    def considered(self) -> int:
        """Candidates that differ in what was predicted for them: every one is timed, and weighed if it can win."""
        return max(len(self.timed), len(self.weighed))

    @property
    def best(self) -> Way | None:
        fitting = [way for way in self.ways if way.fits]
        return min(fitting, key=rank) if fitting else None


def rank(way: Way) -> tuple[float, tuple[int, ...]]:
    """Faster first; of two equally fast ways the simpler."""
    return round(way.pace.step_s, 9), complexity(way.levers, way.world)


def search(question: Question) -> Found:
    """The best of every strategy on all GPUs, and of fewer GPUs where that is better."""
    found = Found()
    _search_world(question, found)
    best = found.best
    for fewer in _smaller(question):
        most_s = inf if best is None else best.pace.step_s
        if not fits_at_all(fewer) if best is None else _least_thinkable_s(fewer) > most_s + TIE_S:
            continue
        attempt = Found(timed=found.timed, weighed=found.weighed)
        _search_world(fewer, attempt, most_s)
        if attempt.best is not None and (best is None or rank(attempt.best) < rank(best)):
            best = attempt.best
            found.ways.append(best)
    return found


def something_fits(question: Question) -> bool:
    """Whether `search` would find anything; asked only of the candidates that can hold least."""
    return any(fits_at_all(each) for each in (question, *_smaller(question)))


def fits_at_all(question: Question) -> bool:
    """The same for all GPUs and no fewer."""
    return any(_can_fit(_frugal_ladders(question, _corners(question, levers))) for levers in _strategies(question))


def _frugal_ladders(question: Question, every: Iterable[Corner]) -> list[Ladder]:
    found = frugal(every)
    floors = Floors(question, found[0].choice.buckets) if found else None
    return [Ladder(question, corner, set(), floors) for corner in found]


def _can_fit(ladders: list[Ladder]) -> bool:
    """The deepest first: most often that is the answer."""
    return any(ladder.fits_deepest() for ladder in ladders) or any(ladder.first_fit() for ladder in ladders)


def _smaller(question: Question) -> Iterator[Question]:
    """The same question with fewer GPUs, as many as share the batch evenly; the most first."""
    hardware = question.hardware
    if question.every_gpu:
        return
    whole_nodes = [replace(hardware, nodes=nodes) for nodes in range(hardware.nodes - 1, 1, -1)]
    most = hardware.gpus_per_node - 1 if hardware.nodes == 1 else hardware.gpus_per_node
    one_node = [replace(hardware, nodes=1, gpus_per_node=gpus) for gpus in range(most, 0, -1)]
    for fewer in (*whole_nodes, *one_node):
        if question.effective_batch % fewer.world == 0:
            yield replace(question, hardware=fewer)


def _least_thinkable_s(question: Question) -> float:
    """A bound: the GPU's own work on its share of the batch, with nothing recomputed and nobody to wait for."""
    alone = replace(question.hardware, nodes=1, gpus_per_node=1)
    levers = replace(question.base, engine="zero0", offload_optimizer="none", offload_param="none")
    clock = Clock(question.shape, levers, alone)
    return min((clock.own_s(corner.rest, corner.choice) for corner in _corners(question, levers)), default=inf)


def _strategies(question: Question) -> list[Levers]:
    every = strategies(question.base, question.pinned, question.hardware, question.ours)
    return [levers for levers in every if question.engines is None or levers.engine in question.engines]


def _corners(question: Question, levers: Levers) -> Iterator[Corner]:
    return corners(question.shape, levers, question.pinned, question.hardware, question.effective_batch)


def _search_world(question: Question, found: Found, most_s: float = inf) -> None:
    """`most_s`: slower ways than that are of no interest."""
    for levers in _strategies(question):
        way = _best_of_strategy(question, levers, found, most_s)
        if way is not None:
            found.ways.append(way)


def _best_of_strategy(question: Question, levers: Levers, found: Found, most_s: float) -> Way | None:
    """The fastest that fits, or the one nearest to fitting.

    The corners are taken in the order of what they would take if nothing recomputed, and nothing is weighed that
    even so is slower than what was found.
    """
    race: list[tuple[float, int, Corner, list[float]]] = []
    clock = Clock(question.shape, levers, question.hardware)
    for corner in _corners(question, levers):
        times = _times(question, corner, clock)
        found.timed.update(times)
        race.append((times[0], len(race), corner, times))
    ladders = _frugal_ladders(question, [corner for _, _, corner, _ in race])
    if not _can_fit(ladders):
        nearest = _nearest(question, ladders)
        found.weighed.update(size for ladder in ladders for size in ladder.sizes)
        return _way(question, nearest, fits=False) if nearest else None
    best: Way | None = None
    known = {id(ladder.corner): ladder.weighed for ladder in ladders}
    floors = ladders[0].floors
    for bound, _, corner, times in sorted(race):
        if bound > most_s + TIE_S:
            break
        ladder = Ladder(question, corner, found.weighed, floors, known.get(id(corner)))
        fitting = ladder.first_fit(bisect_right(times, most_s + TIE_S))
        if fitting is not None:
            way = _way(question, fitting, fits=True)
            best = way if best is None or rank(way) < rank(best) else best
            most_s = min(most_s, best.pace.step_s)
    return best


def _times(question: Question, corner: Corner, clock: Clock) -> list[float]:
    """Seconds of a step at every depth of checkpointing, or at the one that is pinned."""
    if corner.searched:
        times = clock.times(corner.rest, corner.choice)
        return times if question.partial else [times[0], times[-1]]
    return [pace(question.shape, corner.levers, question.hardware).step_s]


def _way(question: Question, weighed: Weighed, *, fits: bool) -> Way:
    return Way(
        shape=question.shape,
        levers=weighed.levers,
        hardware=question.hardware,
        footprint=weighed.footprint,
        pace=pace(question.shape, weighed.levers, question.hardware),
        fits=fits,
        gpu_limit_bytes=question.gpu_limit_bytes,
        correction=correction_of(question, weighed.levers),
    )


def _nearest(question: Question, ladders: list[Ladder]) -> Weighed | None:
    """The one nearest to fitting, of those that hold least. None of them fits."""
    best: Weighed | None = None
    for ladder in ladders:
        within = inf if best is None else excess_share(question, best.footprint)
        weighed = [*(() if best is None else (best,)), *ladder.nearest(within)]
        best = min(weighed, key=lambda each: distance(question, each), default=None)
    return best
