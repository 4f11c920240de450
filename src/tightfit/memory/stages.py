"""A pipeline: which layers each stage has, and in which order its GPUs work.

`gpus` GPUs stand in a row, with `per_gpu` stages each: GPU g has stages g, g + gpus, g + 2·gpus … Micro batches go up
through the stages, and their gradients down. With one stage per GPU each GPU runs one micro batch forward for one
backward as soon as it can (1F1B), so that it has no more of them in flight than there are GPUs from it to the end of
the row. With several stages per GPU (interleaved 1F1B) a GPU idles less and has more in flight.

The worker runs what is decided here, and its memory and its pace are counted from the same lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from tightfit.types import Levers, ModelShape

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
    """The layers of each stage, bottom to top. The embedding and the head count as a layer each."""
    stages, layers = levers.pipeline_parallel * levers.stages_per_gpu, shape.n_layers
    ends = [max(0, round((number + 1) * (layers + 2) / stages) - 1) for number in range(stages)]
    starts = [0]
    for number, end in enumerate(ends[:-1]):  # at least a layer for each stage, also for those that come
        starts.append(min(max(end, starts[-1] + 1), layers - (stages - 1 - number)))
    return tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], layers], strict=True))


def find_fullest(levers: Levers) -> int:
    """The GPU of the row that needs most memory. The first has the embedding, and most micro batches in flight."""
    return 0


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
