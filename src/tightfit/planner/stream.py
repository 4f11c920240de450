"""The fastest way to stream the layers of one corner: how many recompute, and how many stay on the GPU.

Both want the card's memory. A layer that stays spares the link its weights, a layer that recomputes makes room for it
and costs arithmetic. At each depth of checkpointing the most layers that fit are the fastest, and of a range of depths
none is faster than its shallowest would be with as many as fit at its deepest. So ranges are halved as long as that is
less than the best yet, which most often is nowhere near all of them.

Of the way that is found no more layers stay than make a difference. Where a link is fast enough that may be none; and
memory that nobody fills is what the allocator wants: on a full card it hands pages back and forth, and each time the
GPU stands still.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf

from tightfit.inputs.flags import BARE
from tightfit.memory import Scale
from tightfit.memory.activations import setting_of
from tightfit.memory.overhead import ALLOCATOR_SLACK
from tightfit.memory.units import Unit, layer_bytes, stays, units_of, updates_ahead, waits_for_norm
from tightfit.pace import TIE_S
from tightfit.pace.clock import Computed, computing_key
from tightfit.pace.rates import rates_of
from tightfit.pace.stream import StreamClock, update_s
from tightfit.pace.work import frozen_of, least_products_s, passes_of
from tightfit.planner.candidates import FILLED, Corner, find_simplest
from tightfit.planner.ladder import FULL, OFFLOADED, Ladder
from tightfit.planner.question import Question, totals_tell, weight_of
from tightfit.planner.wanted import check_wanted
from tightfit.types import PARTS, Checkpointing, Levers

WORTH = 0.005
"""Of a step, what layers that stay have to save."""
TRIED = 4  # numbers of layers that stay so that the host has more room


def keep_enough(question: Question, levers: Levers, depth: Checkpointing = FULL) -> Levers:
    """With as few layers on the GPU as will do: none, unless the host has no room for them all."""
    ram, shape = question.hardware.host_ram_bytes, question.shape
    if ram is None or "resident" in question.pinned or levers.method == "full":  # which has all of them there
        return levers

    def has_room(resident: int) -> bool:
        way = replace(levers, resident=resident)
        return Scale(shape, way, question.hardware).host_bytes(depth) <= ram

    if has_room(0):
        return replace(levers, resident=0)
    counts = range(1, shape.n_layers + 1)
    enough = bisect_left(counts, True, key=has_room)
    return replace(levers, resident=counts[enough]) if enough < len(counts) else levers


@lru_cache(maxsize=64)
def held_bytes(layers: tuple[Unit, ...]) -> tuple[int, ...]:
    """Weights of the layers that stay on the GPU, by how many do: the host need not have them where they are frozen."""
    count = len(layers)
    return tuple(
        sum([unit.bytes for index, unit in enumerate(layers) if stays(index, resident, count)])
        for resident in range(count + 1)
    )


def least_s(question: Question, levers: Levers) -> float:
    """No way of streaming takes less: the arithmetic, of which at least half is the backward pass; beside that the
    optimizer, where it waits for all gradients, cannot run. Beside the rest it can."""
    shape, hardware = question.shape, question.hardware
    rates, ranks = rates_of(hardware, levers.precision), levers.data_ranks(hardware.world)
    batch = replace(levers, micro_batch=question.effective_batch // ranks)
    arithmetic = least_products_s(
        shape, setting_of(batch, hardware.gpu, shape.model_type), rates.card, frozen_of(levers)
    )
    if levers.trains_base and waits_for_norm(levers):
        units = units_of(shape, levers)
        trained = sum([unit.trained for unit in (units.before, *units.layers, units.after)])
        updated, back = update_s(trained, levers, hardware, rates), arithmetic / 2
        return max(arithmetic, updated) if updates_ahead(levers) else back + max(back, updated)
    return arithmetic


def race(question: Question, corners: Sequence[Corner], most_s: float) -> Levers | None:
    """The fastest that fits, in no more than this; None: there is none. Corners are taken in the order of what they
    take at least: what the GPU computes in any case, then with nothing recomputed and nothing to wait for."""
    asked_s = most_s
    level = list[tuple[float, Levers]]()  # what fits and may be the fastest, with its seconds
    clocks: dict[Levers, StreamClock] = {}
    runners: dict[int, Runner] = {}
    computing = dict[Computed, float]()
    waiting, corners, own = list[tuple[float, int]](), [*corners], set(range(len(corners)))
    for number, corner in enumerate(corners):
        key = computing_key(corner.rest, corner.choice)
        if key not in computing:
            computing[key] = computing_s(question, corner)
        waiting.append((computing[key], number))
    heapify(waiting)
    while waiting and waiting[0][0] <= most_s + TIE_S:
        check_wanted()
        bound, number = heappop(waiting)
        if number not in runners:
            runners[number] = Runner(question, corners[number], clocks)
            heappush(waiting, (max(bound, runners[number].least_s), number))
            continue
        runner = runners[number]
        if number in own:
            own.remove(number)
            for corner in list_roomier(runner.ladder):
                heappush(waiting, (bound, len(corners)))
                corners.append(corner)
        if runner.raise_least() > bound:
            if runner.least_s < inf:
                heappush(waiting, (runner.least_s, number))
            continue
        found = runner.find_fastest(most_s)
        if found is not None:
            level.append(found)
            most_s = min(most_s, found[0])
    simplest = find_simplest(level, most_s, question.hardware.world)
    return None if simplest is None else leave_room(question, simplest, asked_s)


def leave_room(question: Question, levers: Levers, most_s: float) -> Levers:
    """With no more layers on the GPU than make a difference, unless frozen ones would fill the host's RAM instead.
    Layers may differ in size, and which of them stay depends on how many do: fewer may hold more."""
    if "resident" in question.pinned:
        return levers
    shape, hardware, depth = question.shape, question.hardware, levers.checkpointing
    clock = StreamClock(shape, levers, hardware, rates_of(hardware, levers.precision))
    longest_s = min(clock.seconds(depth, levers.resident) * (1 + WORTH), most_s + TIE_S)
    counts = range(keep_enough(question, replace(levers, resident=0)).resident, levers.resident)
    enough = bisect_left(counts, True, key=lambda count: clock.seconds(depth, count) <= longest_s)
    layers, ram = units_of(shape, levers).layers, hardware.host_ram_bytes
    for count in counts[enough:]:
        fewer = replace(levers, resident=count)
        scale = Scale(shape, fewer, hardware)
        fills = levers.method != "full" and ram is not None and scale.host_bytes(depth) > FILLED * ram
        frees = not fills and layer_bytes(layers, count) < layer_bytes(layers, levers.resident)
        if frees and not weight_of(question, scale, depth).excess:
            return fewer
    return levers


def computing_s(question: Question, corner: Corner) -> float:
    """What the GPU computes when nothing recomputes; rounded down a little, since it is compared with what was summed
    up otherwise."""
    levers, gpu = corner.choice.over(corner.rest), question.hardware.gpu
    passes = passes_of(question.shape, levers, gpu, rates_of(question.hardware, levers.precision), recomputing=0)
    return levers.accumulation * (passes.forward_gpu + passes.back_gpu) * (1 - 1e-9)


def list_roomier(ladder: Ladder) -> list[Corner]:
    """The same with more frozen layers on the GPU, and nowhere else: the host has room for what others keep. Of layers
    that send parts as many as let all of them do so, or three quarters of those that could not, half or a quarter; of
    whole ones, which send their inputs at least, as few as will do."""
    question, corner = ladder.question, ladder.corner
    shape, rest = question.shape, corner.rest
    if rest.method == "full" or "resident" in question.pinned:
        return []
    enough = set[int]()
    if ladder.is_cut:
        depths = corner.depths(shape.n_layers, partial=question.partial)
        beyond, held = depths[len(ladder.depths) :], held_bytes(units_of(shape, rest).layers)
        for share in range(1, TRIED + 1):
            missing = ladder.weigh_host(beyond[-(-len(beyond) * share // TRIED) - 1]) - ladder.room_bytes
            spared = held[rest.resident] + missing
            counts = range(rest.resident, shape.n_layers)
            enough.add(next((n for n in counts if held[n] >= spared), shape.n_layers))
    if ladder.offloads:
        enough.add(keep_enough(question, corner.levers, OFFLOADED).resident)
    return [replace(corner, rest=replace(rest, resident=n)) for n in sorted(enough) if n > rest.resident]


class Runner:
    """One corner in the race."""

    def __init__(self, question: Question, corner: Corner, clocks: dict[Levers, StreamClock]) -> None:
        """`clocks`: those of earlier corners, by their levers without what recomputes."""
        self.question, self.corner = question, corner
        shape, hardware = question.shape, question.hardware
        depth = Checkpointing(layers=0, select=corner.rest.checkpointing.select and PARTS)
        alike = corner.levers.change(checkpointing=depth, resident=0)
        if alike not in clocks:
            clocks[alike] = StreamClock(shape, alike, hardware, rates_of(hardware, alike.precision))
        self.clock = clocks[alike]
        self.ladder = Ladder(question, corner)
        self.layers = units_of(shape, corner.rest).layers
        pinned = "resident" in question.pinned
        self.least, self.most = corner.rest.resident, corner.rest.resident if pinned else shape.n_layers
        self.least_s = self.clock.seconds(BARE if corner.searched else corner.rest.checkpointing, self.most)

    def raise_least(self) -> float:
        """What it takes at least, as far as floors can tell where it may fit; infinite: nowhere."""
        if self.corner.searched:
            depth = self.ladder.first_thinkable()
            self.most = self.least if depth is None else self._count_most()
            shallowest = None if depth is None else self.ladder.depth_at(depth)
            self.least_s = inf if shallowest is None else self.clock.seconds(shallowest, self.most)
        return self.least_s

    def _count_most(self) -> int:
        """No more layers have room, as far as floors can tell, whatever recomputes."""
        if self.least == self.most or not totals_tell(self.question):
            return self.most
        floor, depths = self.ladder.scale.floor, (self.ladder.deepest, *((OFFLOADED,) if self.ladder.offloads else ()))
        held = min([max(*floor.held(depth), floor.after) for depth in depths])
        spare = self.question.gpu_limit_bytes - held + layer_bytes(self.layers, self.least)
        counts = range(self.most, self.least, -1)
        return next((count for count in counts if layer_bytes(self.layers, count) <= spare), self.least)

    def find_fastest(self, most_s: float) -> tuple[float, Levers] | None:
        """Its seconds, no more than this, and its levers."""
        first = self.ladder.first_fit()
        if first is None:
            return None
        best: tuple[float, Levers] | None = None

        def consider(depth: Checkpointing) -> int:
            """How many layers may stay; if it is the fastest yet, it is the best."""
            nonlocal best, most_s
            check_wanted()
            resident = self.count_resident(depth)
            if resident is None:
                return self.least
            seconds = self.clock.seconds(depth, resident)
            if seconds <= most_s + TIE_S and (best is None or seconds < best[0]):
                most_s = seconds
                best = seconds, replace(self.corner.levers, checkpointing=depth, resident=resident)
            return resident

        depths = self.ladder.list_depths()
        low = depths.index(first)
        if self.least == self.most:
            consider(first)
            return best
        if first.offload and self.corner.is_whole:  # after all other depths
            consider(first)
            return best
        if self.ladder.offloads:
            *depths, aside = depths
            consider(aside)
        high = len(depths) - 1
        resident = {index: consider(depths[index]) for index in {low, high}}
        spans = [(low, high)]
        while spans:
            low, high = spans.pop()
            if high - low < 2:
                continue
            if self.clock.seconds(depths[low + 1], max(resident[low], resident[high])) >= most_s:
                continue
            middle = (low + high) // 2
            resident[middle] = consider(depths[middle])
            spans += [(middle, high), (low, middle)]
        return best

    def count_resident(self, depth: Checkpointing) -> int | None:
        """The most layers that may stay on the GPU; None: it does not fit whatever stays."""
        if not self.fits(depth, self.least):
            return None
        if self.least == self.most:
            return self.least
        scale, limit = self.ladder.scale, self.question.gpu_limit_bytes
        spare = (limit - weight_of(self.question, scale, depth).required) / (1 + ALLOCATOR_SLACK)
        own = layer_bytes(self.layers, self.least)
        low, high = self.least, self.most  # the first fits
        guess = next((count for count in range(high, low, -1) if layer_bytes(self.layers, count) - own <= spare), low)
        for count in (guess, guess + 1):  # most often the answer lies between them
            if low < count <= high:
                low, high = (count, high) if self.fits(depth, count) else (low, count - 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(depth, middle) else (low, middle - 1)
        return low

    def fits(self, depth: Checkpointing, resident: int) -> bool:
        scale = self.ladder.scale
        if resident != self.least:
            scale = Scale(self.question.shape, replace(self.corner.levers, resident=resident), self.question.hardware)
        return not weight_of(self.question, scale, depth).excess
