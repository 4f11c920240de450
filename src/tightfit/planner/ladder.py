"""One way of computing at every depth of checkpointing, and the fewest recomputing layers with which it fits.

Time only grows with every layer that recomputes, so the fewest that fit are the fastest. Memory does not quite only
shrink. A layer that recomputes holds its own input meanwhile, which a layer that kept everything does not: so the
need falls with each layer more, and from where a recomputing layer is itself the peak (usually the topmost) it rises
again by about one layer's input. That is a valley, and `in_a_valley` finds its first fitting place by bisection;
`from_below` does where floors have shown that nothing fits before some depth, which most often is near.
No recomputing layer at all is a case of its own (masks need not wait for a second call, adapters need no gradient
of the embedding), and is asked first.

ZeRO-3 is rougher. What it has gathered at a layer depends on what it fetches next, and that changes with the depth:
with short sequences the need jumps up and down by more than a layer's activations. There every depth is tried, from
the first at which a floor would fit: `past_a_floor`.

Each depth is weighed at most once, and floors spare what they can: most ways are so far from fitting in time that what
they hold in any case shows it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from tightfit.inputs.flags import BARE
from tightfit.memory import Scale
from tightfit.memory.pipeline import count_depths
from tightfit.planner.candidates import FILLED, Corner, complexity
from tightfit.planner.question import Question, Weight, floor_excess, least_weight, weight_of
from tightfit.types import Checkpointing, Levers

FULL = Checkpointing(layers=None)
OFFLOADED = Checkpointing(layers=None, offload=True)
FP32 = 4
Excess = Callable[[int], int]  # how far the corner is from fitting at the depth of this index; 0: it fits
FEW = 4  # steps after which a search that went up looks whether there is anything to find


class Weighed(NamedTuple):
    levers: Levers
    weight: Weight

    @property
    def distance(self) -> tuple[float, int, tuple[int, ...]]:
        """By what is shortest; where that is the host's RAM, which no depth changes, by what is missing in all."""
        return self.weight.share, self.weight.excess, complexity(self.levers, 1)


