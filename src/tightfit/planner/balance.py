"""The layers of a pipeline's stages, moved until every GPU has room and the slowest is no slower than it must be.

By itself a pipeline is cut by arithmetic alone (`memory/stages.py`). The GPU at its beginning has most micro batches in
hand, the one at its end has the logits, and layers that recompute take longer beside a head that does not: so another
cut may fit where that one does not, or fit with fewer layers that recompute, and be the faster one. Here layers are
moved one at a time: from the fullest GPU as long as it lacks room, then from the slowest, each to where that helps
most, until nothing helps. What comes of it is a lever (`stage_layers`), so that footprint, pace and worker all have the
same cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from tightfit.memory import Scale, Totals, fullest_of
from tightfit.memory.pipeline import Stage, lay_out
from tightfit.memory.stages import split_layers
from tightfit.pace import RowTime, time_row
from tightfit.planner.candidates import Corner
from tightfit.planner.ladder import Ladder
from tightfit.planner.question import Question, excess_bytes, excess_of, totals_tell, weigh
from tightfit.types import Levers

MANY_STAGES = 8  # above which not every pair of them is tried
LEAST_GAIN = 0.002  # of a step: for less no layer is moved from where arithmetic has it


class Cut(NamedTuple):
    """One split of the layers, priced."""

    levers: Levers
    excess: int  # bytes that are missing for it to fit
    step_s: float
    times: tuple[float, ...]  # of every GPU, the slowest first
    giver: int  # the GPU that should have fewer layers: the fullest if it lacks room, or the slowest

    @property
    def rank(self) -> tuple[int, tuple[float, ...]]:
        """Of two with an equally slow GPU the one is better that has fewer of them."""
        return self.excess, self.times


def find_balanced(question: Question, race: list[tuple[Corner, Sequence[float]]], most_s: float) -> Levers | None:
    """The fastest way that fits and takes less than `most_s`, of a pipeline whose layers may be moved.

    `race`: each corner with its seconds at every depth, as arithmetic has its layers; hardly any other split is faster
    with as many layers that recompute. Of a corner the deepest depth that could still win is tried first: what has no
    room there has none with fewer layers that recompute."""
    best: Levers | None = None
    for corner, times in sorted(race, key=lambda each: each[1][0]):
        ladder = Ladder(question, corner)
        for index in reversed(range(min(bisect_left(times, most_s), len(ladder.depths)))):
            levers = ladder.at(ladder.depth_at(index))
            if not _has_room(question, ladder.scale, levers):
                break
            found = balance(question, levers)
            if found.excess:
                break
            if found.step_s < most_s:
                best, most_s = found.levers, found.step_s
    return best


def can_be_balanced(question: Question, ladder: Ladder) -> bool:
    """Whether it fits so with all layers that recompute."""
    levers = ladder.at(ladder.depth_at(ladder.last))
    return _has_room(question, ladder.scale, levers) and not balance(question, levers).excess


def _has_room(question: Question, scale: Scale, levers: Levers) -> bool:
    """Whether some GPUs may have room for what others lack. A layer takes no less than one micro batch's part of what
    it took where most are in hand."""
    if question.caps or question.calibration is not None:
        return True
    over = [each.required - question.gpu_limit_bytes for each in scale.totals_of_each(levers.checkpointing)]
    alike = [jobs[0].row.alike for jobs in scale.jobs if jobs[0].row is not None]
    room = sum([-each * count for each, count in zip(over, alike, strict=True) if each < 0])
    return sum([each for each in over if each > 0]) <= levers.pipeline_parallel * room


def balance(question: Question, levers: Levers) -> Cut:
    """The best that moving layers leads to; it may still lack room."""
    priced = _Priced(question, levers)
    own = priced.split(list(map(len, split_layers(question.shape, levers))))
    best = priced.time(own, *priced.weigh(own))
    while True:
        moves = map(priced.split, _moves(list(best.levers.layer_counts), best.giver, levers.pipeline_parallel))
        weighed = [(each, *priced.weigh(each)) for each in moves]
        least = min([excess for _, excess, _ in weighed], default=inf)
        if least > best.excess:
            return best
        tried = [priced.time(*each) for each in weighed if each[1] == least]  # of the others the pace does not count
        better = min(tried, key=lambda cut: cut.rank)
        if better.rank >= best.rank:
            return best
        best = better


class _Priced:
    """Splits of one way's layers. A GPU with the same layers is weighed and timed once, whichever splits have it."""

    def __init__(self, question: Question, levers: Levers) -> None:
        self.question, self.levers = question, levers
        self.weighed: dict[tuple[Stage, ...], Totals] = {}
        self.timed: dict[tuple[Stage, ...], RowTime] = {}

    def split(self, counts: list[int]) -> Levers:
        return self.levers.change(stage_layers=",".join(map(str, counts)))

    def time(self, levers: Levers, excess: int, fullest: int) -> Cut:
        step_s, times = time_row(self.question.shape, levers, self.question.hardware, self.timed)
        slowest = max(times, key=lambda each: each.whole)
        every = sorted((each.whole for each in times for _ in range(each.alike)), reverse=True)
        return Cut(levers, excess, step_s, tuple(every), fullest if excess else slowest.place)

    def weigh(self, levers: Levers) -> tuple[int, int]:
        """The bytes that are missing, and the place of the fullest GPU."""
        question = self.question
        if not totals_tell(question):
            footprint = weigh(question, levers)
            assert footprint.pipeline_gpu is not None
            return excess_bytes(question, footprint), footprint.pipeline_gpu
        row = lay_out(question.shape, levers)
        for gpu in row:
            if gpu.stages not in self.weighed:
                scale = Scale(question.shape, levers, question.hardware, (gpu,))
                self.weighed[gpu.stages] = scale.totals(levers.checkpointing)
        totals = [self.weighed[gpu.stages] for gpu in row]
        fullest = max(range(len(row)), key=lambda at: totals[at].required)
        return excess_of(question, fullest_of(totals)), row[fullest].place


def _moves(counts: list[int], giver: int, gpus: int) -> Iterator[list[int]]:
    """A layer of the giver goes to another stage: of GPUs that are alike to the last's, which has fewest micro batches
    in hand. In a pipeline of many stages it goes from a GPU's longest to another's shortest."""

    def count(stage: int) -> int:
        return counts[stage]

    takers = {(tuple(counts[place::gpus]), place == 0, place == gpus - 1): place for place in range(gpus)}
    stages_of = {place: range(place, len(counts), gpus) for place in {*takers.values(), giver}}
    sources, targets = list(stages_of[giver]), [stage for stages in stages_of.values() for stage in stages]
    if len(counts) > MANY_STAGES:
        sources = [max(sources, key=count)]
        targets = [min(stages, key=count) for place, stages in stages_of.items() if place != giver]
    for source, target in product(sources, targets):
        if counts[source] > 1 and target != source:
            moved = counts.copy()
            moved[source] -= 1
            moved[target] += 1
            yield moved
