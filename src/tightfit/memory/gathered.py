"""How many parameters ZeRO-3 holds whole at each moment: a replay of DeepSpeed's coordinator.

Under ZeRO-3 a module's parameters are gathered before it runs and released after. Two rules of
`partitioned_param_coordinator.py` make that far more than one module's worth from the second step on, when
the order of modules is known: every call of a module prefetches the parameters that come next, up to
`prefetch_bucket` at a time, as long as fewer than `max_live_parameters` are whole; and a parameter is not
released when it is used again within `max_reuse_distance` elements. Modules are called far more often than
there are buckets to fetch, so the prefetcher usually runs ahead until the limit on live parameters stops it,
and overshoots by the tensor that crossed it. Several parameters fetched in one call travel in one flat buffer
and are copied out of it one by one; the buffer goes when the last of them has been used. A layer that
recomputes is entered from its end: its last module is fetched for the backward pass, then the layer runs
again, and frozen weights fetched by that stay until the last module is done. Counting one layer instead, as
the folklore does, is off by gigabytes in both directions: a large embedding alone may exceed the limit.

A leaf is gathered whole, and the search for its next use (`__params_to_release`) goes through all that is inside the
modules that it passes: a container counts as a use of every leaf in it, and its parameters count beside those of the
leaf itself. The search for the next use of anything else passes a leaf as if nothing were inside it, so that an
embedding which would have been released stays.

First a training step is written as the calls that the coordinator sees; then they are followed one by one.

A replay depends on the model and the thresholds alone, but on how many layers recompute as well, and a search asks for
many depths. Two steps that differ in their depth are alike in most of their calls. So two of them are replayed from end
to end, one in which no layer recomputes and one in which all do, with what the coordinator has in hand before each
layer's turn written down; and any other goes on from the first, and ends as the second does:

- Up to the layers that recompute, the calls are those of the first. The coordinator looks ahead, as far as it
  prefetches and as it searches for next uses, so what it has in hand is the same as long as it has looked at nothing
  that differs: `_is_unseen`.
- Below, the calls are those of the second. Once the same things are in hand before the same calls, all that follows is
  the same.

Nothing is assumed about how soon that is: where it never happens, the calls are followed to the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, takewhile
from typing import NamedTuple, TypeAlias

Param = tuple[int, int]  # (identity, elements)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One call site of a module: the parameters that it owns directly; persistent ones left out."""

    params: tuple[Param, ...] = ()
    frozen: bool = False
    reads_input: bool = False
    """It reads what enters the layer: without a gradient there, a frozen one is not called backwards."""
    own: int | None = None  # elements that a search for a next use counts in passing it; None: those of `params`
    spans: int | None = None  # likewise a search for a leaf's; None: as many as `own`
    leaves: tuple[Module, ...] = ()  # the leaves inside it
    leaf: bool = False
    name: str = ""
    """Of a part of a layer that owns matrices: what else is called before the next one belongs to its turn."""


Node: TypeAlias = "Module | tuple[Node, ...]"
"""A module, or a container (the first of the tuple) with what it calls, in order."""


@dataclass(frozen=True, slots=True)
class GatherLimits:
    prefetch: int
    max_live: int
    max_reuse: int
    flat: bool = True
    """Parameters fetched together travel in one flat buffer; a single rank has nothing to gather, and none."""
    stays: int = 0  # parameters of at most so many elements are not released once they are whole


Held = tuple[int, int, int]
"""Whole elements in one module's turn: the most in passing during its call, while it runs, and when it has run."""


class Called(NamedTuple):
    """The turns of a layer's modules."""

    names: tuple[str, ...]
    held: tuple[Held, ...]


