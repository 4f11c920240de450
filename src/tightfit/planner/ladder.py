"""One way of computing at every depth of checkpointing, and the fewest recomputing layers with which it fits.

`depths.py` has the search itself. Here each depth is weighed at most once, and floors spare what they can: most ways
are so far from fitting in time that what they hold at the loss shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tightfit.planner.candidates import Corner, complexity
from tightfit.planner.depths import Excess, in_a_valley, past_a_floor, tried_depths
from tightfit.planner.question import Question, excess_bytes, excess_share, floor_excess, is_hopeless, weigh
from tightfit.types import Buckets, Checkpointing, Footprint, Levers

BARE = Checkpointing(layers=0)
FULL = Checkpointing(layers=None)
OFFLOADED = Checkpointing(layers=None, offload=True)
FP32 = 4
Sizes = set[tuple[int, int]]
"""Distinct predictions of bytes, on the GPU and on the host."""


class Weighed(NamedTuple):
    excess: int
    levers: Levers
    footprint: Footprint


def distance(question: Question, weighed: Weighed) -> tuple[float, int, tuple[int, ...]]:
    """By what is shortest; where that is the host's RAM, which no depth changes, by what is missing in all."""
    return excess_share(question, weighed.footprint), weighed.excess, complexity(weighed.levers, 1)


class Floors:
    """Floors of a strategy's ways; those that differ in their buckets alone share that of the smallest buckets."""

    def __init__(self, question: Question, buckets: Buckets) -> None:
        self.question, self.buckets = question, buckets
        self.known: dict[tuple[int, str, str, str, Checkpointing], int] = {}

    def excess(self, corner: Corner, depth: Checkpointing) -> int:
        rest, choice = corner.rest, corner.choice
        key = rest.micro_batch, rest.loss, choice.attention, choice.scan, depth
        if key not in self.known:
            smallest = choice._replace(buckets=self.buckets).over(replace(rest, checkpointing=depth))
            self.known[key] = floor_excess(self.question, smallest)
        return self.known[key]


class Ladder:
    """One corner at every depth of checkpointing, each weighed at most once."""

    def __init__(
        self,
        question: Question,
        corner: Corner,
        sizes: Sizes,
        floors: Floors | None = None,
        weighed: dict[Checkpointing, Weighed] | None = None,
    ) -> None:
        """`sizes`: where what is weighed is counted. `weighed`: what is known of this corner already."""
        self.question, self.corner, self.sizes = question, corner, sizes
        self.floors = floors or Floors(question, corner.choice.buckets)
        self.depths = tried_depths(question.shape.n_layers, partial=question.partial) if corner.searched else (0,)
        self.weighed = {} if weighed is None else weighed

    def first_fit(self, most: int | None = None) -> Weighed | None:
        """The fewest recomputing layers that fit, of the first `most` depths; then, after all of them, offloading."""
        count = len(self.depths) if most is None else most
        if count == 0:
            return None
        if count < len(self.depths) and self.question.partial:
            return self._first_of(count)
        if self._is_over():
            return self._weigh(OFFLOADED) if self._fits(OFFLOADED) else None
        if self._is_hopeless():
            return None
        index = self._first_index(self._excess, count - 1)
        if index is not None:
            return self._at(index)
        if self.corner.searched and count == len(self.depths):
            offloaded = self._weigh(OFFLOADED)
            return offloaded if offloaded.excess == 0 else None
        return None

    def _first_of(self, count: int) -> Weighed | None:
        """The same of the first `count` depths, which most often are too few: then floors show it."""
        last, bare = count - 1, self._least(BARE)
        if bare and (not last or self._least(self._depth(last))):
            return None
        if bare and is_hopeless(self.question, self._at(last).footprint):
            return None
        index = self._first_index(lambda index: bare if bare and not index else self._excess(index), last)
        return None if index is None else self._at(index)

    def _first_index(self, excess: Excess, last: int) -> int | None:
        if self.corner.rest.engine == "zero3":
            return past_a_floor(excess, last, self._floor, self._replayed_floor)
        return in_a_valley(excess, last, self._rise, late=last < len(self.depths) - 1)

    def _least(self, depth: Checkpointing) -> int:
        """The excess is no less, whatever the buckets. Of trainers that know all or none every way is weighed."""
        prunes = self.corner.searched and self.question.partial
        return self.floors.excess(self.corner, depth) if prunes else 0

    def _fits(self, depth: Checkpointing) -> bool:
        return not self._least(depth) and not self._weigh(depth).excess

    def _is_over(self) -> bool:
        """Floors show that no depth fits, nor any between that is nearer than the deepest."""
        much = 0 if self.corner.rest.engine == "zero3" else self._rise
        return not self.question.caps and self._least(FULL) > much and self._least(BARE) > 0

    def _is_hopeless(self) -> bool:
        """What earlier runs have taught may differ between ways that recompute nothing, that do, and that offload."""
        if not is_hopeless(self.question, self._at(0).footprint):
            return False
        if self.question.calibration is None or not self.corner.searched:
            return True
        others = (self.deepest, self._weigh(OFFLOADED))
        return all(is_hopeless(self.question, each.footprint) for each in others)

    @property
    def deepest(self) -> Weighed:
        return self._at(len(self.depths) - 1)

    def fits_deepest(self) -> bool:
        return self._fits(FULL) if self.corner.searched else not self.deepest.excess

    def nearest(self, within: float) -> list[Weighed]:
        """All that was weighed, and the two that hold least in any case; without what lacks more than `within`, as a
        share of the card."""
        if not self._is_over():
            self._at(len(self.depths) - 1)
            if self.corner.searched:
                self._weigh(OFFLOADED)
            return list(self.weighed.values())
        for depth in (OFFLOADED, FULL, BARE):
            if self._least(depth) / max(self.question.gpu_limit_bytes, 1) <= within:
                within = min(within, excess_share(self.question, self._weigh(depth).footprint))
        return list(self.weighed.values())

    def _at(self, index: int) -> Weighed:
        if not self.corner.searched:
            return self._weigh(self.corner.levers.checkpointing)
        return self._weigh(self._depth(index))

    def _depth(self, index: int) -> Checkpointing:
        return FULL if index == len(self.depths) - 1 else Checkpointing(layers=self.depths[index])

    def _excess(self, index: int) -> int:
        return self._at(index).excess

    def _weigh(self, depth: Checkpointing) -> Weighed:
        weighed = self.weighed.get(depth)
        if weighed is None:
            levers = replace(self.corner.levers, checkpointing=depth)
            footprint = weigh(self.question, levers)
            weighed = self.weighed[depth] = Weighed(excess_bytes(self.question, footprint), levers, footprint)
        gpu, host = weighed.footprint.gpu, weighed.footprint.host
        self.sizes.add((gpu.required_bytes, host.peak_bytes_per_node))
        return weighed

    def _floor(self, index: int, *, replayed: bool = False) -> int:
        levers = replace(self.corner.levers, checkpointing=self._depth(index))
        return floor_excess(self.question, levers, replayed=replayed)

    def _replayed_floor(self, index: int) -> int:
        return self._floor(index, replayed=True)

    @property
    def _rise(self) -> int:
        return (1 + len(self.question.caps)) * self._layer_input_bytes

    @property
    def _layer_input_bytes(self) -> int:
        """Generously: in fp32, with what comes out of the layer, twice over."""
        levers = self.corner.rest
        return 4 * levers.micro_batch * levers.sequence * self.question.shape.hidden_size * FP32
