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

The replay follows the coordinator call by call, one step of a complete trace. It depends on the model and
the thresholds alone, so it is done once for a model and remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

Param = tuple[int, int]
"""(identity, elements)"""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One call site of a module: the parameters that it owns directly; persistent ones left out."""

    params: tuple[Param, ...] = ()
    frozen: bool = False
    reads_input: bool = False
    """It reads what enters the layer: without a gradient there, a frozen one is not called backwards."""


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


FETCH, AGAIN, RELEASE = range(3)
"""AGAIN: a fetch while a layer is recomputed."""
Call = tuple[int, Module]


@dataclass(frozen=True)
class Stretch:
    """Calls in order. A tag groups them for the report."""

    tag: int
    calls: tuple[Call, ...]

    @cached_property
    def turn(self) -> tuple[int, int]:
        """The call at which a layer turns round, the last fetch before something is released backwards; and the one
        from which on its backward pass counts: that, or the first where nothing is recomputed."""
        again = [index for index, (kind, _) in enumerate(self.calls) if kind == AGAIN]
        if again:
            return again[-1], again[-1]
        return next(index for index, (kind, _) in enumerate(self.calls) if kind == RELEASE) - 1, 0


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


def stretches(model: Model, passes: Passes) -> list[Stretch]:
    """One training step as the coordinator sees it: forwards, then each layer again where it recomputes, backwards."""
    layers, around = model.layers, (*(((FETCH, EMPTY),) * passes.wrappers), (FETCH, model.root))
    whole = [Stretch(FORWARD, (*around, *_forwards((EMPTY, *model.embeddings, EMPTY))))]
    forward, backward, recomputed = _layer_stretches(model)
    whole += forward
    whole += [Stretch(FORWARD, tuple(_forwards(model.norm)))]
    whole += [Stretch(HEAD, (*_forwards(model.head), (RELEASE, model.root)))]
    whole += [Stretch(HEAD, (*around, *_backwards(model.head), *_backwards((EMPTY, model.norm))))]
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


def _forwards(node: Node) -> Iterator[Call]:
    container, children = (node, ()) if isinstance(node, Module) else (node[0], node[1:])
    assert isinstance(container, Module)
    yield FETCH, container
    for child in children:
        yield from _forwards(child)
    yield RELEASE, container


def _backwards(node: Node, *, without_input: bool = False) -> Iterator[Call]:
    container, children = (node, ()) if isinstance(node, Module) else (node[0], node[1:])
    assert isinstance(container, Module)
    if without_input and container.frozen and container.reads_input:
        return
    yield FETCH, container
    for child in reversed(children):
        yield from _backwards(child, without_input=without_input)
    yield RELEASE, container


def _recomputed(layer: Node, back: tuple[Call, ...]) -> tuple[Call, ...]:
    """The backward pass reaches the layer's last module, whose kept tensors are missing: the layer runs again, up
    to that module, and only then does the backward pass go on."""
    reached = next(index for index, (kind, _) in enumerate(back) if kind == RELEASE)
    again = [(AGAIN if kind == FETCH else kind, module) for kind, module in _forwards(layer)]
    while again[-1][0] == RELEASE:
        again.pop()
    return (*back[:reached], *again, *back[reached:])


def replay(whole: list[Stretch], limits: Limits) -> Gathered:
    order = [module for stretch in whole for kind, module in stretch.calls if kind != RELEASE]
    coordinator = _Coordinator(order, limits)
    most: dict[int, int] = {}
    turns: dict[int, int] = {}
    for stretch in whole:
        turn, start = stretch.turn
        highest = 0
        for index, (kind, module) in enumerate(stretch.calls):
            if kind == RELEASE:
                if module.params or coordinator.held:
                    coordinator.release(module)
                continue
            held = coordinator.fetch(module, again=kind == AGAIN)
            if held > highest and index >= start:
                highest = held
            if index == turn:
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

    __slots__ = ("members", "numel", "unpacked", "waiting")

    def __init__(self) -> None:
        self.members: list[int] = []
        self.numel = self.waiting = 0
        self.unpacked = False


class _Coordinator:
    """`PartitionedParameterCoordinator` with a complete trace, reduced to its bookkeeping."""

    def __init__(self, order: list[Module], limits: Limits) -> None:
        self.limits = limits
        self.step = 0
        self.live = 0
        self.copies = 0
        self.batches: dict[int, _Batch] = {}
        self.available: set[int] = set()
        self.active: dict[int, set[Module]] = {}
        """The modules that are using a parameter right now."""
        self.latest = EMPTY
        """The last module that was fetched, recomputation apart."""
        self.held: dict[Module, list[Param]] = {}
        """Frozen parameters that a recomputation fetched: they stay for the module that asked for it, then go."""
        self.queue = [(param, step) for step, module in enumerate(order) for param in module.params]
        self.next_in_queue = 0
        self.fetched_for: dict[int, int] = {}
        self.traversed = [0]
        self.uses: dict[int, list[int]] = {}
        passed = 0
        for step, module in enumerate(order):
            for identity, numel in module.params:
                passed += numel
                self.uses.setdefault(identity, []).append(step)
            self.traversed.append(passed)
        self.use_cursor = dict.fromkeys(self.uses, 0)

    def fetch(self, module: Module, *, again: bool) -> int:
        """Whole elements and copies of them, the most while this module's parameters arrive."""
        if not again:
            self.latest = module
        if not module.params:
            queue = self.queue
            if self.next_in_queue < len(queue):
                if queue[self.next_in_queue][1] <= self.step:
                    self._catch_up()
                if self.live < self.limits.max_live:
                    self._prefetch()
            self.step += 1
            return self.live + self.copies  # prefetching only adds
        fresh = [numel for identity, numel in module.params if identity not in self.available]
        together = sum(fresh) if len(fresh) > 1 and self.limits.flat else 0
        for identity, numel in module.params:
            users = self.active.setdefault(identity, set())
            users.add(module)
            if again and module.frozen:
                users.add(self.latest)
                self.held.setdefault(self.latest, []).append((identity, numel))
            if identity not in self.available:
                self.available.add(identity)
                self.live += numel
        together = max(together, self._unpack(module))
        self._catch_up()
        arriving = self.live + self.copies + together
        self._prefetch()
        self.step += 1
        return max(arriving, self.live + self.copies)

    def _catch_up(self) -> None:
        """What the queue has for this step or an earlier one needs no prefetch any more."""
        while self.next_in_queue < len(self.queue) and self.queue[self.next_in_queue][1] <= self.step:
            (identity, _), step = self.queue[self.next_in_queue]
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            self.next_in_queue += 1

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
        room = min(self.limits.max_live - self.live, self.limits.prefetch)
        if room <= 0 or self.next_in_queue == len(self.queue):
            return
        taken = 0
        batch = _Batch()
        while taken < room and self.next_in_queue < len(self.queue):
            (identity, numel), step = self.queue[self.next_in_queue]
            self.next_in_queue += 1
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            if identity not in self.available:
                self.available.add(identity)
                taken += numel
                batch.members.append(identity)
        self.live += taken
        if len(batch.members) > 1 and self.limits.flat:
            batch.numel, batch.waiting = taken, len(batch.members)
            self.batches.update(dict.fromkeys(batch.members, batch))

    def release(self, module: Module) -> None:
        held = self.held.pop(module, ()) if self.held else ()
        for identity, numel in module.params:
            self.active[identity].discard(module)
            if self.fetched_for.get(identity, -1) <= self.step and not self._reused_soon(identity):
                self._free(identity, numel)
        for identity, numel in held:
            self.active[identity].discard(module)
            self._free(identity, numel)

    def _free(self, identity: int, numel: int) -> None:
        if identity in self.available and not self.active[identity]:
            self.available.discard(identity)
            self.live -= numel

    def _reused_soon(self, identity: int) -> bool:
        uses, cursor = self.uses[identity], self.use_cursor[identity]
        while cursor < len(uses) and uses[cursor] < self.step:
            cursor += 1
        self.use_cursor[identity] = cursor
        if cursor == len(uses):
            return False
        return self.traversed[uses[cursor]] - self.traversed[self.step] < self.limits.max_reuse