NONE = Called((), ())


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole elements, the most at any call of each stretch of the step."""

    layers: tuple[int, ...]
    """For each layer, bottom to top: when its backward pass proper begins, with all activations there."""
    gradients: tuple[int, ...]  # for each layer: the most from then on, while its gradients come
    called: tuple[Called, ...]  # for each layer, likewise from then on
    again: tuple[Called, ...]  # for each layer, while it is run again
    forward: int = 0
    forwards: tuple[Called, ...] = ()  # likewise of each layer. None: their calls are not told apart
    loss: int = 0
    at_loss: int = 0  # the same without what is there in passing, while the head is called
    norm_forward: int = 0  # in the final norm's forward pass: the head may be there already, with the buffer it came in
    norm: int = 0  # in its backward pass
    embedding: int = 0

    @classmethod
    def of_nothing(cls, n_layers: int) -> Gathered:
        none, uncalled = (0,) * n_layers, (NONE,) * n_layers
        return cls(none, none, uncalled, uncalled)


FETCH, AGAIN, RELEASE, SKIP = range(4)
"""AGAIN: a fetch while a layer is recomputed. SKIP: fetches of modules that own nothing, taken together."""
Call = tuple[int, Module]

UNCOUNTED, COUNTED, TURN, RERUN = range(4)
"""Whether what is held at a call goes into the report of its stretch; TURN: it is where its layer turns round. RERUN:
it is reported by itself, of a layer that runs again."""
Move = tuple[int, Module, "Module | None", int, int, int]
"""One call, or several of modules that own nothing: its kind; the module; who keeps what is frozen, of a fetch while a
layer is recomputed; how many calls; whether they count; and whose turn it is, by number."""
Need = tuple[int, int, int]  # a parameter to come: its identity, its elements, and the fetches since its stretch began


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Calls in order, without those that change nothing: most modules own nothing, and their releases are empty.
    Compared by identity: steps share those that are alike."""

    tag: int  # it groups them for the report
    moves: tuple[Move, ...]
    names: tuple[str, ...]  # of the modules that have a turn
    needs: tuple[Need, ...]
    counts: tuple[int, ...]  # for every fetch, the elements that a search for a next use counts in passing it
    spans: tuple[int, ...]  # likewise a search for a leaf's next use
    leaves: tuple[tuple[Module, int], ...]
    """Each leaf that a fetched module is or has inside, with the fetches before that."""


def _stretch(tag: int, calls: Sequence[Call]) -> Stretch:
    fetched = [module for kind, module in calls if kind != RELEASE]
    counts = [sum([numel for _, numel in each.params]) if each.own is None else each.own for each in fetched]
    names = tuple(dict.fromkeys([module.name for module in fetched if module.name]))
    inside = [(module,) if module.leaf else module.leaves for module in fetched]
    return Stretch(
        tag=tag,
        moves=_moves(calls, names),
        names=names,
        needs=tuple([(*param, index) for index, module in enumerate(fetched) for param in module.params]),
        counts=tuple(counts),
        spans=tuple([own if each.spans is None else each.spans for each, own in zip(fetched, counts, strict=True)]),
        leaves=tuple([(leaf, index) for index, leaves in enumerate(inside) for leaf in leaves]),
    )


