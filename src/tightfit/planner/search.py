"""The search: price what can be run, keep the fastest that fits.

Time is cheap to predict and memory is not, so candidates race: each is known first by what it takes at least, then by
its own time, and memory is predicted only for those that can still win. `ladder.py` finds how many layers must
recompute. The answer is that of trying everything, which a test compares.

Fewer GPUs than there are is a way as well: where the links are slow or the host's RAM is short, it can be the
faster one, or the only one. That is also what makes the answer monotone: a machine with more GPUs can do
whatever a smaller one can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf

from tightfit.inputs.flags import BARE, find_compile_obstacle
from tightfit.inputs.layouts import check_layout, divisors
from tightfit.memory import Scale
from tightfit.memory.operations import FP32
from tightfit.memory.pipeline import count_depths
from tightfit.memory.units import updates_ahead
from tightfit.memory.weights import WIDTH
from tightfit.pace import TIE_S, Clock, RowClock, clock_of, pace, step_seconds
from tightfit.planner import stream
from tightfit.planner.balance import LEAST_GAIN, balance, can_be_balanced, find_balanced
from tightfit.planner.candidates import (
    FILLED,
    LONG_TOKENS,
    Corner,
    complexity,
    corners,
    find_simplest,
    frugal,
    strategies,
)
from tightfit.planner.ladder import FULL, Ladder, Weighed
from tightfit.planner.plan import Way
from tightfit.planner.question import Question, correction_of, weigh
from tightfit.planner.taught import narrow
from tightfit.planner.team import Found, Task, find_best_s, find_team
from tightfit.planner.wanted import check_wanted
from tightfit.types import DDP, FSDP2, READ_TOGETHER, Buckets, Checkpointing, ConfigError, Levers, Moe

WAITING_SHARE = 0.1  # of a step that ranks wait for each other, from which on a pipeline is tried
MOST_ROWS = 2  # pipelines to search, of those that seem fastest; on one node, where none is most often the best, one
MOST_SHARED = 2  # likewise of ways to share layers
VARIED = ("shard_within", "offload_optimizer", "offload_param", *READ_TOGETHER)
LAYOUT = ("pipeline_parallel", "stages_per_gpu", "shard_within", "tensor_parallel")
PARTS = 2  # into which the search of one strategy is cut, where it takes long
MANY_GPUS = 128  # among which collectives of whole layers take long, so that sharing these may pay
GATHERED_SHARE = 0.125  # of the card: as much of it for layers that are gathered, and it is worth to share them


@dataclass(slots=True)
class SearchResult:
    """The best of each strategy, and of how many candidates."""

    ways: list[Way] = field(default_factory=list)
    """One a strategy: its fastest that fits, or the one nearest to fitting."""
    considered: int = 0
    """Candidates that were compared, each depth of checkpointing being one: priced, or known to lose from what they
    take or hold at least."""

    @property
    def best(self) -> Way | None:
        fitting = [way for way in self.ways if way.fits]
        return min(fitting, key=rank) if fitting else None

    @property
    def best_s(self) -> float:
        return inf if self.best is None else self.best.pace.step_s


def rank(way: Way) -> tuple[float, tuple[int, ...]]:
    """Faster first; of two equally fast ways the simpler."""
    return round(way.pace.step_s, 9), complexity(way.levers, way.world)


def search(question: Question, *, nearest: bool = True) -> SearchResult:
    """The best of every strategy on all GPUs, and of fewer GPUs where that is better. `nearest`: of a strategy that
    does not fit, what is nearest to it."""
    found = SearchResult()
    _search_world(question, found, nearest=nearest)
    best = found.best
    for fewer in _smaller(question):
        most_s = inf if best is None else best.pace.step_s
        if not fits_at_all(fewer) if best is None else _is_slower(fewer, most_s + TIE_S):
            continue
        attempt = SearchResult()
        _search_world(fewer, attempt, most_s, nearest=False)
        found.considered += attempt.considered
        if attempt.best is not None and (best is None or rank(attempt.best) < rank(best)):
            best = attempt.best
            found.ways.append(best)
    for guess in (_shared_layers, _pipelines):
        tasks = [Task(levers, found.best_s, nearest=False) for levers in guess(question, found)]
        _search_all(question, found, (), tasks)
    return found


def something_fits(question: Question) -> bool:
    """Whether `search` would find anything; asked only of the candidates that can hold least."""
    return any(fits_at_all(each) for each in (question, *_smaller(question)))


def fits_at_all(question: Question) -> bool:
    """The same for all GPUs and no fewer."""
    for levers in list_strategies(question):
        check_wanted()
        ladders = _list_least(question, _corners(question, levers))
        if _can_fit(ladders, floors=True):
            return True
        if _moves_layers(question, levers) and any(can_be_balanced(question, ladder) for ladder in ladders):
            return True
    return False


def _moves_layers(question: Question, levers: Levers) -> bool:
    return levers.pipeline_parallel > 1 and "stage_layers" not in question.pinned


def _list_least(question: Question, every: Iterable[Corner]) -> list[Ladder]:
    """Of one strategy those that can hold least: where any fits, one of these does."""
    ladders = [Ladder(question, corner) for corner in frugal(every)]
    roomier = [corner for ladder in ladders if ladder.corner.rest.streams for corner in stream.list_roomier(ladder)]
    return ladders + [Ladder(question, corner) for corner in roomier]


def _can_fit(ladders: list[Ladder], *, floors: bool) -> bool:
    """The deepest first: most often that is the answer. `floors`: what these rule out is not asked."""
    waiting = list[Ladder]()
    for ladder in ladders:
        if floors and not ladder.may_fit():
            continue
        if ladder.fits_deepest():
            return True
        waiting.append(ladder)
    return any(ladder.first_fit() for ladder in waiting)


def _smaller(question: Question) -> Iterator[Question]:
    """The same question with fewer GPUs, as many as share the batch evenly; the most first."""
    hardware = question.hardware
    if question.every_gpu:
        return
    whole_nodes = [replace(hardware, nodes=nodes) for nodes in range(hardware.nodes - 1, 1, -1)]
    most = hardware.gpus_per_node - 1 if hardware.nodes == 1 else hardware.gpus_per_node
    one_node = [replace(hardware, nodes=1, gpus_per_node=gpus) for gpus in range(most, 0, -1)]
    for fewer in (*whole_nodes, *one_node):
        if question.splits_over(fewer):
            yield replace(question, hardware=fewer)


def _is_slower(question: Question, most_s: float) -> bool:
    """Whether the GPU's own work on its share of the batch takes longer than this, with nothing recomputed and nobody
    to wait for. Most often the arithmetic alone does."""
    if question.effective_batch < question.hardware.world // question.base.ranks_per_sample:
        return False  # several GPUs have a sequence together
    levers = replace(question.base, engine=DDP, offload_optimizer="none", offload_param="none")
    if levers.pipeline_parallel > 1:
        return False
    clock = Clock(question.shape, levers, replace(question.hardware, nodes=1, gpus_per_node=1))
    if clock.least_s(question.effective_batch // question.hardware.world) > most_s:
        return True
    return all(clock.own_s(corner.rest, corner.choice) > most_s for corner in _corners(question, levers))


def list_strategies(question: Question) -> list[Levers]:
    def can_start(levers: Levers) -> bool:
        known = question.engines is None or levers.engine in question.engines
        return (
            known
            and is_measured(question, levers)
            and _can_lie_so(question, levers)
            and leaves_room(question, levers)
            and question.trainer.starts(levers.engine, levers, question.hardware)
        )

    ways = filter(can_start, strategies(question.base, question.pinned, question.hardware, question.ours))
    shared = [way for levers in ways for way in _share(question, levers)]
    return [way for levers in shared for way in _share_experts(question, levers)]


def is_measured(question: Question, levers: Levers) -> bool:
    """What Mamba's layers hold while they stream has been measured by nobody yet: they do so where it is asked for."""
    return not (levers.streams and question.shape.scans) or "engine" in question.pinned


