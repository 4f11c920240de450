"""How many parameters ZeRO-3 holds whole at each moment: a replay of DeepSpeed's coordinator.

Under ZeRO-3 a module's parameters are gathered before it runs and released after. Two rules of
`partitioned_param_coordinator.py` make that far more than one module's worth from the second step on, when
the order of modules is known: every call of a module prefetches the parameters that come next, up to
`prefetch_bucket` at a time, as long as fewer than `max_live_parameters` are whole; and a parameter is not
released when it is used again within `max_reuse_distance` elements. Modules are called far more often than
there are buckets to fetch, so the prefetcher usually runs ahead until the limit on live parameters stops it,
and overshoots by the tensor that crossed it. Several parameters fetched in one call travel in one flat buffer
and are then copied out one by one; the buffer goes when the last of them has been used. Counting one layer
instead, as the folklore does, is off by gigabytes in both directions: a large embedding alone may exceed the
limit.

The replay follows the coordinator call by call, one step of a complete trace. It depends on the model and
the thresholds alone, so it is done once for a model and remembered.
"""

from __future__ import annotations

from typing import NamedTuple

Param = tuple[int, int]
"""(identity, elements)"""


class Module(NamedTuple):
    """One call site of a module: the parameters that it owns directly; persistent ones left out."""

    params: tuple[Param, ...] = ()


class Limits(NamedTuple):
    prefetch: int
    max_live: int
    max_reuse: int


class Gathered(NamedTuple):
    """Whole elements, the most at any call of each stretch of the step."""

    forward: int
    loss: int
    layers: tuple[int, ...]
    """For each layer, bottom to top: while it recomputes and runs backwards."""
    embedding: int


class Layer(NamedTuple):
    """One layer's calls. In a backward pass a container's hook comes before those of its children."""

    forward: tuple[Module, ...]
    backward: tuple[Module, ...]
    lead: int
    """How many of the backward calls come before the first kept tensor is asked for, and so before recomputing."""
    frozen: tuple[Module, ...] = ()
    """Recomputing hands its frozen parameters to the module that asked; they all go when that one is done."""


class Stretch(NamedTuple):
    """Calls in order. A tag groups them for the report."""

    tag: int
    modules: tuple[Module, ...]
    drops: tuple[Module, ...] = ()
    """Released before the first of these calls, whatever the rules say."""
    holds: bool = False
    """Nothing is released until the end of the next stretch: these modules are still at work."""


FORWARD, HEAD, EMBEDDING = -1, -2, -3
EMPTY = Module()


def stretches(
    ends: tuple[Module, Module, Module], layers: tuple[Layer, ...], recompute: tuple[bool, ...], containers: int
) -> list[Stretch]:
    """One training step as the coordinator sees it, with embedding, final norm and head as its ends.

    `containers`: modules around the layers and the head.
    """
    around = (EMPTY,) * containers
    embedding, norm, head = ends
    calls = [Stretch(FORWARD, (*around, EMPTY, embedding, EMPTY))]
    calls += [Stretch(FORWARD, layer.forward) for layer in layers]
    calls += [Stretch(FORWARD, (norm,)), Stretch(HEAD, (head, *around, head, EMPTY, norm))]
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        if recompute[index]:
            calls += [Stretch(index, layer.backward[: layer.lead], holds=True), Stretch(index, layer.forward)]
            calls.append(Stretch(index, layer.backward[layer.lead :], layer.frozen))
        else:
            calls.append(Stretch(index, layer.backward))
    # frozen weights without checkpointing: nothing asks the embedding for a gradient
    asks = not (layers and layers[0].frozen) or recompute[0]
    return [*calls, Stretch(EMBEDDING, (embedding,))] if asks else calls