def _moves(calls: Sequence[Call], names: tuple[str, ...]) -> tuple[Move, ...]:
    # A layer turns round at the last fetch before something is released backwards. From there on its backward pass
    # counts, or from the first call where nothing is recomputed.
    kinds = [kind for kind, _ in calls]
    turn, start = kinds.index(RELEASE) - 1, 0
    if AGAIN in kinds:
        turn = start = len(kinds) - 1 - kinds[::-1].index(AGAIN)
    numbers = {name: number for number, name in enumerate(names)}
    moves: list[Move] = []
    holders: set[Module] = set()
    latest = EMPTY
    run = whose = 0
    for index, (kind, module) in enumerate(calls):
        if kind == RELEASE:
            if module.params or module in holders:
                moves.append((RELEASE, module, None, 1, UNCOUNTED, whose))
                run = 0
            continue
        if kind == FETCH:
            latest = module
        mark = TURN if index == turn else COUNTED if index >= start else RERUN if kind == AGAIN else UNCOUNTED
        if module.name:
            whose = numbers[module.name]
        if module.params:
            holder = latest if kind == AGAIN and module.frozen else None
            if holder is not None:
                holders.add(holder)
            moves.append((FETCH, module, holder, 1, mark, whose))
            run = 0
        elif run and moves[-1][4:] == (mark, whose):
            run += 1
            moves[-1] = (SKIP, module, None, run, mark, whose)
        else:
            run = 1
            moves.append((SKIP, module, None, run, mark, whose))
    return tuple(moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Which layers take part in what."""

    recompute: int  # the lowest so many layers run again before they run backwards
    lowest: int  # the lowest layer that runs backwards
    input_grad: bool  # a gradient flows out of the lowest layer, into the embedding
    wrappers: int = 0  # containers around the model: PEFT's own


FORWARD, HEAD, EMBEDDING, NORM = -1, -2, -3, -4
EMPTY = Module()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Compared by identity: what its layers call is worked out once."""

    root: Module
    """The model with its head; where it reads the head's weight itself (Mamba's `.to(lm_head.weight.dtype)`), that
    weight is whole until the end of the step."""
    embeddings: tuple[Module, ...]
    layers: tuple[Node, ...]
    norm: Module
    head: Module
    between: tuple[Module, ...] = (EMPTY,)  # called between embeddings and layers: rotary tables, a dropout
    body: Module = EMPTY  # the container of all but the head


def stretches(model: Model, passes: Passes) -> tuple[Stretch, ...]:
    """One training step as the coordinator sees it: forwards, then each layer again where it recomputes, backwards.
    Steps of one model that differ in their passes share the stretches that are alike."""
    forward, backward, recomputed = _layer_stretches(model)
    below, above, embedding = _ends(model, passes.wrappers)
    whole = [below, *forward, *above]
    for index in range(len(model.layers) - 1, passes.lowest - 1, -1):
        again = index < passes.recompute
        if index > passes.lowest or passes.input_grad:
            whole.append(recomputed[index] if again else backward[index])
        else:  # the lowest layer with a backward pass, where no gradient goes on from it
            back = _calls(model.layers[index], -1, without_input=True)
            whole.append(_stretch(index, _insert_recomputation(model.layers[index], back) if again else back))
    return (*whole, *embedding) if passes.input_grad else tuple(whole)


@lru_cache(maxsize=64)
def _ends(model: Model, wrappers: int) -> tuple[Stretch, list[Stretch], list[Stretch]]:
    """What is below the layers, above them (forwards, then backwards), and the embeddings backwards."""
    around: list[Call] = [*[(FETCH, EMPTY)] * wrappers, (FETCH, model.root)]
    above = [
        _stretch(FORWARD, _calls(model.norm)),
        _stretch(HEAD, [*_calls(model.head), (RELEASE, model.root)]),
        _stretch(HEAD, [*around, *_calls(model.head)]),
        _stretch(NORM, _calls((model.body, model.norm), -1)),
    ]
    below = _stretch(FORWARD, [*around, *_calls((model.body, *model.embeddings, *model.between))])
    return below, above, [_stretch(EMBEDDING, _calls(module)) for module in reversed(model.embeddings)]


@lru_cache(maxsize=64)
def _layer_stretches(model: Model) -> tuple[list[Stretch], list[Stretch], list[Stretch]]:
    """Every layer forwards, backwards, and backwards with itself run again first."""
    back = [_calls(layer, -1) for layer in model.layers]
    again = [_insert_recomputation(layer, calls) for layer, calls in zip(model.layers, back, strict=True)]
    return (
        [_stretch(FORWARD, _calls(layer)) for layer in model.layers],
        [_stretch(index, calls) for index, calls in enumerate(back)],
        [_stretch(index, calls) for index, calls in enumerate(again)],
    )


def _calls(node: Node, way: int = 1, *, without_input: bool = False) -> list[Call]:
    """`way`: 1 forwards, -1 backwards."""
    container, *children = (node,) if isinstance(node, Module) else node
    assert isinstance(container, Module)
    if without_input and container.frozen and container.reads_input:
        return []
    inside = [call for child in children[::way] for call in _calls(child, way, without_input=without_input)]
    return [(FETCH, container), *inside, (RELEASE, container)]


def _insert_recomputation(layer: Node, back: list[Call]) -> list[Call]:
    """The backward pass reaches the layer's last module, whose kept tensors are missing: the layer runs again, up
    to that module, and only then does the backward pass go on."""
    reached = next(index for index, (kind, _) in enumerate(back) if kind == RELEASE)
    again = [(AGAIN if kind == FETCH else kind, module) for kind, module in _calls(layer)]
    while again[-1][0] == RELEASE:
        again.pop()
    return [*back[:reached], *again, *back[reached:]]


# --- the replay ---------------------------------------------------------------------------------


Came = tuple[tuple[int, int], ...]
Log = tuple[tuple[int, int, int, int, Came], ...]
"""Of each call of a stretch: its mark (`UNCOUNTED`: a release), whose turn it was, the most that was whole in passing,
what was afterwards, and what came: all that is whole with it, and how much it is. Layers that are alike share one."""


class StretchReport(NamedTuple):
    """Whole elements in one stretch."""

    most: int
    rests: int  # after any call; `most` has what is there in passing as well
    turn: int  # when its layer turns round
    held: Called
    again: Called  # while its layer is run again


class Standing(NamedTuple):
    """What the coordinator has in hand between two stretches; with the calls to come, it decides all that follows."""

    live: int
    copies: int
    ahead: int  # how many of the parameters to come were looked at by the prefetcher
    available: frozenset[int]
    batches: frozenset[tuple[int, bool, int, frozenset[int]]]
    users: frozenset[tuple[int, Module]]
    held: frozenset[tuple[Module, tuple[Param, ...]]]


NOTHING = Standing(0, 0, 0, frozenset(), frozenset(), frozenset(), frozenset())


class Replay(NamedTuple):
    """One step, followed from its first call to its last."""

    whole: tuple[Stretch, ...]
    logs: list[Log]
    standings: dict[int, Standing]  # before the turn of each layer in the backward pass, by the number of the stretch
    starts: list[tuple[int, int]]  # of each stretch, and of the end: fetches and parameters to fetch before it
    counted: list[int]
    spanned: list[int]
    max_reuse: int


def summary(whole: tuple[Stretch, ...], logs: list[Log], parts_from_host: int = 0) -> Gathered:
    """`parts_from_host`: of so many parts of each parameter this rank's own comes from the host, and is there by itself
    until it has been copied into the buffer (`_all_gather_dtype`, `_all_gather_sequential`); 0: all are on GPUs."""
    known: dict[tuple[int, int], StretchReport] = {}
    reports = []
    for stretch, log in zip(whole, logs, strict=True):
        key = id(log), id(stretch.names)
        if key not in known:
            known[key] = _report(log, stretch.names, parts_from_host)
        reports.append(known[key])
    most: dict[int, int] = {}
    turns: dict[int, int] = {}
    called: dict[int, Called] = {}
    again: dict[int, Called] = {}
    for stretch, report in zip(whole, reports, strict=True):
        most[stretch.tag] = max(most.get(stretch.tag, 0), report.most)
        turns[stretch.tag] = report.turn
        called[stretch.tag], again[stretch.tag] = report.held, report.again
    n_layers = max((stretch.tag for stretch in whole), default=-1) + 1
    forward = [number for number, stretch in enumerate(whole) if stretch.tag == FORWARD]
    layers = [reports[number].held for number in forward[1:-1]]
    return Gathered(
        forward=most.get(FORWARD, 0),
        forwards=tuple(layers) if all([each.names for each in layers]) else (),
        loss=most.get(HEAD, 0),
        at_loss=max(
            [each.rests for stretch, each in zip(whole, reports, strict=True) if stretch.tag == HEAD], default=0
        ),
        norm_forward=reports[forward[-1]].most if forward else 0,
        norm=most.get(NORM, 0),
        layers=tuple([turns.get(index, 0) for index in range(n_layers)]),
        gradients=tuple([most.get(index, 0) for index in range(n_layers)]),
        called=tuple([called.get(index, NONE) for index in range(n_layers)]),
        again=tuple([again.get(index, NONE) for index in range(n_layers)]),
        embedding=most.get(EMBEDDING, 0),
    )


def replay(whole: tuple[Stretch, ...], limits: GatherLimits) -> Replay:
    coordinator = _Coordinator(whole, limits, NOTHING)
    logs: list[Log] = []
    standings: dict[int, Standing] = {}
    starts: list[tuple[int, int]] = [(0, 0)]
    for number, stretch in enumerate(whole):
        if stretch.tag >= 0:
            standings[number] = coordinator.standing(starts[-1][1])
        logs.append(_follow(stretch, coordinator))
        fetches, needs = starts[-1]
        starts.append((fetches + len(stretch.counts), needs + len(stretch.needs)))
    return Replay(whole, logs, standings, starts, coordinator.counted, coordinator.spanned, limits.max_reuse)


def replay_between(whole: tuple[Stretch, ...], limits: GatherLimits, first: Replay, last: Replay) -> list[Log]:
    """What `replay` would log of a step that begins as one that is known does, and ends as another."""
    differs = _count_alike(whole, first.whole)
    # the last stretch before which the coordinator has the same in hand as in the first step
    begin = next((number for number in range(differs, 0, -1) if _is_unseen(first, number, differs)), 0)
    ending = len(whole) - _count_alike(whole[::-1], last.whole[::-1])
    logs = first.logs[:begin]
    coordinator = _Coordinator(whole[begin:], limits, first.standings.get(begin, NOTHING))
    shift, needs = len(last.whole) - len(whole), 0
    for number in range(begin, len(whole)):
        if number >= ending and coordinator.standing(needs) == last.standings.get(number + shift):
            return [*logs, *last.logs[number + shift :]]
        logs.append(_follow(whole[number], coordinator))
        needs += len(whole[number].needs)
    return logs


def _count_alike(one: tuple[Stretch, ...], other: tuple[Stretch, ...]) -> int:
    """How many stretches two steps have in common where they begin."""
    return len(list(takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))))