def leaves_room(question: Question, levers: Levers) -> bool:
    """A second set of states is worth RAM that nobody else wants."""
    ram = question.hardware.host_ram_bytes
    if not updates_ahead(levers) or "update" in question.pinned or ram is None:
        return True
    return Scale(question.shape, levers, question.hardware).host_bytes(FULL) <= FILLED * ram


def _shared_layers(question: Question, found: SearchResult) -> list[Levers]:
    """Layers that GPUs of a node share, of very many GPUs: where collectives of whole layers take long, it may pay."""
    like, hardware = _find_reference(question, found), question.hardware
    base = replace(question.base, engine=FSDP2, offload_optimizer="none", offload_param="none")
    if like is None or hardware.world < MANY_GPUS or {*READ_TOGETHER} & question.pinned or _must_share(question, base):
        return []
    groups = {question.base.shard_within} if "shard_within" in question.pinned else {0, hardware.gpus_per_node}
    ways = [
        replace(base, tensor_parallel=size, shard_within=within)
        for size, within in product(question.sharing_sizes(hardware), groups)
    ]
    return _guess(question, like, [way for way in ways if _can_lie_so(question, way)], found.best_s, MOST_SHARED)


def _pipelines(question: Question, found: SearchResult) -> list[Levers]:
    """The rows of GPUs that may be faster than what was found: tried where ranks wait for the weights and gradients of
    each other, as over a slow network between nodes, of which a row takes hidden states alone. Where the fastest FSDP2
    shares layers, or may gain by it, those of a stage may do so too."""
    like, hardware = _find_reference(question, found), question.hardware
    if like is None or found.best is None or ({*READ_TOGETHER} - {"tensor_parallel"}) & question.pinned:
        return []
    waits = [way.pace.causes.get("communication", 0.0) / way.pace.step_s for way in found.ways if way.levers == like]
    if max(waits) < WAITING_SHARE:
        return []
    base = replace(question.base, engine=FSDP2, offload_optimizer="none", offload_param="none")
    sizes = sorted({*divisors(hardware.nodes), *divisors(hardware.gpus_per_node)})
    per_gpu = (question.base.stages_per_gpu,) if "stages_per_gpu" in question.pinned else (1, 2)
    groups = {question.base.shard_within} if "shard_within" in question.pinned else {0, hardware.gpus_per_node}
    sharers = {question.base.tensor_parallel}
    if "tensor_parallel" not in question.pinned and (hardware.world >= MANY_GPUS or _must_share(question, base)):
        sharers |= {*divisors(hardware.gpus_per_node)}
    rows, most = [], MOST_ROWS if hardware.nodes > 1 else 1
    for size, within, tensor in product(sizes, sorted(groups), sorted(sharers)):
        levers = replace(base, pipeline_parallel=size, shard_within=within, tensor_parallel=tensor)
        ranks = levers.stage_ranks(hardware.world)
        if not within or (within < ranks and ranks % within == 0):
            rows.append(replace(levers, stages_per_gpu=per_gpu[0]))
    kept = _guess(question, like, [row for row in rows if _can_lie_so(question, row)], found.best_s, most)
    if len(per_gpu) == 1:
        return kept
    interleaved = [replace(levers, stages_per_gpu=stages) for levers in kept for stages in per_gpu]
    return _guess(question, like, [row for row in interleaved if _can_lie_so(question, row)], found.best_s, most)


