"""The search: price what can be run, keep the fastest that fits.

Time is cheap to predict and memory is not, so every candidate is timed, and memory is predicted only for those
that can still win. With more recomputing layers a step only takes longer and the GPU only holds less: the
smallest number of them that fits is found by bisection. The answer is that of trying everything, which a test
compares.

Fewer GPUs than there are is a way as well: where the links are slow or the host's RAM is short, it can be the
faster one, or the only one. That is also what makes the answer monotone: a machine with more GPUs can do
whatever a smaller one can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tightfit.memory import estimate
from tightfit.pace import pace, step_times
from tightfit.planner.candidates import Corner, Pinned, complexity, corners, strategies
from tightfit.planner.plan import Way
from tightfit.types import Checkpointing, Footprint, Hardware, Levers, ModelShape

FULL = Checkpointing(layers=None)
OFFLOADED = Checkpointing(layers=None, offload=True)
MOST_DEPTHS = 32
ROUNDING = 1 + 1e-9
"""The same sum in another order."""


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

    @property
    def gpu_limit_bytes(self) -> int:
        return int(self.hardware.gpu.memory_bytes * (1 - self.margin))


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


def excess_bytes(question: Question, footprint: Footprint) -> int:
    """How far a footprint is from fitting: the sum of what is missing on the GPU, in RAM and on NVMe; 0: it fits."""
    hardware = question.hardware
    gpu = max(0, _needed(question, footprint) - question.gpu_limit_bytes)
    host = _over(footprint.host.peak_bytes_per_node, hardware.host_ram_bytes)
    return gpu + host + _over(footprint.host.nvme_bytes_per_node, hardware.nvme_bytes)


def _over(need: int, have: int | None) -> int:
    return 0 if have is None else max(0, need - have)


def _needed(question: Question, footprint: Footprint) -> int:
    """The margin is for the steps: building the model is the same every time, and must fit the card alone."""
    gpu = footprint.gpu
    if gpu.init_peak_bytes <= gpu.peak_bytes or gpu.required_bytes > question.hardware.gpu.memory_bytes:
        return gpu.required_bytes
    return gpu.required_bytes - (gpu.init_peak_bytes - gpu.peak_bytes)


def search(question: Question) -> Found:
    """The best of every strategy on all GPUs, and of fewer GPUs where that is better."""
    found = Found()
    _search_world(question, found)
    best = found.best
    for fewer in _smaller(question):
        if best is None or _fastest_thinkable(fewer) < best.pace.step_s:
            attempt = Found(timed=found.timed, weighed=found.weighed)
            _search_world(fewer, attempt)
            if attempt.best is not None and (best is None or rank(attempt.best) < rank(best)):
                best = attempt.best
                found.ways.append(best)
    return found


def _smaller(question: Question) -> Iterator[Question]:
    """The same question with fewer GPUs, as many as share the batch evenly; the most first."""
    hardware = question.hardware
    whole_nodes = [replace(hardware, nodes=nodes) for nodes in range(hardware.nodes - 1, 1, -1)]
    most = hardware.gpus_per_node - 1 if hardware.nodes == 1 else hardware.gpus_per_node
    one_node = [replace(hardware, nodes=1, gpus_per_node=gpus) for gpus in range(most, 0, -1)]
    for fewer in (*whole_nodes, *one_node):
        if question.effective_batch % fewer.world == 0:
            yield replace(question, hardware=fewer)


def _fastest_thinkable(question: Question) -> float:
    """A bound: every corner with nothing recomputed, whether it fits or not."""
    return min(
        (
            _times(question, corner)[0]
            for levers in _strategies(question)
            for corner in _corners(question, levers)
            if corner.levers.attention != "eager" and corner.levers.scan != "torch"
        ),
        default=float("inf"),
    )


def _strategies(question: Question) -> list[Levers]:
    return strategies(question.base, question.pinned, question.hardware)


def _corners(question: Question, levers: Levers) -> Iterator[Corner]:
    return corners(question.shape, levers, question.pinned, question.hardware, question.effective_batch)


def _search_world(question: Question, found: Found) -> None:
    for levers in _strategies(question):
        way = _best_of_strategy(question, levers, found)
        if way is not None:
            found.ways.append(way)


def _best_of_strategy(question: Question, levers: Levers, found: Found) -> Way | None:
    """The fastest that fits, or the one nearest to fitting.

    The corners are taken in the order of what they would take if nothing recomputed, and no corner is weighed
    that even so is slower than what was found.
    """
    race: list[tuple[float, int, Corner]] = []
    for corner in _corners(question, levers):
        times = _times(question, corner)
        found.timed.update(times)
        race.append((times[0], len(race), corner))
    best: Way | None = None
    nearest: Weighed | None = None
    for bound, _, corner in sorted(race):
        if best is not None and bound > best.pace.step_s * ROUNDING:
            break
        least, fits = _shallowest(question, corner, found)
        if fits:
            way = _way(question, least, fits=True)
            best = way if best is None or rank(way) < rank(best) else best
        elif nearest is None or least.excess < nearest.excess:
            nearest = least
    if best is not None:
        return best
    return _way(question, nearest, fits=False) if nearest else None


def tried_depths(n_layers: int) -> tuple[int, ...]:
    """Numbers of recomputing layers, from none to all: every one, or in a deep model every second or third."""
    step = -(-n_layers // MOST_DEPTHS)
    return (*range(0, n_layers, step), n_layers)


class Weighed(NamedTuple):
    excess: int
    levers: Levers
    footprint: Footprint


def _times(question: Question, corner: Corner) -> list[float]:
    """Seconds of a step at every depth of checkpointing, or at the one that is pinned."""
    if corner.searched:
        times = step_times(question.shape, corner.levers, question.hardware)
        return [times[depth] for depth in tried_depths(question.shape.n_layers)]
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
    )


def _weigh(question: Question, levers: Levers, found: Found) -> Weighed:
    footprint = estimate(question.shape, levers, question.hardware.world, question.hardware)
    found.weighed.add((footprint.gpu.required_bytes, footprint.host.peak_bytes_per_node))
    return Weighed(excess_bytes(question, footprint), levers, footprint)


def _shallowest(question: Question, corner: Corner, found: Found) -> tuple[Weighed, bool]:
    """The smallest number of recomputing layers that fits; or what is nearest to it, and False."""
    if not corner.searched:
        only = _weigh(question, corner.levers, found)
        return only, only.excess == 0
    best = _weigh(question, replace(corner.levers, checkpointing=FULL), found)
    if best.excess:
        offloaded = _weigh(question, replace(corner.levers, checkpointing=OFFLOADED), found)
        return min(best, offloaded, key=lambda weighed: weighed.excess), offloaded.excess == 0
    depths = tried_depths(question.shape.n_layers)
    low, high = 0, len(depths) - 1  # the last, all layers, was weighed just now
    while low < high:
        middle = (low + high) // 2
        depth = Checkpointing(layers=depths[middle])
        weighed = _weigh(question, replace(corner.levers, checkpointing=depth), found)
        if weighed.excess:
            low = middle + 1
        else:
            high, best = middle, weighed
    return best, True
