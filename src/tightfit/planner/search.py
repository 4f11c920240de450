"""The search: price what can be run, keep the fastest that fits.

Time is cheap to predict and memory is not, so every candidate is timed, and memory is predicted only for those
that can still win. `depths.py` finds how many layers must recompute. The answer is that of trying everything,
which a test compares.

Fewer GPUs than there are is a way as well: where the links are slow or the host's RAM is short, it can be the
faster one, or the only one. That is also what makes the answer monotone: a machine with more GPUs can do
whatever a smaller one can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import NamedTuple

from tightfit.memory import estimate, floor_bytes
from tightfit.memory.overhead import ALLOCATOR_SLACK, beside
from tightfit.pace import pace, step_times
from tightfit.planner.calibration import Calibration, Correction, Place, corrected, phase_bytes
from tightfit.planner.candidates import Corner, Pinned, complexity, corners, frugal, strategies
from tightfit.planner.depths import in_a_valley, past_a_floor, tried_depths
from tightfit.planner.plan import Bounds, Way
from tightfit.types import Cause, Checkpointing, Footprint, Hardware, Levers, Lora, ModelShape, PhaseName

FULL = Checkpointing(layers=None)
OFFLOADED = Checkpointing(layers=None, offload=True)
TIE_S = 2e-9
"""Two times that may round to the same, whatever the order in which they were summed up."""
FP32 = 4
AT_ANY_DEPTH: tuple[PhaseName, ...] = ("init", "step", "save")
"""The phases of the GPU that hold the same however many layers recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What may be held in one phase, beside what card and host have: see `phase_bytes`."""

    where: Place
    phase: PhaseName | None
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the search."""

    shape: ModelShape
    base: Levers
    """The user's training; the free levers that are pinned have their values here."""
    pinned: Pinned
    hardware: Hardware
    effective_batch: int
    margin: float
    adapters: Lora = field(default_factory=Lora)
    """What LoRA would be, should full training be allowed to become that."""
    partial: bool = True
    """Some layers may recompute while others do not, as our own worker can; other trainers know all or none."""
    engines: frozenset[str] | None = None
    """Those that can be started; None: any."""
    every_gpu: bool = False
    """No way that leaves GPUs idle."""
    calibration: Calibration | None = None
    """What earlier runs have taught; None: predictions are taken as they are."""
    caps: tuple[Cap, ...] = ()
    """What a plan has to stay below, since another one failed above it."""

    def within(self, bounds: Bounds) -> Question:
        return replace(
            self,
            partial=bounds.partial,
            engines=bounds.engines,
            every_gpu=self.every_gpu or bounds.every_gpu,
            calibration=bounds.calibration,
        )

    @property
    def ours(self) -> bool:
        """Our own worker runs it, and saves it."""
        return self.partial

    @property
    def gpu_limit_bytes(self) -> int:
        return int(self.hardware.gpu.memory_bytes * (1 - self.margin))

    @property
    def steady_caps(self) -> tuple[Cap, ...]:
        """Those of which no depth of checkpointing is any nearer."""
        aside = self.hardware.gpu.vendor != "cpu"
        return tuple(cap for cap in self.caps if cap.phase in AT_ANY_DEPTH or (cap.where == "host" and aside))


@dataclass(slots=True)
class Found:
    """The best of each strategy, and how many candidates were priced."""

    ways: list[Way] = field(default_factory=list)
    """One a strategy: its fastest that fits, or the one nearest to fitting."""
    timed: set[float] = field(default_factory=set)
    """Distinct predictions of a step's seconds."""
    weighed: set[tuple[int, int]] = field(default_factory=set)
    """Distinct predictions of bytes, on the GPU and on the host."""

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


def weigh(question: Question, levers: Levers) -> Footprint:
    """What is predicted for these levers, with what earlier runs have taught."""
    footprint = estimate(question.shape, levers, question.hardware.world, question.hardware)
    correction = _correction(question, levers)
    return footprint if correction is None else corrected(footprint, correction, question.hardware)


def _correction(question: Question, levers: Levers) -> Correction | None:
    known = question.calibration
    return None if known is None else known.correction(question.shape, levers, question.hardware)


def excess_bytes(question: Question, footprint: Footprint) -> int:
    """How far a footprint is from fitting: the sum of what is missing on the GPU, in RAM and on NVMe; 0: it fits."""
    gpu = max(0, needed_bytes(footprint, question.hardware) - question.gpu_limit_bytes)
    return gpu + _host_excess_bytes(question, footprint) + sum(_over_caps(question, footprint, question.caps))


