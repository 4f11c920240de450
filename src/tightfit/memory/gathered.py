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

The replay follows the coordinator call by call, one step of a complete trace. It depends on the model and
the thresholds alone, so it is done once for a model and remembered.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

Param = tuple[int, int]
"""(identity, elements)"""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One call site of a module: the parameters that it owns directly; persistent ones left out."""

    params: tuple[Param, ...] = ()
    frozen: bool = False
    reads_input: bool = False
    """It reads what enters the layer: without a gradient there, a frozen one is not called backwards."""
    own: int | None = None
    """Elements that a search for a next use counts in passing it; None: those of `params`."""
    spans: int | None = None
    """Likewise a search for a leaf's; None: as many as `own`."""
    leaves: tuple[Module, ...] = ()
    """The leaves inside it."""
    leaf: bool = False


Node: TypeAlias = "Module | tuple[Node, ...]"
"""A module, or a container (the first of the tuple) with what it calls, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    prefetch: int
    max_live: int
    max_reuse: int
    flat: bool = True
    """Parameters fetched together travel in one flat buffer; a single rank has nothing to gather, and none."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole elements, the most at any call of each stretch of the step."""

    forward: int
    loss: int
    layers: tuple[int, ...]
    """For each layer, bottom to top: when its backward pass proper begins, with all activations there."""
    gradients: tuple[int, ...]
    """For each layer: the most from then on, while its gradients come."""
    embedding: int


FETCH, AGAIN, RELEASE, SKIP = range(4)
"""AGAIN: a fetch while a layer is recomputed. SKIP: fetches of modules that own nothing, taken together."""
Call = tuple[int, Module]

UNCOUNTED, COUNTED, TURN = range(3)
"""Whether what is held at a call goes into the report of its stretch; TURN: it is where its layer turns round."""
Move = tuple[int, Module, "Module | None", int, int]
"""One call, or several of modules that own nothing: its kind; the module; who keeps what is frozen, of a fetch while a
layer is recomputed; how many calls; and whether they count."""
Need = tuple[int, int, int]
"""A parameter to come: its identity, its elements, and the fetches since its stretch began."""


class Script(NamedTuple):
    """A stretch without the calls that change nothing: most modules own nothing, and their releases are empty."""

    moves: tuple[Move, ...]
    needs: tuple[Need, ...]
    counts: tuple[int, ...]
    """For every fetch, the elements that a search for a next use counts in passing it."""
    spans: tuple[int, ...]
    """Likewise a search for a leaf's next use."""
    leaves: tuple[tuple[Module, int], ...]
    """Each leaf that a fetched module is or has inside, with the fetches before that."""


@dataclass(frozen=True)
class Stretch:
    """Calls in order. A tag groups them for the report."""

    tag: int
    calls: tuple[Call, ...]

    @cached_property
    def script(self) -> Script:
        fetched = [module for kind, module in self.calls if kind != RELEASE]
        counts = [_own(module) for module in fetched]
        return Script(
            moves=self._moves(),
            needs=tuple([(*param, index) for index, module in enumerate(fetched) for param in module.params]),
            counts=tuple(counts),
            spans=tuple([own if each.spans is None else each.spans for each, own in zip(fetched, counts, strict=True)]),
            leaves=tuple([(leaf, index) for index, module in enumerate(fetched) for leaf in _leaves_of(module)]),
        )

    def _moves(self) -> tuple[Move, ...]:
        turn, start = _turn(self.calls)
        moves: list[Move] = []
        holders: set[Module] = set()
        latest = EMPTY
        run = 0
        for index, (kind, module) in enumerate(self.calls):
            if kind == RELEASE:
                if module.params or module in holders:
                    moves.append((RELEASE, module, None, 1, UNCOUNTED))
                    run = 0
                continue
            if kind == FETCH:
                latest = module
            mark = TURN if index == turn else COUNTED if index >= start else UNCOUNTED
            if module.params:
                holder = latest if kind == AGAIN and module.frozen else None
                if holder is not None:
                    holders.add(holder)
                moves.append((FETCH, module, holder, 1, mark))
                run = 0
            elif run and moves[-1][4] == mark:
                run += 1
                moves[-1] = (SKIP, module, None, run, mark)
            else:
                run = 1
                moves.append((SKIP, module, None, run, mark))
        return tuple(moves)


def _own(module: Module) -> int:
    if module.own is not None:
        return module.own
    return sum([numel for _, numel in module.params]) if module.params else 0


def _leaves_of(module: Module) -> tuple[Module, ...]:
    return (module,) if module.leaf else module.leaves


