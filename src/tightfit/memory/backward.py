"""The worst moment of the backward pass, where activations, gradients and buckets meet.

Gradients arrive one parameter at a time, in the reverse order of the forward pass. What happens to one then
differs by engine: it stays (unsharded, ZeRO-1), or it is copied into a bucket that is reduced when the next
gradient would overflow it (ZeRO-2 and 3: `reduce_independent_p_g_buckets_and_remove_grads`); the reduction
makes a second copy of what the bucket holds (`allreduce_bucket` flattens, `reduce_scatter_coalesced`
concatenates), unless stage 2 finds that all of it belongs to one rank: flattening a single slice copies nothing.
So the peak is a matter of order, and it is found by following the order.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import Literal, NamedTuple, TypeAlias

from tightfit.memory.activations import Activations, Moment
from tightfit.memory.gathered import Called, Gathered, Held
from tightfit.memory.operations import FP64
from tightfit.memory.tape import Turn


class Peak(NamedTuple):
    """The parts of the worst moment."""

    activations: int
    recompute: int  # what the layer at work holds: its activations, recomputed or kept, and their gradients
    gradients: int
    buckets: int = 0
    gathered_weights: int = 0

    def components(self, shared: int) -> dict[str, int]:
        """With what is kept once for the model."""
        return self._asdict() | {"activations": self.activations + shared}


NOTHING = Peak(0, 0, 0)
_Arrival = tuple[int, int, int, int]
"""Of one gradient: elements, bytes, what is held beside it as it arrives, and in whose turn that is."""


@lru_cache(maxsize=1024)
def turns_of(modules: tuple[str, ...], called: Called, way: Literal["forward", "backward"]) -> tuple[Held, ...]:
    """What is whole in the turn of each of a layer's modules. Nothing: the layer's calls are not told apart."""
    if not called.names:
        return ()
    held, every = called.held, range(len(called.held))
    return tuple([reduce(_highest, [held[at] for at in told or every]) for told in _told(modules, called.names, way)])


@lru_cache(maxsize=256)
def _told(modules: tuple[str, ...], names: tuple[str, ...], way: str) -> tuple[tuple[int, ...], ...]:
    """Which of the calls tell of each module. It may be inside one that is called whole (a leaf). PEFT's wrapper is
    called before what it has inside, of which the layer's own matrix comes first in the forward pass and the upper
    adapter in the backward pass."""
    told: dict[str, list[int]] = {module: [] for module in modules}
    for at, name in enumerate(names):
        inside = [module for module in modules if module == name or module.startswith(f"{name}.")]
        if name.endswith("/"):
            inside = [name[:-1] if way == "forward" else f"{name}B"]
        for module in inside:
            told.setdefault(module, []).append(at)
    return tuple([tuple(told[module]) for module in modules])


def _highest(one: Held, other: Held) -> Held:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def fullest(turns: tuple[Turn, ...], whole: tuple[Held, ...], width: int) -> tuple[int, int]:
    """The worst of a layer's turns: what the layer holds, and of whole parameters, in bytes."""
    best, highest = (0, 0), 0
    for (called, runs, ran), (at_call, while_it_runs, after) in zip(turns, whole, strict=True):
        if called + at_call * width > highest:
            best, highest = (called, at_call * width), called + at_call * width
        if runs + while_it_runs * width > highest:
            best, highest = (runs, while_it_runs * width), runs + while_it_runs * width
        if ran + after * width > highest:
            best, highest = (ran, after * width), ran + after * width
    return best


def _working(moment: Moment, gathered: Gathered, width: int, known: _Known) -> tuple[int, int]:
    """Of a layer's turn in the backward pass. Many layers are alike, so what is found is `known` afterwards."""
    cost, called, again = moment.cost, gathered.called[moment.layer], gathered.again[moment.layer]
    if not called.names:
        return moment.working, gathered.layers[moment.layer] * width
    key = id(cost), moment.recomputes, id(called), id(again)
    if key not in known:
        known[key] = fullest(cost.turns[2], turns_of(cost.modules, called, "backward"), width)
        if moment.recomputes:  # the gradient of its output is there meanwhile
            stops = [
                (min(call, cost.recompute), min(most, cost.recompute), min(after, cost.recompute))
                for call, most, after in cost.turns[0]
            ]
            working, held = fullest(tuple(stops), turns_of(cost.modules, again, "forward"), width)
            known[key] = max(known[key], (working + cost.output, held), key=sum)
    return known[key]


_Known: TypeAlias = dict[tuple[int, bool, int, int], tuple[int, int]]


class Owners(NamedTuple):
    """Ranks own the flattened trainable weights in equal parts, in elements."""

    numel: int
    part: int

    def is_one(self, low: int, high: int) -> bool:
        """Do the elements from `low` up to `high` belong to one rank?"""
        return max(low, 0) // self.part == max(high - 1, 0) // self.part


