"""The stages of a pipeline: which layers each has, and how many micro batches a GPU has begun and not yet finished.

A stage is a run of layers; the lowest has the embedding as well, the highest the final norm, the head and the loss.
With several stages on each GPU they go round: of 2 GPUs with 2 stages each the first has the stages 0 and 2. Each stage
is a `ModelShape` of its own, so that all that prices a model prices a part of one. A tied head is a second copy of the
embedding, on the highest stage.

The schedules are those of `torch.distributed.pipelining`. 1F1B (one stage on each GPU): the GPU at place `g` of `N`
begins with `N - g` forward passes, then takes backward and forward passes in turn. Interleaved 1F1B: the micro batches
go through a GPU's stages in rounds of about `N`; a GPU warms up with a round of all but its highest stage and two more
passes for each GPU behind it, then takes forward and backward passes in turn (`_get_warmup_ops`, `_get_1f1b_rank_ops`).
So the first GPU has most in hand, and of GPUs with like layers it is the fullest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from tightfit.memory.weights import is_linear
from tightfit.types import Attention, Block, Levers, ModelShape, Moe, Tensor

Turn = Literal["F", "B"]  # a forward or a backward pass


class Stage(NamedTuple):
    """One stage as it lies on a GPU."""

    number: int  # from the bottom of the model
    shape: ModelShape
    frozen: int  # of its layers, the lowest so many do not train
    waiting: tuple[tuple[int, ...], tuple[int, ...]]
    """In its forward turn, and in its backward turn: the micro batches that are begun and not finished, beside the one
    at work, of each of the GPU's stages."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineGpu:
    """One GPU of a pipeline."""

    place: int  # in the row
    alike: int  # GPUs of the row with like layers: those that follow it hold less
    stages: tuple[Stage, ...]  # bottom to top
    shape: ModelShape  # of all its stages
    frozen: int

    def count_recomputing(self, layers: int | None) -> int:
        """`layers`: of each stage; None: all."""
        counts = [stage.shape.n_layers for stage in self.stages]
        return sum(counts) if layers is None else sum(min(layers, count) for count in counts)

    def levers(self, levers: Levers) -> Levers:
        """The same as they are for this GPU's layers taken together."""
        depth = levers.checkpointing
        if depth.layers is not None:
            depth = replace(depth, layers=self.count_recomputing(depth.layers))
        return replace(levers, frozen_layers=self.frozen, checkpointing=depth)


def split_layers(shape: ModelShape, levers: Levers) -> tuple[int, ...]:
    """How many layers each stage has, bottom to top: so that the slowest stage, head and loss included, has as little
    arithmetic as can be; beyond that evenly, and rather fewer below, where more micro batches are held. What recomputes
    is left out: the split is the same at every depth of checkpointing."""
    adapts = levers.method != "full"
    frozen = 0 if adapts else levers.frozen_layers
    return _split(shape, levers.pipeline_parallel * levers.stages_per_gpu, levers.sequence, frozen, adapts)


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


def lay_out(shape: ModelShape, levers: Levers) -> tuple[PipelineGpu, ...]:
    """The GPUs of a row that differ in their layers; of those that are alike the first, which holds most."""
    key = levers.pipeline_parallel, levers.stages_per_gpu, levers.accumulation
    adapts = levers.method != "full"
    return _lay_out(shape, split_layers(shape, levers), *key, 0 if adapts else levers.frozen_layers)


@lru_cache(maxsize=256)
def _lay_out(
    shape: ModelShape, counts: tuple[int, ...], gpus: int, stages: int, micro_batches: int, frozen: int
) -> tuple[PipelineGpu, ...]:
    starts = list(accumulate(counts, initial=0))
    found: dict[tuple[ModelShape, ...], PipelineGpu] = {}
    for place in range(gpus):
        own = range(place, gpus * stages, gpus)
        parts = tuple(_part(shape, starts[at], starts[at + 1], frozen < starts[at]) for at in own)
        held = [min(max(frozen - starts[at], 0), counts[at]) for at in own]
        if parts in found:
            found[parts] = replace(found[parts], alike=found[parts].alike + 1)
            continue
        waiting = count_waiting(gpus, stages, micro_batches, place)
        made = [Stage(*each) for each in zip(own, parts, held, waiting, strict=True)]
        found[parts] = PipelineGpu(place, 1, tuple(made), _join(parts), sum(held))
    return tuple(found.values())