def _turn(calls: tuple[Call, ...]) -> tuple[int, int]:
    """The call at which a layer turns round, the last fetch before something is released backwards; and the one
    from which on its backward pass counts: that, or the first where nothing is recomputed."""
    kinds = [kind for kind, _ in calls]
    if AGAIN in kinds:
        last = len(kinds) - 1 - kinds[::-1].index(AGAIN)
        return last, last
    return kinds.index(RELEASE) - 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Which layers take part in what."""

    recompute: int
    """The lowest so many layers run again before they run backwards."""
    lowest: int
    """The lowest layer that runs backwards."""
    input_grad: bool
    """A gradient flows out of the lowest layer, into the embedding."""
    wrappers: int = 0
    """Containers around the model: PEFT's own."""


FORWARD, HEAD, EMBEDDING = -1, -2, -3
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
    between: tuple[Module, ...] = (EMPTY,)
    """Called between embeddings and layers: rotary tables, a dropout."""
    body: Module = EMPTY
    """The container of all but the head."""


def stretches(model: Model, passes: Passes) -> list[Stretch]:
    """One training step as the coordinator sees it: forwards, then each layer again where it recomputes, backwards."""
    layers, around = model.layers, (*(((FETCH, EMPTY),) * passes.wrappers), (FETCH, model.root))
    whole = [Stretch(FORWARD, (*around, *_forwards((model.body, *model.embeddings, *model.between))))]
    forward, backward, recomputed = _layer_stretches(model)
    whole += forward
    whole += [Stretch(FORWARD, tuple(_forwards(model.norm)))]
    whole += [Stretch(HEAD, (*_forwards(model.head), (RELEASE, model.root)))]
    whole += [Stretch(HEAD, (*around, *_backwards(model.head), *_backwards((model.body, model.norm))))]
    for index in range(len(layers) - 1, passes.lowest - 1, -1):
        if index > passes.lowest or passes.input_grad:
            whole.append(recomputed[index] if index < passes.recompute else backward[index])
            continue
        back = tuple(_backwards(layers[index], without_input=True))
        whole.append(Stretch(index, _recomputed(layers[index], back) if index < passes.recompute else back))
    if not passes.input_grad:
        return whole
    return [*whole, *(Stretch(EMBEDDING, tuple(_backwards(module))) for module in reversed(model.embeddings))]


@lru_cache(maxsize=64)
def _layer_stretches(model: Model) -> tuple[list[Stretch], list[Stretch], list[Stretch]]:
    """Every layer forwards, backwards, and backwards with itself run again first."""
    forward = [Stretch(FORWARD, tuple(_forwards(layer))) for layer in model.layers]
    back = [tuple(_backwards(layer)) for layer in model.layers]
    backward = [Stretch(index, calls) for index, calls in enumerate(back)]
    recomputed = [
        Stretch(index, _recomputed(layer, calls))
        for index, (layer, calls) in enumerate(zip(model.layers, back, strict=True))
    ]
    return forward, backward, recomputed


def _forwards(node: Node) -> list[Call]:
    if isinstance(node, Module):
        return [(FETCH, node), (RELEASE, node)]
    container = node[0]
    assert isinstance(container, Module)
    calls: list[Call] = [(FETCH, container)]
    for child in node[1:]:
        calls += _forwards(child)
    calls.append((RELEASE, container))
    return calls


def _backwards(node: Node, *, without_input: bool = False) -> list[Call]:
    container, children = (node, ()) if isinstance(node, Module) else (node[0], node[1:])
    assert isinstance(container, Module)
    if without_input and container.frozen and container.reads_input:
        return []
    calls: list[Call] = [(FETCH, container)]
    for child in reversed(children):
        calls += _backwards(child, without_input=without_input)
    calls.append((RELEASE, container))
    return calls


def _recomputed(layer: Node, back: tuple[Call, ...]) -> tuple[Call, ...]:
    """The backward pass reaches the layer's last module, whose kept tensors are missing: the layer runs again, up
    to that module, and only then does the backward pass go on."""
    reached = next(index for index, (kind, _) in enumerate(back) if kind == RELEASE)
    again = [(AGAIN if kind == FETCH else kind, module) for kind, module in _forwards(layer)]
    while again[-1][0] == RELEASE:
        again.pop()
    return (*back[:reached], *again, *back[reached:])


def replay(whole: list[Stretch], limits: Limits) -> Gathered:
    coordinator = _Coordinator(whole, limits)
    most: dict[int, int] = {}
    turns: dict[int, int] = {}
    for stretch in whole:
        highest = 0
        for kind, module, holder, count, mark in stretch.script.moves:
            if kind == RELEASE:
                coordinator.release(module)
                continue
            held = coordinator.skip(count) if kind == SKIP else coordinator.fetch(module, holder)
            if mark:
                if held > highest:
                    highest = held
                if mark == TURN:
                    turns[stretch.tag] = held
        most[stretch.tag] = max(most.get(stretch.tag, 0), highest)
    n_layers = max((stretch.tag for stretch in whole), default=-1) + 1
    return Gathered(
        forward=most.get(FORWARD, 0),
        loss=most.get(HEAD, 0),
        layers=tuple(turns.get(index, 0) for index in range(n_layers)),
        gradients=tuple(most.get(index, 0) for index in range(n_layers)),
        embedding=most.get(EMBEDDING, 0),
    )