def _is_unseen(known: Replay, number: int, differs: int) -> bool:
    """Nothing of the stretch `differs`, or later, has been looked at before the stretch `number` begins."""
    standing = known.standings.get(number)
    if standing is None:
        return False
    (step, looked), (fetches, needs) = known.starts[number], known.starts[differs]
    counts_apart = known.counted[fetches] - known.counted[step] >= known.max_reuse
    spans_apart = known.spanned[fetches] - known.spanned[step] >= known.max_reuse
    return looked + standing.ahead < needs and counts_apart and spans_apart


def count_settling_layers(none: Replay) -> int:
    """Of a step in which no layer recomputes: how many may, so that all is the same until the top layer's turn ends.
    -1: it is not known of any, since the lowest layer's turn was looked at by then."""
    turns = sorted(none.standings)
    return max([none.whole[each].tag + 1 for each in turns[1:] if _is_unseen(none, turns[1], each)], default=-1)


def _follow(stretch: Stretch, coordinator: _Coordinator) -> Log:
    log: list[tuple[int, int, int, int, Came]] = []
    for kind, module, holder, count, mark, whose in stretch.moves:
        if kind == RELEASE:
            coordinator.release(module)
            log.append((UNCOUNTED, whose, 0, coordinator.live + coordinator.copies, ()))
            continue
        passing, came = coordinator.skip(count) if kind == SKIP else coordinator.fetch(module, holder)
        if mark:
            log.append((mark, whose, passing, coordinator.live + coordinator.copies, came))
    made = tuple(log)
    return coordinator.logs.setdefault(made, made)