class Ladder:
    """One corner at every depth of checkpointing, each weighed at most once."""

    def __init__(self, question: Question, corner: Corner) -> None:
        self.question, self.corner = question, corner
        self.depths: tuple[int, ...] = (0,)
        self.deepest = FULL
        if corner.searched:
            self.depths = corner.depths(count_depths(question.shape, corner.rest), partial=question.partial)
            self.deepest = corner.rest.checkpointing
        self.room_bytes = inf  # on the host
        self.is_cut = False  # more layers could send what they keep, had the host room for it
        if corner.searched and self.deepest.offload and (ram := question.hardware.host_ram_bytes) is not None:
            # whole layers send little: their inputs alone
            self.room_bytes = FILLED * ram if self.deepest.select else ram
            if self.weigh_host(self.depths[-1]) > self.room_bytes:
                count = bisect_right(self.depths, self.room_bytes, lo=1, key=self.weigh_host)
                self.is_cut, self.depths = count < len(self.depths), self.depths[:count]
            if self.depths[-1] < question.shape.n_layers:
                self.deepest = replace(self.deepest, layers=self.depths[-1])
        self.last = len(self.depths) - 1
        self.weighed: dict[Checkpointing, Weight] = {}
        self.floors: dict[Checkpointing, int] = {}
        self._depths: dict[int, Checkpointing] = {self.last: self.deepest, 0: BARE}

    def weigh_host(self, layers: int) -> int:
        """What it holds where so many layers recompute."""
        return self.scale.host_bytes(replace(self.deepest, layers=layers))

    @cached_property
    def scale(self) -> Scale:
        return Scale(self.question.shape, self.corner.levers, self.question.hardware)

    def first_fit(self) -> Checkpointing | None:
        """The fewest recomputing layers that fit; after all of them, offloading."""
        if self._is_over():
            return OFFLOADED if self.offloads and self._fits(OFFLOADED) else None
        if self._is_hopeless():
            return None
        if self._is_zero3:
            index = past_a_floor(self._excess, self.last, self._floor)
        else:
            index = in_a_valley(self._excess, self.last, self._rise)
        if index is not None:
            return self.depth_at(index)
        return OFFLOADED if self.offloads and not self._weigh(OFFLOADED).excess else None

    def first_thinkable(self) -> int | None:
        """The first depth that may fit, as far as floors can tell; the last, where only offloading may; None: none."""
        if not self._prunes or not self._least(BARE):
            return 0
        if not self._least(self.deepest):
            return first(self._floor, 1, self.last)
        return None if not self.offloads or self._least(OFFLOADED) else self.last

    def fit_within(self, count: int) -> Checkpointing | None:
        """What `first_fit` finds, of the first `count` depths; offloading only after all of them. For a race, in which
        most corners are asked for too few depths."""
        if not self._prunes and count > self.last:
            return self.first_fit()
        if self._fits(BARE):
            return BARE
        last = min(count - 1, self.last)
        if last and not self._floor(last):
            low = first(self._floor, 1, last)
            if not self._at(low).is_hopeless:
                search = one_by_one if self._is_zero3 else from_below
                index = search(self._excess, low, last, self._rise)
                if index is not None:
                    return self.depth_at(index)
            elif self.question.calibration is None:
                return None
        return OFFLOADED if last == self.last and self.offloads and self._fits(OFFLOADED) else None

    def at(self, depth: Checkpointing) -> Levers:
        return self.corner.levers.change(checkpointing=depth)

    @property
    def offloads(self) -> bool:
        """After all layers recompute, their inputs may wait on the host."""
        whole = self.corner.searched and self.corner.is_whole and self.corner.rest.pipeline_parallel == 1
        return whole and self.question.trainer.offloads_inputs(self.corner.rest.engine)

    @property
    def _is_zero3(self) -> bool:
        return self.corner.rest.stage == 3

    @property
    def _prunes(self) -> bool:
        """Of trainers that know all or none every way is weighed."""
        return self.corner.searched and self.question.partial

    def _least(self, depth: Checkpointing) -> int:
        """The excess is no less."""
        return self._floor_at(depth) if self._prunes else 0

    def _least_weight(self, depth: Checkpointing) -> tuple[float, int]:
        return least_weight(self.question, self.scale, depth, self._floor_at(depth))

    def _fits(self, depth: Checkpointing) -> bool:
        return not self._least(depth) and not self._weigh(depth).excess

    def _is_over(self) -> bool:
        """Floors show that no depth fits, nor any between that is nearer than the deepest."""
        much = 0 if self._is_zero3 else self._rise
        return not self.question.caps and self._least(self.deepest) > much and self._least(BARE) > 0

    def _is_hopeless(self) -> bool:
        """What earlier runs have taught may differ between ways that recompute nothing, that do, and that offload."""
        if not self._at(0).is_hopeless:
            return False
        if self.question.calibration is None or not self.corner.searched:
            return True
        return self._at(self.last).is_hopeless and not (self.offloads and not self._weigh(OFFLOADED).is_hopeless)

    def may_fit(self) -> bool:
        """As far as floors can tell, with what the host holds: seen without weighing any depth."""
        depths = (self.deepest, OFFLOADED, BARE) if self.corner.searched else (self.corner.levers.checkpointing,)
        return any(not self._least_weight(depth)[1] for depth in depths)

    def fits_deepest(self) -> bool:
        return self._fits(self.deepest) if self.corner.searched else not self._at(self.last).excess

    def nearest(self, best: Weighed | None) -> Weighed | None:
        """The nearest to fitting of all that was weighed and of the two that hold least in any case; or what is nearer
        already."""
        if not self._is_over():
            self._at(self.last)
            if self.offloads:
                self._weigh(OFFLOADED)
        known = [Weighed(self.at(depth), weight) for depth, weight in self.weighed.items()]
        best = min([*([] if best is None else [best]), *known], key=lambda each: each.distance, default=None)
        if not self._is_over():
            return best
        for depth in (*((OFFLOADED,) if self.offloads else ()), self.deepest, BARE):
            levers = self.at(depth)
            least = (*self._least_weight(depth), complexity(levers, 1))
            if best is None or (depth not in self.weighed and least < best.distance):
                weighed = Weighed(levers, self._weigh(depth))
                best = weighed if best is None or weighed.distance < best.distance else best
        return best

    def _at(self, index: int) -> Weight:
        return self._weigh(self.depth_at(index))

    def depth_at(self, index: int) -> Checkpointing:
        if not self.corner.searched:
            return self.corner.levers.checkpointing
        if index not in self._depths:
            self._depths[index] = replace(self.deepest, layers=self.depths[index])
        return self._depths[index]

    def list_depths(self) -> list[Checkpointing]:
        """From none to all, and last offloading."""
        return [*map(self.depth_at, range(self.last + 1)), *((OFFLOADED,) if self.offloads else ())]

    def _excess(self, index: int) -> int:
        return self._at(index).excess

    def _weigh(self, depth: Checkpointing) -> Weight:
        weight = self.weighed.get(depth)
        if weight is None:
            weight = self.weighed[depth] = weight_of(self.question, self.scale, depth)
        return weight

    def _floor(self, index: int) -> int:
        return self._floor_at(self.depth_at(index))

    def _floor_at(self, depth: Checkpointing) -> int:
        floor = self.floors.get(depth)
        if floor is None:
            floor = self.floors[depth] = floor_excess(self.question, self.scale, depth)
        return floor

    @property
    def _rise(self) -> int:
        """A layer's input, generously (in fp32, with what comes out of the layer, twice over), on the card and for
        each cap."""
        tokens = self.corner.rest.micro_batch * self.corner.rest.sequence
        if self.corner.rest.streams:  # whose micro batches pass a layer together
            tokens *= self.corner.rest.accumulation
        return (1 + len(self.question.caps)) * 4 * tokens * self.question.shape.hidden_size * FP32


