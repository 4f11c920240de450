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

Here a training step is written as the calls that the coordinator sees; `replay.py` follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    parts_from_host: int = 0
    """Of so many parts of each parameter this rank's own comes from the host, and is there by itself until it has been
    copied into the buffer (`_all_gather_dtype`, `_all_gather_sequential`); 0: all parts are on GPUs."""
    stays: int = 0  # parameters of at most so many elements are not released once they are whole


Held = tuple[int, int, int]
"""Whole elements in one module's turn: the most in passing during its call, while it runs, and when it has run."""


class Called(NamedTuple):
    """The turns of a layer's modules."""

    names: tuple[str, ...]
    held: tuple[Held, ...]


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
    norm_forward: int = 0
    """In the final norm's forward pass: the head may be there already, with the buffer it came in."""
    norm: int = 0  # in its backward pass
    embedding: int = 0


FETCH, AGAIN, RELEASE, SKIP = range(4)
"""AGAIN: a fetch while a layer is recomputed. SKIP: fetches of modules that own nothing, taken together."""
Call = tuple[int, Module]

UNCOUNTED, COUNTED, TURN, RERUN = range(4)
"""Whether what is held at a call goes into the report of its stretch; TURN: it is where its layer turns round. RERUN:
it is reported by itself, of a layer that runs again."""
Move = tuple[int, Module, "Module | None", int, int, int]
"""One call, or several of modules that own nothing: its kind; the module; who keeps what is frozen, of a fetch while a
layer is recomputed; how many calls; whether they count; and whose turn it is, by number."""
Need = tuple[int, int, int]
"""A parameter to come: its identity, its elements, and the fetches since its stretch began."""


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

    Steps of one model that differ in their passes share the stretches that are alike.
    """
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