def replay(calls: list[Stretch], limits: Limits) -> Gathered:
    order = [module for stretch in calls for module in stretch.modules]
    coordinator = _Coordinator(order, limits)
    most: dict[int, int] = {}
    held: tuple[Module, ...] = ()
    for stretch in calls:
        coordinator.drop(stretch.drops)
        for module in stretch.modules:
            coordinator.fetch(module)
            most[stretch.tag] = max(most.get(stretch.tag, 0), coordinator.live + coordinator.flat)
            if not (stretch.holds or module in held):
                coordinator.release(module)
        for module in held:
            coordinator.release(module)
        held = tuple(module for module in stretch.modules if module.params) if stretch.holds else ()
    n_layers = max((stretch.tag for stretch in calls), default=-1) + 1
    return Gathered(
        forward=most.get(FORWARD, 0),
        loss=most.get(HEAD, 0),
        layers=tuple(most.get(index, 0) for index in range(n_layers)),
        embedding=most.get(EMBEDDING, 0),
    )


class _Group:
    """Parameters that share one flat buffer."""

    __slots__ = ("copied", "numel", "waiting")

    def __init__(self, numel: int, waiting: int) -> None:
        self.numel = numel
        self.waiting = waiting
        self.copied = False


class _Coordinator:
    """`PartitionedParameterCoordinator` with a complete trace, reduced to its bookkeeping."""

    def __init__(self, order: list[Module], limits: Limits) -> None:
        self.limits = limits
        self.step = 0
        self.live = 0
        self.flat = 0
        """Elements of flat buffers that have been copied out but are still referenced."""
        self.group_of: dict[int, _Group] = {}
        self.available: set[int] = set()
        self.queue = [(param, step) for step, module in enumerate(order) for param in module.params]
        self.next_in_queue = 0
        self.fetched_for: dict[int, int] = {}
        self.traversed = [0]
        self.uses: dict[int, list[int]] = {}
        for step, module in enumerate(order):
            self.traversed.append(self.traversed[-1] + sum(numel for _, numel in module.params))
            for identity, _ in module.params:
                self.uses.setdefault(identity, []).append(step)
        self.use_cursor = dict.fromkeys(self.uses, 0)

    def fetch(self, module: Module) -> None:
        self._gather([param for param in module.params if param[0] not in self.available])
        self._wait(module)
        while self.next_in_queue < len(self.queue) and self.queue[self.next_in_queue][1] <= self.step:
            (identity, _), step = self.queue[self.next_in_queue]
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            self.next_in_queue += 1
        self._prefetch()
        self.step += 1

    def _gather(self, params: list[Param]) -> None:
        for identity, numel in params:
            self.available.add(identity)
            self.live += numel
        if len(params) > 1:
            group = _Group(sum(numel for _, numel in params), len(params))
            self.group_of.update((identity, group) for identity, _ in params)

    def _wait(self, module: Module) -> None:
        """The first wait on a flat buffer copies all of its parameters out; the last one lets it go."""
        groups = [self.group_of.pop(identity) for identity, _ in module.params if identity in self.group_of]
        for group in groups:
            if not group.copied:
                group.copied = True
                self.flat += group.numel
        for group in groups:
            group.waiting -= 1
            if group.waiting == 0:
                self.flat -= group.numel

    def _prefetch(self) -> None:
        room = min(self.limits.max_live - self.live, self.limits.prefetch)
        taken: list[Param] = []
        numel_taken = 0
        while numel_taken < room and self.next_in_queue < len(self.queue):
            (identity, numel), step = self.queue[self.next_in_queue]
            self.next_in_queue += 1
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            if identity not in self.available and all(identity != other for other, _ in taken):
                taken.append((identity, numel))
                numel_taken += numel
        self._gather(taken)

    def release(self, module: Module) -> None:
        for identity, numel in module.params:
            if self.fetched_for.get(identity, -1) > self.step or self._reused_soon(identity):
                continue
            if identity in self.available:
                self.available.discard(identity)
                self.live -= numel

    def drop(self, modules: tuple[Module, ...]) -> None:
        for module in modules:
            for identity, numel in module.params:
                if identity in self.available and identity not in self.group_of:
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