@lru_cache(maxsize=256)
def peak_with_buckets(
    acts: Activations,
    bucket: int,
    tied_grad: int,
    embedding_grad: int,
    gathered: Gathered | None,
    leaving_parts: int = 0,
    owners: Owners | None = None,
) -> Peak:
    """Gradients leave through a bucket of `bucket` elements. The bucket itself is not counted, its copies are.

    A gradient that fills a bucket by itself is reduced in place by stage 3; stage 2 cuts it by owner first,
    and joining the pieces is a copy. `leaving_parts`: stage 3 with an offloaded optimizer brings each reduced
    part, one of so many of its parameter, back to the GPU and upcasts it for its norm. `owners`: stage 2's.
    """
    lone_copy = gathered is None
    start = place = owners.numel if owners else 0
    """Where the bucket's last element stands in the model, and the one that came last: gradients come backwards."""
    width = acts.setting.width
    fill = largest = oversized = 0
    """A gradient larger than the bucket waits by itself until the next one comes."""
    head = 0 if tied_grad else acts.head.head_grad
    fused = 0 if tied_grad else acts.head.fused_grad // width
    if fused <= bucket:  # the first to come; a larger one leaves by itself, when the final norm's comes
        fill = largest = fused
        place -= fused
    kinds: dict[int, tuple[list[_Arrival], int, int]] = {}
    """By the identity of a layer's cost, of which there are few kinds: its gradients, their elements, and the most."""
    best, highest = NOTHING, 0
    known: _Known = {}
    for moment in acts.moments:
        working, whole = (moment.working, 0) if gathered is None else _working(moment, gathered, width, known)
        total = moment.kept + working + tied_grad + oversized + whole
        if total > highest:
            highest, best = total, Peak(moment.kept, working, tied_grad + oversized, 0, whole)
        cost = moment.cost
        if id(cost) not in kinds:
            counts = [grad // width for grad, _ in cost.arrivals]
            whose = cost.arrives_in or (0,) * len(counts)
            arriving = zip(counts, cost.arrivals, whose, strict=True)
            coming = [(count, grad, live, module) for count, (grad, live), module in arriving]
            kinds[id(cost)] = coming, sum(counts), max(counts, default=0)
        coming, elements, most = kinds[id(cost)]
        if not head and fill + elements <= bucket:  # none of them overflows it
            fill += elements
            place -= elements
            largest = max(largest, most)
            continue
        turns = () if gathered is None else turns_of(cost.modules, gathered.called[moment.layer], "backward")
        whole = 0 if gathered is None else gathered.gradients[moment.layer] * width
        groups = [(moment.kept, turns, whole, coming)]
        if head:
            whole = 0 if gathered is None else gathered.loss * width
            groups, head = [(acts.kept, (), whole, [(head // width, head, 0, 0)]), *groups], 0
        for kept, turns_now, most_whole, each in groups:
            for count, grad, live, turn in each:
                whole_now = turns_now[turn][1] * width if turns_now else most_whole
                if fill + count > bucket:
                    copy = fill * width if lone_copy or not oversized else 0
                    if owners and owners.is_one(place, start):
                        copy = 0
                    start = place
                    if leaving_parts:
                        copy += _leaving(largest, leaving_parts, width)
                    total = kept + live + tied_grad + oversized + grad + copy + whole_now
                    if total > highest:
                        highest = total
                        best = Peak(kept, live, tied_grad + oversized + grad, copy, whole_now)
                    fill = largest = oversized = 0
                place -= count
                if count > largest:
                    largest = count
                if count > bucket:
                    oversized = grad
                fill += count
    if embedding_grad:
        whole = 0 if gathered is None else gathered.embedding
        lone = embedding_grad if lone_copy and embedding_grad > bucket * width else 0
        if owners and owners.is_one(0, embedding_grad // width):
            lone = 0
        pending = fill * width if lone_copy or not oversized else 0
        if owners and owners.is_one(place, start):
            pending = 0
        pending = max(pending, lone) + _leaving(largest, leaving_parts, width)
        copy = max(pending, _leaving(embedding_grad // width, leaving_parts, width))
        # a tied head's gradient is first added to it; only then does it go to the bucket
        joined = Peak(0, 0, tied_grad + oversized + embedding_grad, 0, whole * width)
        handed = Peak(0, 0, oversized + embedding_grad, copy, whole * width)
        best = max(best, joined, handed, key=sum)
    return best


NORM_ELEMENTS = 250_000_000  # `_constant_buffered_norm2` upcasts a gradient in pieces of this many elements, to fp64


def _leaving(numel: int, parts: int, width: int) -> int:
    part = -(-numel // parts) if parts else 0
    return FP64 * min(part, NORM_ELEMENTS) + width * part


@lru_cache(maxsize=256)
def peak_with_accumulation(acts: Activations, tied_grad: int, embedding_grad: int, already: int) -> Peak:
    """Gradients stay until the step. `already`: those of earlier micro batches, to which new ones are added."""
    best, highest = NOTHING, 0
    grads = tied_grad + (already or (0 if tied_grad else acts.head.head_grad))
    for moment in acts.moments:
        working = moment.working if already else moment.working_kept
        total = moment.kept + working + grads
        if total > highest:
            highest, best = total, Peak(moment.kept, working, grads)
        grads += 0 if already else moment.cost.weight_grads
    last = Peak(0, 0, grads + embedding_grad)
    return last if sum(last) > highest else best
