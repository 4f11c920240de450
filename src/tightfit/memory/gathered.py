"""How many parameters ZeRO-3 holds whole at each moment: a replay of DeepSpeed's coordinator.

Under ZeRO-3 a module's parameters are gathered before it runs and released after. Two rules of
`partitioned_param_coordinator.py` make that far more than one module's worth from the second step on, when
the order of modules is known: every call of a module prefetches the parameters that come next, up to
`prefetch_bucket` at a time, as long as fewer than `max_live_parameters` are whole; and a parameter is not
released when it is used again within `max_reuse_distance` elements. Modules are called far more often than
there are buckets to fetch, so the prefetcher usually runs ahead until the limit on live parameters stops it,
and overshoots by the tensor that crossed it. Counting one layer instead, as the folklore does, is off by
gigabytes in both directions: a large embedding alone may exceed the limit.

The replay follows the coordinator call by call, one step of a complete trace. It depends on the model and
the thresholds alone, so it is done once for a model and remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

Param = tuple[int, int]
"""(identity, elements)"""


@dataclass(frozen=True, slots=True)
class Module:
    """One call site of a module: the parameters that it owns directly; persistent ones left out."""

    params: tuple[Param, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    prefetch: int
    max_live: int
    max_reuse: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole elements, the most at any call of each stretch of the step."""

    forward: int
    loss: int
    layers: tuple[int, ...]
    """For each layer, bottom to top: while it recomputes and runs backwards."""
    embedding: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Calls in order: (module, is it a forward call). A tag groups them for the report."""

    tag: int
    modules: tuple[Module, ...]
    forward: bool


FORWARD, HEAD, EMBEDDING = -1, -2, -3
EMPTY = Module()


def stretches(
    embedding: Module, layers: tuple[tuple[Module, ...], ...], head: tuple[Module, ...], recompute: tuple[bool, ...]
) -> list[Stretch]:
    """One training step as the coordinator sees it: forwards, then each layer again where it recomputes, backwards."""
    calls = [Stretch(FORWARD, (EMPTY, EMPTY, embedding), True)]
    calls += [Stretch(FORWARD, layer, True) for layer in layers]
    calls += [Stretch(HEAD, head, True), Stretch(HEAD, (EMPTY, *head[::-1]), False)]
    for index in range(len(layers) - 1, -1, -1):
        if recompute[index]:
            calls.append(Stretch(index, layers[index], True))
        calls.append(Stretch(index, layers[index][::-1], False))
    return [*calls, Stretch(EMBEDDING, (embedding,), False)]


def replay(calls: list[Stretch], limits: Limits) -> Gathered:
    order = [module for stretch in calls for module in stretch.modules]
    coordinator = _Coordinator(order, limits)
    most: dict[int, int] = {}
    for stretch in calls:
        for module in stretch.modules:
            coordinator.fetch(module)
            most[stretch.tag] = max(most.get(stretch.tag, 0), coordinator.live)
            coordinator.release(module)
    n_layers = max((stretch.tag for stretch in calls), default=-1) + 1
    return Gathered(
        forward=most.get(FORWARD, 0),
        loss=most.get(HEAD, 0),
        layers=tuple(most.get(index, 0) for index in range(n_layers)),
        embedding=most.get(EMBEDDING, 0),
    )


class _Coordinator:
    """`PartitionedParameterCoordinator` with a complete trace, reduced to its bookkeeping."""

    def __init__(self, order: list[Module], limits: Limits) -> None:
        self.limits = limits
        self.step = 0
        self.live = 0
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
        for identity, numel in module.params:
            if identity not in self.available:
                self.available.add(identity)
                self.live += numel
        while self.next_in_queue < len(self.queue) and self.queue[self.next_in_queue][1] <= self.step:
            (identity, _), step = self.queue[self.next_in_queue]
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            self.next_in_queue += 1
        self._prefetch()
        self.step += 1

    def _prefetch(self) -> None:
        room = min(self.limits.max_live - self.live, self.limits.prefetch)
        taken = 0
        while taken < room and self.next_in_queue < len(self.queue):
            (identity, numel), step = self.queue[self.next_in_queue]
            self.next_in_queue += 1
            self.fetched_for[identity] = max(step, self.fetched_for.get(identity, -1))
            if identity not in self.available:
                self.available.add(identity)
                taken += numel
        self.live += taken

    def release(self, module: Module) -> None:
        for identity, numel in module.params:
            if self.fetched_for.get(identity, -1) > self.step or self._reused_soon(identity):
                continue
            if identity in self.available:
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