class _Batch:
    """Parameters that one prefetch gathered together."""

    __slots__ = ("numel", "unpacked", "waiting")

    def __init__(self, numel: int, waiting: int) -> None:
        self.numel, self.waiting = numel, waiting
        self.unpacked = False


class _Coordinator:
    """`PartitionedParameterCoordinator` with a complete trace, reduced to its bookkeeping."""

    __slots__ = (
        "active",
        "available",
        "batches",
        "copies",
        "counted",
        "done",
        "fetched_for",
        "flat",
        "held",
        "leaf_uses",
        "live",
        "max_live",
        "max_reuse",
        "next_in_queue",
        "prefetch",
        "queue",
        "spanned",
        "step",
        "uses",
    )

    def __init__(self, whole: list[Stretch], limits: Limits) -> None:
        self.prefetch, self.max_live, self.max_reuse = limits.prefetch, limits.max_live, limits.max_reuse
        self.flat = limits.flat
        self.step = self.live = self.copies = self.next_in_queue = 0
        self.batches: dict[int, _Batch] = {}
        self.available: set[int] = set()
        self.held: dict[Module, list[Param]] = {}
        """Frozen parameters that a recomputation fetched: they stay for the module that asked for it, then go."""
        self.queue: list[tuple[int, int, int]] = []
        """Identity, elements and step of everything that will be fetched."""
        self.uses: dict[int, list[int]] = {}
        """For each parameter the steps of its uses."""
        self.leaf_uses: dict[Module, list[int]] = {}
        """For each leaf, those at which it or a container of it is called."""
        steps = 0
        for stretch in whole:
            script = stretch.script
            for identity, numel, fetches in script.needs:
                self.queue.append((identity, numel, steps + fetches))
                if identity in self.uses:
                    self.uses[identity].append(steps + fetches)
                else:
                    self.uses[identity] = [steps + fetches]
            for leaf, fetches in script.leaves:
                self.leaf_uses.setdefault(leaf, []).append(steps + fetches)
            steps += len(script.counts)
        scripts = [stretch.script for stretch in whole]
        self.counted = list(accumulate(chain.from_iterable([script.counts for script in scripts]), initial=0))
        """Elements that a search for a next use counts before each step."""
        self.spanned = self.counted
        """Likewise a search for a leaf's."""
        if self.leaf_uses:
            self.spanned = list(accumulate(chain.from_iterable([script.spans for script in scripts]), initial=0))
        self.done = dict.fromkeys(self.uses, 0)
        """How many of these uses lie behind."""
        self.fetched_for = dict.fromkeys(self.uses, -1)
        """The step for which it was prefetched or fetched last."""
        self.active: dict[int, set[Module]] = {identity: set() for identity in self.uses}
        """The modules that are using a parameter right now."""

    def skip(self, count: int) -> int:
        """Modules that own nothing: each lets the prefetcher go on, no more."""
        queued = len(self.queue)
        left = count
        while left and self.live < self.max_live and self.next_in_queue < queued and self.prefetch:
            self._prefetch()
            left -= 1
        self.step += count
        return self.live + self.copies  # prefetching only adds

    def fetch(self, module: Module, holder: Module | None) -> int:
        """Whole elements and copies of them, the most while this module's parameters arrive."""
        available, params = self.available, module.params
        fresh = together = 0
        for identity, numel in params:
            users = self.active[identity]
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
        arriving = self.live + self.copies + together
        if self.live < self.max_live and self.next_in_queue < len(queue):
            self._prefetch()
        self.step += 1
        held = self.live + self.copies
        return held if held > arriving else arriving

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
        leaf_soon = module.leaf and self._leaf_soon(module)
        for identity, numel in module.params:
            self.active[identity].discard(module)
            uses, done = self.uses[identity], self.done[identity]
            soon = leaf_soon if module.leaf else done < len(uses) and self.counted[uses[done]] < limit
            if not soon and self.fetched_for[identity] <= self.step:
                self._free(identity, numel)
        for identity, numel in held:
            self.active[identity].discard(module)
            self._free(identity, numel)

    def _leaf_soon(self, leaf: Module) -> bool:
        uses = self.leaf_uses[leaf]
        later = bisect_left(uses, self.step)
        return later < len(uses) and self.spanned[uses[later]] - self.spanned[self.step] < self.max_reuse

    def _free(self, identity: int, numel: int) -> None:
        if identity in self.available and not self.active[identity]:
            self.available.discard(identity)
            self.live -= numel