def _find_reference(question: Question, found: SearchResult) -> Levers | None:
    """The fastest FSDP2 that leaves all on the GPU, and of which each rank has whole rows and all layers."""
    ways = [
        way
        for way in found.ways
        if way.levers.is_fsdp2
        and way.levers.offload_param == "none"
        and way.levers.ranks_per_sample == way.levers.tensor_parallel
    ]
    if not question.ours or "expert_parallel" in question.pinned or not ways:
        return None
    return min(ways, key=lambda way: way.pace.step_s).levers


def _guess(question: Question, like: Levers, layouts: list[Levers], most_s: float, most: int) -> list[Levers]:
    """Those that seem fastest, and faster than this: most show that they are slower with the kernels and the micro
    batch of another way, though nothing recomputes."""
    guessed = list[tuple[float, int, Levers]]()
    for levers in layouts:
        share, left = divmod(question.effective_batch, levers.data_ranks(question.hardware.world))
        first = replace(like, **{name: getattr(levers, name) for name in LAYOUT}, checkpointing=BARE, expert_parallel=1)
        if find_compile_obstacle(first, question.shape) is not None:
            first = replace(first, compile="off", kernels="fused")
        for micro in {1, like.micro_batch, like.micro_batch * levers.tensor_parallel}:
            if not left and share % micro == 0 and share // micro >= levers.pipeline_parallel:
                first = replace(first, micro_batch=micro, accumulation=share // micro)
                guessed.append((step_seconds(question.shape, first, question.hardware), len(guessed), levers))
    return list(dict.fromkeys(levers for seconds, _, levers in sorted(guessed) if seconds < most_s))[:most]


def _share(question: Question, levers: Levers) -> list[Levers]:
    """With a GPU for each sequence, and with several, as many as one node has at most.

    They share the tokens where sequences are long, and where a batch has fewer sequences than there are GPUs; then as
    few of them as will do. They share the layers in these cases too, and where layers are too large to be gathered
    whole: that sends more, but of the weights each has a part alone."""
    hardware, shared = question.hardware, list[Levers]()
    sizes = question.sharing_sizes(hardware) if levers.row_parts == 1 else []
    is_lacking = question.effective_batch % levers.data_ranks(hardware.world) > 0
    is_long, found = levers.sequence >= LONG_TOKENS, [] if is_lacking else [levers]
    if "sequence_parallel" not in question.pinned and (is_long or is_lacking):
        shared += [replace(levers, sequence_parallel=size) for size in (sizes if is_long else sizes[:1])]
    if "tensor_parallel" not in question.pinned and levers.is_fsdp2 and _must_share(question, levers):
        shared += [replace(levers, tensor_parallel=size) for size in sizes]
    return [*found, *(way for way in shared if _can_lie_so(question, way))]


def _must_share(question: Question, levers: Levers) -> bool:
    """Whether sharing layers is one of the ways to try on however few GPUs."""
    is_lacking = question.effective_batch % levers.data_ranks(question.hardware.world) > 0
    return is_lacking or levers.sequence >= LONG_TOKENS or _gathers_much(question, levers)


def _gathers_much(question: Question, levers: Levers) -> bool:
    """Three times a layer's weights (those at work, what travels, what comes next), and its gradients in fp32."""
    largest = max([sum([tensor.numel for tensor in block.tensors]) for block in question.shape.blocks])
    each = 3 * WIDTH[levers.precision] + (FP32 if levers.trains_base else 0)
    return largest * each > GATHERED_SHARE * question.hardware.gpu.memory_bytes


def _can_lie_so(question: Question, levers: Levers) -> bool:
    with suppress(ConfigError):
        check_layout(levers, question.shape, question.hardware.world)
        return True
    return False


def _share_experts(question: Question, levers: Levers) -> list[Levers]:
    """With all experts on each GPU, and with some, where GPUs of one node can share them out. What comes from the host
    takes longer than what comes from other GPUs, whoever has the experts."""
    found, pinned = [levers], {"expert_parallel", "tensor_parallel", "pipeline_parallel"} & question.pinned
    if pinned or not levers.is_fsdp2 or levers.offload_param != "none":
        return found
    if not any(isinstance(block.mlp, Moe) for block in question.shape.blocks):
        return found
    for size in divisors(question.hardware.gpus_per_node):
        shared = replace(levers, expert_parallel=size)
        if _can_lie_so(question, shared):
            found.append(shared)
    return found


def _corners(question: Question, levers: Levers) -> Iterator[Corner]:
    batch, trainer = question.effective_batch, question.trainer
    if levers.streams:
        levers = stream.keep_enough(question, levers)
    return corners(question.shape, levers, question.pinned, question.hardware, batch, trainer)


def _search_world(question: Question, found: SearchResult, most_s: float = inf, *, nearest: bool) -> None:
    """The fastest of each strategy that fits, or the one nearest to fitting. `most_s`: slower ways than that are of no
    interest. Of layers that stream, and of variants on very many GPUs, that is so wherever anything else is faster:
    they come last."""
    has_many = question.hardware.world >= MANY_GPUS
    first, later, ahead = list[Task](), list[Task](), list[Task]()
    for levers in list_strategies(question):
        is_late = levers.streams or (has_many and _is_variant(question, levers))
        task = Task(levers, most_s, nearest)
        if levers.update == "ahead" and "update" not in question.pinned:
            # It takes as much of the GPU as to wait, and more of the host.
            ahead.append(task._replace(nearest=False, follows=most_s == inf))
        else:
            (later if is_late else first).append(task)
    _search_all(question, found, first, [*later, *ahead])


def _is_variant(question: Question, levers: Levers) -> bool:
    """An engine with something more that nobody asked for: on very many GPUs only of interest where it is faster."""
    return any(getattr(levers, name) != getattr(question.base, name) for name in VARIED)


def _search_all(question: Question, found: SearchResult, tasks: Sequence[Task], bounded: Sequence[Task] = ()) -> None:
    """Each by itself, so that other processes may do it. `bounded`: those that are of interest only where they are
    faster than the others, and than those before them."""
    each = _search_each(question, tasks)
    best_s = find_best_s(each)
    if best_s == inf and any(task.nearest or task.follows for task in bounded):
        for task in bounded:  # one after the other: each may be the first that fits
            each += _search_each(question, [task.beside(find_best_s(each))])
    else:
        cut = [_cut(task.beside(best_s)) for task in bounded]
        parts = iter(_search_each(question, [part for task in cut for part in task]))
        each += [_join(list(islice(parts, len(task)))) for task in cut]
    for number, (way, considered) in enumerate(each):
        found.considered += considered
        if way is None or (number >= len(tasks) and way.pace.step_s > best_s + TIE_S):
            continue
        found.ways.append(way)
        best_s = min(best_s, way.pace.step_s if way.fits else inf)


def _search_each(question: Question, tasks: Sequence[Task]) -> list[Found]:
    team = find_team()
    return [search_strategy(question, task) for task in tasks] if team is None else team.search(question, tasks)


def _cut(task: Task) -> list[Task]:
    """Layers that stream, or that a pipeline can move, may lie in so many ways that one process would take long. How
    many do it makes no difference to the answer."""
    is_long = task.levers.streams or task.levers.pipeline_parallel > 1
    return [task._replace(part=part, parts=PARTS) for part in range(PARTS)] if is_long else [task]


def _join(parts: Sequence[Found]) -> Found:
    ways = [part.way for part in parts if part.way is not None]
    return Found(min(ways, key=rank, default=None), sum([part.considered for part in parts]))


def search_strategy(question: Question, task: Task) -> Found:
    """The best of one strategy alone."""
    levers, most_s = task.levers, task.most_s
    if task.follows and most_s == inf:  # nothing that it would follow fits
        return Found(None, 0)
    every = list(_corners(question, levers))
    own = every[task.part :: task.parts]
    deepest = count_depths(question.shape, levers)
    considered = sum([corner.count_depths(deepest, partial=question.partial) for corner in own])
    line_up = cache(partial(_line_up, question, levers, own))  # which takes long, where nothing may fit
    if most_s < inf:
        bounds = [stream.least_s(question, levers)] if levers.streams else [runner.least_s for runner in line_up()]
        if not own or min(bounds) > most_s + TIE_S:
            return Found(None, considered)
    ladders, way = _list_least(question, every), None
    if _can_fit(ladders, floors=not task.nearest):
        won = stream.race(question, own, most_s) if levers.streams else _race(question, line_up(), ladders, most_s)
        way = None if won is None else _way(question, won, fits=True)
    elif task.nearest:
        closest: Weighed | None = None
        for ladder in ladders:
            closest = ladder.nearest(closest)
        way = None if closest is None else _way(question, closest.levers, fits=False)
    if _moves_layers(question, levers):
        way = _move_layers(question, line_up(), way, most_s)
    return Found(way, considered)


def _move_layers(question: Question, runners: list[Runner], way: Way | None, most_s: float) -> Way | None:
    """The same, or what is faster, or fits, once some layers of a pipeline are on other GPUs of it."""
    levers: Levers | None = None
    if way is not None and way.fits:
        most_s = min(most_s, way.pace.step_s * (1 - LEAST_GAIN))
        own = balance(question, way.levers)
        if own.step_s < most_s:
            levers, most_s = own.levers, own.step_s
    race = [(runner.corner, runner.times) for runner in runners if runner.least_s < most_s]
    levers = find_balanced(question, race, most_s) or levers
    return way if levers is None else _way(question, levers, fits=True)


class Runner:
    """A corner in the race."""

    def __init__(self, question: Question, corner: Corner, clock: Clock | RowClock) -> None:
        self.question, self.corner, self.clock = question, corner, clock
        self.least_s = clock.bound_s(corner.rest, corner.choice) if corner.searched else self.times[0]

    @cached_property
    def times(self) -> Sequence[float]:
        """Its seconds at every depth."""
        question, corner = self.question, self.corner
        if not corner.searched:
            return (step_seconds(question.shape, corner.levers, question.hardware),)
        deepest = count_depths(question.shape, corner.rest)
        return self.clock.times(corner.rest, corner.choice).at(corner.depths(deepest, partial=question.partial))


def _line_up(question: Question, levers: Levers, every: list[Corner]) -> list[Runner]:
    clock, runners = clock_of(question.shape, levers, question.hardware), list[Runner]()
    for corner in every:
        check_wanted()
        runners.append(Runner(question, corner, clock))
    return runners


def _race(question: Question, runners: list[Runner], ladders: list[Ladder], most_s: float) -> Levers | None:
    """The fastest that fits, in no more than this; None: there is none.

    The corners are taken in the order of what they take at least: what the GPU computes in any case, then with nothing
    recomputed, and then, as far as that is not enough to lose, at the first depth that floors allow. Nothing is weighed
    that even so is slower than what was found."""
    level: list[tuple[float, Levers]] = []  # what fits and may be the fastest, with its seconds
    thinkable = _Thinkable(question, ladders)
    waiting = [(runner.least_s, number) for number, runner in enumerate(runners)]
    heapify(waiting)
    while waiting and waiting[0][0] <= most_s + TIE_S:
        check_wanted()
        bound, number = heappop(waiting)
        corner, times = runners[number].corner, runners[number].times
        if times[0] > bound:
            heappush(waiting, (times[0], number))
            continue
        depth = thinkable.depth(corner)
        if depth is None:
            continue
        if times[depth] > bound:
            heappush(waiting, (times[depth], number))
            continue
        ladder = thinkable.ladder(corner)
        fitting = ladder.fit_within(bisect_right(times, most_s + TIE_S))
        if fitting is not None:
            fits = ladder.at(fitting)
            seconds = step_seconds(question.shape, fits, question.hardware)
            level.append((seconds, fits))
            most_s = min(most_s, seconds)
    return find_simplest(level, most_s, question.hardware.world)


class _Thinkable:
    """The first depth of a corner that floors allow; those that differ alone in the size of the buckets through which
    gradients leave share that of the smallest."""

    def __init__(self, question: Question, frugal_ones: list[Ladder]) -> None:
        self.question = question
        least = frugal_ones[0].corner.choice.buckets
        self.least = {name: getattr(least, name) for name in ("reduce_bucket", "allgather_bucket", "overlap_comm")}
        self.smaller: dict[Buckets, Buckets] = {}
        self.ladders = {_key(ladder.corner, ladder.corner.choice.buckets): ladder for ladder in frugal_ones}
        self.depths: dict[_Key, int | None] = {}

    def depth(self, corner: Corner) -> int | None:
        own = corner.choice.buckets
        if own not in self.smaller:
            self.smaller[own] = replace(own, **self.least)
        buckets = self.smaller[own]
        key = _key(corner, buckets)
        if key not in self.depths:
            choice = corner.choice._replace(buckets=buckets)
            self.depths[key] = self.ladder(Corner(corner.rest, choice, corner.searched)).first_thinkable()
        return self.depths[key]

    def ladder(self, corner: Corner) -> Ladder:
        key = _key(corner, corner.choice.buckets)
        if key not in self.ladders:
            self.ladders[key] = Ladder(self.question, corner)
        return self.ladders[key]


_Key = tuple[int, str, str, str, str, str, str, Checkpointing, Buckets]


def _key(corner: Corner, buckets: Buckets) -> _Key:
    rest, choice = corner.rest, corner.choice
    computed = rest.micro_batch, rest.loss, choice.attention, choice.scan, rest.compile, rest.kernels, rest.mlp
    return *computed, rest.checkpointing, buckets


def _way(question: Question, levers: Levers, *, fits: bool) -> Way:
    return Way(
        shape=question.shape,
        levers=levers,
        hardware=question.hardware,
        footprint=weigh(question, levers),
        pace=narrow(
            pace(question.shape, levers, question.hardware),
            question.calibration,
            question.shape,
            levers,
            question.hardware,
        ),
        fits=fits,
        gpu_limit_bytes=question.gpu_limit_bytes,
        correction=correction_of(question, levers),
    )