def _over_caps(question: Question, footprint: Footprint, caps: Iterable[Cap]) -> Iterator[int]:
    for cap in caps:
        yield max(0, phase_bytes(footprint, cap.where, cap.phase, question.hardware) - cap.most_bytes)


def excess_share(question: Question, footprint: Footprint) -> float:
    """The same as a share of what there is, of that which is shortest: a GiB of the GPU is not one of the host."""
    hardware, host = question.hardware, footprint.host
    missing = (
        (needed_bytes(footprint, hardware), question.gpu_limit_bytes),
        (host.peak_bytes_per_node, hardware.host_ram_bytes),
        (host.nvme_bytes_per_node, hardware.nvme_bytes),
        *((phase_bytes(footprint, cap.where, cap.phase, hardware), cap.most_bytes) for cap in question.caps),
    )
    return max(_over(need, have) / max(have or 1, 1) for need, have in missing)


def _host_excess_bytes(question: Question, footprint: Footprint) -> int:
    hardware, host = question.hardware, footprint.host
    return _over(host.peak_bytes_per_node, hardware.host_ram_bytes) + _over(
        host.nvme_bytes_per_node, hardware.nvme_bytes
    )


def _is_hopeless(question: Question, footprint: Footprint) -> bool:
    """Too much on the host, while the model is built, or at the optimizer's step: no depth of checkpointing changes
    these, except that offloading adds to the host."""
    hardware, gpu = question.hardware, footprint.gpu
    if any(_over_caps(question, footprint, question.steady_caps)):
        return True
    if _host_excess_bytes(question, footprint) or _required(gpu.init_peak_bytes, hardware) > hardware.gpu.memory_bytes:
        return True
    return _required(gpu.phases["step"].total_bytes, hardware) > question.gpu_limit_bytes


def _required(held: int, hardware: Hardware) -> int:
    return held + sum(beside(held, hardware.world).values())


def _over(need: int, have: int | None) -> int:
    return 0 if have is None else max(0, need - have)


def needed_bytes(footprint: Footprint, hardware: Hardware) -> int:
    """What must stay within the card less its margin.

    The margin is for the steps: building the model is the same every time, and must fit the card alone. Where even
    that does not, it is what counts.
    """
    gpu = footprint.gpu
    if gpu.init_peak_bytes <= gpu.peak_bytes or gpu.required_bytes > hardware.gpu.memory_bytes:
        return gpu.required_bytes
    return _required(gpu.peak_bytes, hardware)


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


def _frugal_ladders(question: Question, every: Iterable[Corner]) -> list[_Ladder]:
    return [_Ladder(question, corner, Found()) for corner in frugal(every)]


def _can_fit(ladders: list[_Ladder]) -> bool:
    """The deepest first: most often that is the answer."""
    return any(not ladder.deepest.excess for ladder in ladders) or any(ladder.first_fit() for ladder in ladders)


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
    own: tuple[Cause, ...] = ("arithmetic", "memory traffic", "dequantisation")
    least = inf
    for corner in _corners(question, levers):
        depth = Checkpointing(layers=0)
        causes = pace(question.shape, replace(corner.levers, checkpointing=depth), alone).causes
        least = min(least, sum(causes.get(cause, 0.0) for cause in own))
    return least


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
    for corner in _corners(question, levers):
        times = _times(question, corner)
        found.timed.update(times)
        race.append((times[0], len(race), corner, times))
    ladders = _frugal_ladders(question, [corner for _, _, corner, _ in race])
    if not _can_fit(ladders):
        found.weighed.update(key for ladder in ladders for key in ladder.found.weighed)
        nearest = min(
            (ladder.nearest() for ladder in ladders), key=lambda each: _distance(question, each), default=None
        )
        return _way(question, nearest, fits=False) if nearest else None
    best: Way | None = None
    for bound, _, corner, times in sorted(race):
        if bound > most_s + TIE_S:
            break
        fitting = _Ladder(question, corner, found).first_fit(bisect_right(times, most_s + TIE_S))
        if fitting is not None:
            way = _way(question, fitting, fits=True)
            best = way if best is None or rank(way) < rank(best) else best
            most_s = min(most_s, best.pace.step_s)
    return best


def _times(question: Question, corner: Corner) -> list[float]:
    """Seconds of a step at every depth of checkpointing, or at the one that is pinned."""
    if corner.searched:
        times = step_times(question.shape, corner.levers, question.hardware)
        return [times[depth] for depth in tried_depths(question.shape.n_layers, partial=question.partial)]
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
        correction=_correction(question, weighed.levers),
    )