# --- the search of a depth ---------------------------------------------------------------------


def in_a_valley(excess: Excess, last: int, rise: int) -> int | None:
    """The first index up to `last` that fits, where the need falls and then rises by `rise` at most; None: none."""
    if excess(0) == 0:
        return 0
    if last == 0:
        return None
    fitting = last if excess(last) == 0 else _fitting(excess, last, rise)
    return None if fitting is None else first(excess, 1, fitting)


def from_below(excess: Excess, low: int, last: int, rise: int) -> int | None:
    """The same, of indices from `low` on, before which nothing fits; in growing steps, since it is probably near."""
    if excess(low) == 0:
        return low
    index, step = low, 1
    while index < last:
        if step == FEW and excess(last) > rise:
            return None
        before, index, step = index, min(index + step, last), 2 * step
        if excess(index) == 0:
            return first(excess, before + 1, index)
    fitting = None if low == last else _fitting(excess, last, rise)
    return None if fitting is None else first(excess, low, fitting)


def one_by_one(excess: Excess, low: int, last: int, rise: int) -> int | None:
    """The same, where the need may jump, whatever `rise` says."""
    return next((index for index in range(low, last + 1) if excess(index) == 0), None)


def _fitting(excess: Excess, last: int, rise: int) -> int | None:
    """Some index that fits, where the last one does not."""
    if excess(last) > rise or (last > 1 and excess(last - 1) > excess(last)):
        return None  # the need falls to the end
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        here, next_one = excess(middle), excess(middle + 1)
        if here == 0:
            return middle
        if next_one == 0:
            return middle + 1
        low, high = (middle + 1, high) if next_one < here else (low, middle)
    return None


def first(excess: Excess, low: int, fitting: int) -> int:
    """The first that fits, where all from there up to `fitting` do."""
    high = fitting
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if excess(middle) else (low, middle)
    return high


def past_a_floor(excess: Excess, last: int, floor: Excess) -> int | None:
    """The first index up to `last` that fits. `floor`: an excess that is never too high and only falls with the
    depth."""
    if excess(0) == 0:
        return 0
    if last == 0 or floor(last):
        return None
    return one_by_one(excess, first(floor, 1, last), last, 0)
