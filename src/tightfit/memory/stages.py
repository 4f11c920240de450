"""A pipeline: which layers each stage has, and in which order its GPUs work.

`gpus` GPUs stand in a row, with `per_gpu` stages each: GPU g has stages g, g + gpus, g + 2·gpus … Micro batches go up
through the stages, and their gradients down. With one stage per GPU each GPU runs one micro batch forward for one
backward as soon as it can (1F1B), so that it has no more of them in flight than there are GPUs from it to the end of
the row. With several stages per GPU (interleaved 1F1B) a GPU idles less and has more in flight.

The worker runs what is decided here, and its memory and its pace are counted from the same lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from tightfit.memory.weights import is_linear
from tightfit.types import Attention, Block, Levers, ModelShape, Moe

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro batch through a stage."""

    direction: Direction
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Action:
    """What a GPU does next: run a pass, send what came out of it, or make ready to receive what it needs."""

    what: Literal["run", "send", "receive"]
    of: Pass  # the one that runs, that made what is sent, or that will read what is received
    peer: int | None = None  # the other GPU


def split_layers(shape: ModelShape, levers: Levers) -> tuple[range, ...]:
    """The layers of each stage, bottom to top, as the levers say. Where they do not: so that the slowest stage, head
    and loss included, has as little arithmetic as can be; beyond that evenly, and rather fewer below, where more micro
    batches are held. What recomputes is left out: that split is the same at every depth of checkpointing."""
    adapts = levers.method != "full"
    frozen = 0 if adapts else levers.frozen_layers
    counts = levers.layer_counts
    if not counts:
        counts = _split(shape, levers.pipeline_parallel * levers.stages_per_gpu, levers.sequence, frozen, adapts)
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))


@lru_cache(maxsize=256)
def _split(shape: ModelShape, stages: int, sequence: int, frozen: int, adapts: bool) -> tuple[int, ...]:
    each = [_multiplications(block, sequence) for block in shape.blocks]
    times = 2 if adapts else 3  # forwards, for what came in, and for the weights
    costs = [each[kind] * (1 if index < frozen else times) for index, kind in enumerate(shape.pattern)]
    head = shape.vocab_size * shape.hidden_size * times
    assert stages <= len(costs), "more stages than layers"
    sums = list(accumulate(costs, initial=0))
    # What the slowest stage has is some run of layers, with the head or without it.
    ends = [(low, high) for low in range(len(costs)) for high in range(low + 1, len(sums))]
    tried = sorted({sums[high] - sums[low] for low, high in ends} | {sums[-1] - sums[low] + head for low, _ in ends})
    most = tried[bisect_left(tried, True, key=lambda each: _is_enough(costs, stages, head, each))]
    counts: list[int] = []
    left = len(costs)
    for below in range(stages - 1, -1, -1):  # from the top, each about as much as those below it
        taken, end = 0 if counts else head, left
        fair = (sums[left] + taken) / (below + 1)
        while left > below and (
            left == end or taken + costs[left - 1] / 2 <= fair or not _is_enough(costs[:left], below, 0, most)
        ):
            taken, left = taken + costs[left - 1], left - 1
        counts.append(end - left)
    return tuple(reversed(counts))


def _is_enough(costs: Sequence[int], stages: int, head: int, most: int) -> bool:
    """Whether stages of no more than this, each of at least one layer, have room for all."""
    left = len(costs)
    for below in range(stages - 1, -1, -1):
        taken, end = head if below == stages - 1 else 0, left
        while left > below and (left == end or taken + costs[left - 1] <= most):
            taken, left = taken + costs[left - 1], left - 1
        if taken > most:
            return False
    return not left


def _multiplications(block: Block, sequence: int) -> int:
    """Of one token in a forward pass."""
    total = 0
    for tensor in block.tensors:
        if is_linear(tensor):
            total += tensor.numel
        elif isinstance(block.mlp, Moe) and len(tensor.shape) == 3:
            total += tensor.numel * block.mlp.top_k // block.mlp.experts
    if isinstance(block.mixer, Attention):
        keys = min(sequence // 2, block.mixer.sliding_window or sequence)  # of causal attention half, on average
        total += 2 * block.mixer.heads * block.mixer.head_dim * keys
    return total


def deal_rounds(gpus: int, micro_batches: int) -> list[range]:
    """The micro batches that a GPU with several stages takes through one of them before it turns to the next: as many
    as there are GPUs, or a few more."""
    count = max(1, micro_batches // gpus)
    ends = [round(number * micro_batches / count) for number in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def order_passes(gpu: int, gpus: int, per_gpu: int, micro_batches: int) -> Iterator[Pass]:
    """What a GPU computes for a window, one after another."""
    rounds = deal_rounds(gpus, micro_batches)
    up = [(chunk, number) for each in rounds for chunk in range(per_gpu) for number in each]
    down = [(chunk, number) for each in rounds for chunk in reversed(range(per_gpu)) for number in each]
    ahead = gpus - 1 - gpu
    if per_gpu > 1:
        ahead = (per_gpu - 1) * max(map(len, rounds)) + 2 * ahead
    ahead = min(ahead, len(up))
    for at in range(len(up) + ahead):
        if at < len(up):
            yield Pass("forward", up[at][0] * gpus + gpu, up[at][1])
        if at >= ahead:
            yield Pass("backward", down[at - ahead][0] * gpus + gpu, down[at - ahead][1])


def order_forward_passes(gpu: int, gpus: int, per_gpu: int, micro_batches: int) -> Iterator[Pass]:
    """The same for an evaluation."""
    for each in deal_rounds(gpus, micro_batches):
        for chunk in range(per_gpu):
            for number in each:
                yield Pass("forward", chunk * gpus + gpu, number)


@lru_cache(maxsize=16)
def order_actions(
    gpus: int, per_gpu: int, micro_batches: int, *, backward: bool = True
) -> tuple[tuple[Action, ...], ...]:
    """What each GPU does for a window, or for an evaluation. Whoever sends and whoever receives come to it in the same
    order, or each would wait for the other: so the row is played through, a pass at a time on every GPU that has what
    it needs, and what a pass makes is sent, and made ready for, at that moment."""
    order = order_passes if backward else order_forward_passes
    waiting = [list(order(gpu, gpus, per_gpu, micro_batches)) for gpu in range(gpus)]
    actions: list[list[Action]] = [[] for _ in range(gpus)]
    done: set[Pass] = set()
    last = gpus * per_gpu - 1

    def find_source(of: Pass) -> Pass | None:
        if of.direction == "forward":
            return Pass("forward", of.stage - 1, of.micro_batch) if of.stage else None
        return Pass(*(("backward", of.stage + 1) if of.stage < last else ("forward", last)), of.micro_batch)

    while any(waiting):
        ready = [
            gpu
            for gpu, passes in enumerate(waiting)
            if passes and ((source := find_source(passes[0])) is None or source in done)
        ]
        if not ready:
            raise AssertionError(f"a pipeline of {gpus} GPUs, {per_gpu} stages each, stands still")
        made = {gpu: waiting[gpu].pop(0) for gpu in ready}
        for gpu, each in made.items():
            actions[gpu].append(Action("run", each))
            done.add(each)
        for gpu, each in made.items():
            stage = each.stage + (1 if each.direction == "forward" else -1)
            if 0 <= stage <= last:
                peer = stage % gpus
                actions[gpu].append(Action("send", each, peer))
                actions[peer].append(Action("receive", Pass(each.direction, stage, each.micro_batch), gpu))
    return tuple(map(tuple, actions))