class Weighed(NamedTuple):
    excess: int
    levers: Levers
    footprint: Footprint


def _distance(question: Question, weighed: Weighed) -> tuple[float, int, tuple[int, ...]]:
    """By what is shortest; where that is the host's RAM, which no depth changes, by what is missing in all."""
    return excess_share(question, weighed.footprint), weighed.excess, complexity(weighed.levers, 1)


class _Ladder:
    """One corner at every depth of checkpointing, each weighed at most once."""

    def __init__(self, question: Question, corner: Corner, found: Found) -> None:
        self.question, self.corner, self.found = question, corner, found
        self.depths = tried_depths(question.shape.n_layers, partial=question.partial) if corner.searched else (0,)
        self.weighed: dict[Checkpointing, Weighed] = {}

    def first_fit(self, most: int | None = None) -> Weighed | None:
        """The fewest recomputing layers that fit, of the first `most` depths; then, after all of them, offloading."""
        count = len(self.depths) if most is None else most
        if count == 0:
            return None
        if self._is_hopeless():
            return None
        if self.corner.levers.engine == "zero3":
            index = past_a_floor(self._excess, count - 1, self._floor, self._replayed_floor)
        else:
            rise = (1 + len(self.question.caps)) * self._layer_input_bytes
            index = in_a_valley(self._excess, count - 1, rise)
        if index is not None:
            return self._at(index)
        if self.corner.searched and count == len(self.depths):
            offloaded = self._weigh(OFFLOADED)
            return offloaded if offloaded.excess == 0 else None
        return None

    def _is_hopeless(self) -> bool:
        """What earlier runs have taught may differ between ways that recompute nothing, that do, and that offload."""
        if not _is_hopeless(self.question, self._at(0).footprint):
            return False
        if self.question.calibration is None or not self.corner.searched:
            return True
        others = (self.deepest, self._weigh(OFFLOADED))
        return all(_is_hopeless(self.question, each.footprint) for each in others)

    @property
    def deepest(self) -> Weighed:
        return self._at(len(self.depths) - 1)

    def nearest(self) -> Weighed:
        """What comes nearest to fitting of all that was weighed, and of the two that hold least in any case."""
        if self.corner.searched:
            self._weigh(OFFLOADED)
        weighed = (self.deepest, *self.weighed.values())
        return min(weighed, key=lambda each: _distance(self.question, each))

    def _at(self, index: int) -> Weighed:
        if not self.corner.searched:
            return self._weigh(self.corner.levers.checkpointing)
        return self._weigh(self._depth(index))

    def _depth(self, index: int) -> Checkpointing:
        return FULL if index == len(self.depths) - 1 else Checkpointing(layers=self.depths[index])

    def _excess(self, index: int) -> int:
        return self._at(index).excess

    def _weigh(self, depth: Checkpointing) -> Weighed:
        if depth not in self.weighed:
            question = self.question
            levers = replace(self.corner.levers, checkpointing=depth)
            footprint = weigh(question, levers)
            self.found.weighed.add((footprint.gpu.required_bytes, footprint.host.peak_bytes_per_node))
            self.weighed[depth] = Weighed(excess_bytes(question, footprint), levers, footprint)
        return self.weighed[depth]

    def _floor(self, index: int, *, replayed: bool = False) -> int:
        question = self.question
        levers = replace(self.corner.levers, checkpointing=self._depth(index))
        least = floor_bytes(question.shape, levers, question.hardware, replayed=replayed)
        correction = _correction(question, levers)
        taken = 0 if correction is None else correction.most_taken_bytes
        held = floor((least - _required(0, question.hardware)) / (1 + ALLOCATOR_SLACK)) - taken
        capped = (cap.most_bytes for cap in question.caps if cap.where == "gpu" and cap.phase in (None, "loss"))
        over = sum(max(0, held - most) for most in capped)
        return over + max(0, least - ceil(taken * (1 + ALLOCATOR_SLACK)) - question.gpu_limit_bytes)

    def _replayed_floor(self, index: int) -> int:
        return self._floor(index, replayed=True)

    @property
    def _layer_input_bytes(self) -> int:
        """Generously: in fp32, with what comes out of the layer, twice over."""
        levers = self.corner.levers
        return 4 * levers.micro_batch * levers.sequence * self.question.shape.hidden_size * FP32