def _part(shape: ModelShape, start: int, stop: int, trains_below: bool) -> ModelShape:
    pattern = shape.pattern[start:stop]
    return _cut(shape, pattern, start == 0, stop == shape.n_layers, trains_below and start > 0)


@lru_cache(maxsize=1024)
def _cut(shape: ModelShape, pattern: tuple[int, ...], lowest: bool, highest: bool, receives: bool) -> ModelShape:
    """Parts that are alike are one object, by which caches know them."""
    tied = (Tensor("lm_head.weight", shape.before[0].shape),) if shape.tied and shape.before else ()
    kinds = sorted(set(pattern))
    return replace(
        shape,
        blocks=tuple(shape.blocks[kind] for kind in kinds),
        pattern=tuple(kinds.index(kind) for kind in pattern),
        before=shape.before if lowest else (),
        after=(*shape.after, *tied) if highest else (),
        tied=False,
        receives=receives,
        hands_on=not highest,
    )


@lru_cache(maxsize=1024)
def _join(parts: tuple[ModelShape, ...]) -> ModelShape:
    """What one GPU has of all its stages."""
    if len(parts) == 1:
        return parts[0]
    blocks = tuple(dict.fromkeys(block for part in parts for block in part.blocks))
    pattern = tuple(blocks.index(part.blocks[kind]) for part in parts for kind in part.pattern)
    last = parts[-1]
    return replace(parts[0], blocks=blocks, pattern=pattern, after=last.after, hands_on=last.hands_on)


# --- the schedules --------------------------------------------------------------------------------


def micro_batches_per_round(gpus: int, micro_batches: int) -> int | None:
    """Of the interleaved schedule; None: torch has none for so many micro batches."""
    rounds = max(1, micro_batches // gpus)
    return None if micro_batches % rounds else micro_batches // rounds


@lru_cache(maxsize=1024)
def count_waiting(
    gpus: int, stages: int, micro_batches: int, place: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """For each stage of the GPU at this place: see `Stage.waiting`, when most are."""
    begun = [0] * stages
    most: list[dict[Turn, tuple[int, ...]]] = [{} for _ in range(stages)]
    for turn, number, _ in order_of(gpus, stages, micro_batches, place):
        stage = number // gpus
        if turn == "B":
            begun[stage] -= 1
        if sum(begun) >= sum(most[stage].get(turn, ())):
            most[stage][turn] = tuple(begun)
        if turn == "F":
            begun[stage] += 1
    return tuple((each["F"], each["B"]) for each in most)


def order_of(gpus: int, stages: int, micro_batches: int, place: int) -> Iterator[tuple[Turn, int, int]]:
    """What the GPU at this place computes in a step, one after another: the pass, the stage by its number in the
    model, the micro batch. `stages`: of each GPU."""
    behind, passes = gpus - 1 - place, stages * micro_batches
    forward: list[Turn] = ["F"]
    backward: list[Turn] = ["B"]
    in_turn = backward + forward
    warm_up, per_round = min(micro_batches, behind + 1), micro_batches
    if stages > 1:
        in_turn = forward + backward
        per_round = micro_batches_per_round(gpus, micro_batches) or micro_batches
        warm_up = min((stages - 1) * per_round + 2 * behind, passes)
    done = {"F": [0] * stages, "B": [0] * stages}
    for turn in forward * warm_up + in_turn * (passes - warm_up) + backward * warm_up:
        counts = done[turn]
        at = sum(counts) // per_round % stages
        own = at if turn == "F" else stages - 1 - at
        yield turn, own * gpus + place, counts[own]
        counts[own] += 1