@lru_cache(maxsize=4096)
def _report(log: Log, names: tuple[str, ...], parts_from_host: int) -> StretchReport:
    most = stays = turn = 0
    held, again = ([[0, 0, 0] for _ in names or ("not told apart",)] for _ in range(2))
    reported = held
    for mark, whose, without, rests, came in log:
        if mark == UNCOUNTED:
            reported[whose][2] = rests
            continue
        passing = max([without, *[whole - (-numel // parts_from_host) for whole, numel in came if parts_from_host]])
        reported = again if mark == RERUN else held
        reported[whose][:] = map(max, reported[whose], (passing, rests, rests))
        if mark == RERUN:
            continue
        most, stays = max(most, passing), max(stays, rests)
        if mark == TURN:  # the last module of a layer that runs again is also where it turns round
            turn = rests
            again[whose][:] = map(max, again[whose], (passing, rests, rests))
    turns = ([(passing, rests, left) for passing, rests, left in each[: len(names)]] for each in (held, again))
    return StretchReport(most, stays, turn, *[_call(names, tuple(each)) for each in turns])


@lru_cache(maxsize=4096)
def _call(names: tuple[str, ...], held: tuple[Held, ...]) -> Called:
    """What is equal is one object, and told by its identity."""
    return Called(names, held)


@dataclass(slots=True, eq=False)
class _Batch:
    """Parameters that one prefetch gathered together."""

    numel: int
    waiting: int
    unpacked: bool = False


class _Coordinator:
    """`PartitionedParameterCoordinator` with a complete trace, reduced to its bookkeeping. Steps and the queue begin
    with the first of the stretches, which need not be a whole step's."""

    def __init__(self, whole: tuple[Stretch, ...], limits: GatherLimits, standing: Standing) -> None:
        self.prefetch, self.max_live, self.max_reuse = limits.prefetch, limits.max_live, limits.max_reuse
        self.flat, self.stays = limits.flat, limits.stays
        self.logs: dict[Log, Log] = {}
        self.step = 0
        self.queue: list[tuple[int, int, int]] = []
        """Identity, elements and step of everything that will be fetched."""
        self.uses: dict[int, list[int]] = {}
        """For each parameter the steps of its uses."""
        self.leaf_uses: dict[Module, list[int]] = {}
        """For each leaf, those at which it or a container of it is called."""
        steps = 0
        for stretch in whole:
            for identity, numel, fetches in stretch.needs:
                self.queue.append((identity, numel, steps + fetches))
                self.uses.setdefault(identity, []).append(steps + fetches)
            for leaf, fetches in stretch.leaves:
                self.leaf_uses.setdefault(leaf, []).append(steps + fetches)
            steps += len(stretch.counts)
        self.counted = list(accumulate(chain.from_iterable([stretch.counts for stretch in whole]), initial=0))
        """Elements that a search for a next use counts before each step."""
        self.spanned = self.counted
        """Likewise a search for a leaf's."""
        if self.leaf_uses:
            self.spanned = list(accumulate(chain.from_iterable([stretch.spans for stretch in whole]), initial=0))
        self.done = dict.fromkeys(self.uses, 0)
        """How many of these uses lie behind."""
        self.fetched_for = dict.fromkeys(self.uses, -1)
        """The step for which it was prefetched or fetched last."""
        self.live, self.copies, self.next_in_queue = standing.live, standing.copies, standing.ahead
        self.available: set[int] = set(standing.available)
        for identity, _, step in self.queue[: standing.ahead]:
            self.fetched_for[identity] = step
        self.batches: dict[int, _Batch] = {}
        for numel, unpacked, waiting, members in standing.batches:
            self.batches.update(dict.fromkeys(members, _Batch(numel, waiting, unpacked)))
        self.active: dict[int, set[Module]] = {}
        """The modules that are using a parameter right now, where there are any."""
        for identity, module in standing.users:
            self.active.setdefault(identity, set()).add(module)
        self.held: dict[Module, list[Param]] = {module: list(params) for module, params in standing.held}
        """Frozen parameters that a recomputation fetched: they stay for the module that asked for it, then go."""

    def standing(self, needs: int) -> Standing:
        """What is in hand now, where so many parameters of the queue lie behind."""
        batches: dict[_Batch, list[int]] = {}
        for identity, batch in self.batches.items():
            batches.setdefault(batch, []).append(identity)
        return Standing(
            live=self.live,
            copies=self.copies,
            ahead=self.next_in_queue - needs,
            available=frozenset(self.available),
            batches=frozenset(
                [(each.numel, each.unpacked, each.waiting, frozenset(members)) for each, members in batches.items()]
            ),
            users=frozenset([(identity, module) for identity, users in self.active.items() for module in users]),
            held=frozenset([(module, tuple(params)) for module, params in self.held.items()]),
        )

    def skip(self, count: int) -> tuple[int, Came]:
        """Modules that own nothing: each lets the prefetcher go on, no more."""
        queued, left = len(self.queue), count
        came: Came = ()
        while left and self.live < self.max_live and self.next_in_queue < queued and self.prefetch:
            before = self.live
            self._prefetch()
            if self.live > before:
                came += ((self.live + self.copies, self.live - before),)
            left -= 1
        self.step += count
        return self.live + self.copies, came  # prefetching only adds

    def fetch(self, module: Module, holder: Module | None) -> tuple[int, Came]:
        """Whole elements and copies of them, the most while this module's parameters arrive; and what came."""
        available, active, params = self.available, self.active, module.params
        fresh = together = 0
        started = self.live
        for identity, numel in params:
            users = active.setdefault(identity, set())
            users.add(module)
            self.done[identity] += 1
            if holder is not None:
                users.add(holder)
                self.held.setdefault(holder, []).append((identity, numel))
            if identity not in available:
                available.add(identity)
                self.live += numel
                fresh += 1
                together += numel
        if fresh < 2 or not self.flat:
            together = 0
        if self.batches:
            together = max(together, self._unpack(module))
        queue = self.queue
        while self.next_in_queue < len(queue) and queue[self.next_in_queue][2] <= self.step:
            # what the queue has for this step needs no prefetch any more
            self.fetched_for[queue[self.next_in_queue][0]] = self.step
            self.next_in_queue += 1
        fetched, whole = self.live, self.live + self.copies
        came: Came = ((whole, fetched - started),) if fetched > started else ()
        if fetched < self.max_live and self.next_in_queue < len(queue):
            self._prefetch()
            if self.live > fetched:
                came += ((self.live + self.copies, self.live - fetched),)
        self.step += 1
        return max(whole + together, self.live + self.copies), came

    def _unpack(self, module: Module) -> int:
        """Parameters that were gathered together are copied out of one buffer when the first of them is used; the
        buffer stays until the last of them is. Returns what it held in passing, beside what stays."""
        before, most = self.copies, self.copies
        for identity, _ in module.params:
            batch = self.batches.pop(identity, None)
            if batch is None:
                continue
            if not batch.unpacked:
                batch.unpacked = True
                self.copies += batch.numel
                most += batch.numel
            batch.waiting -= 1
            if batch.waiting == 0:
                self.copies -= batch.numel
        return max(most - self.copies, 0) if most > before else 0

    def _prefetch(self) -> None:
        room = min(self.max_live - self.live, self.prefetch)
        queue, index, available = self.queue, self.next_in_queue, self.available
        queued, taken = len(queue), 0
        members: list[int] = []
        while taken < room and index < queued:
            identity, numel, step = queue[index]
            index += 1
            self.fetched_for[identity] = step  # steps come in order
            if identity not in available:
                available.add(identity)
                taken += numel
                members.append(identity)
        self.next_in_queue = index
        self.live += taken
        if len(members) > 1 and self.flat:
            self.batches.update(dict.fromkeys(members, _Batch(taken, len(members))))

    def release(self, module: Module) -> None:
        held = self.held.pop(module, ()) if self.held else ()
        limit = self.counted[self.step] + self.max_reuse
        leaf_soon = False
        if module.leaf:
            leaf_uses = self.leaf_uses[module]
            later = bisect_left(leaf_uses, self.step)
            passed = self.spanned[self.step]
            leaf_soon = later < len(leaf_uses) and self.spanned[leaf_uses[later]] - passed < self.max_reuse
        for identity, numel in module.params:
            self._leave(identity, module)
            uses, done = self.uses[identity], self.done[identity]
            soon = leaf_soon if module.leaf else done < len(uses) and self.counted[uses[done]] < limit
            if not soon and self.fetched_for[identity] <= self.step:
                self._free(identity, numel)
        for identity, numel in held:
            self._leave(identity, module)
            self._free(identity, numel)

    def _leave(self, identity: int, module: Module) -> None:
        users = self.active.get(identity, set())
        users.discard(module)
        if not users:
            self.active.pop(identity, None)

    def _free(self, identity: int, numel: int) -> None:
        if numel > self.stays and identity in self.available and identity not in self.active:
            self.available.discard(identity)
            self.live -= numel


# --- what a search asks for --------------------------------------------------------------------


@lru_cache(maxsize=1024)
def gather(model: Model, passes: Passes, limits: GatherLimits, parts_from_host: int) -> Gathered:
    return summary(*_logs(model, passes, limits), parts_from_host)


@lru_cache(maxsize=512)
def _logs(model: Model, passes: Passes, limits: GatherLimits) -> tuple[tuple[Stretch, ...], list[Log]]:
    none, every = (replace(passes, recompute=depth, input_grad=True) for depth in (0, len(model.layers)))
    if passes in (none, every):
        return _replay(model, passes, limits)[:2]
    whole, first, last = stretches(model, passes), _replay(model, none, limits), _replay(model, every, limits)
    return whole, replay_between(whole, limits, first, last)


@lru_cache(maxsize=64)
def _replay(model: Model, passes: Passes, limits: GatherLimits) -> Replay:
    return replay(stretches(model, passes), limits)


class Settled(NamedTuple):
    """Whole elements at the loss, and when the top layer's backward pass begins, as long as no more than so many
    layers recompute."""

    loss: int
    top: int
    layers: int


@lru_cache(maxsize=64)
def settle(model: Model, passes: Passes, limits: GatherLimits) -> Settled:
    known, top = _replay(model, passes, limits), 0
    whole = gather(model, passes, limits, 0)
    if known.standings:
        called = whole.called[-1].held
        top = min([left for _, _, left in called]) if called else whole.layers[-1]
    return Settled(whole.at_loss, top, count_settling_layers(known))
