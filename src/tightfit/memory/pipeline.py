"""A pipeline as its GPUs hold it: the parts of the model, and the micro batches that each has begun and not finished.

Which layers a stage has, and in which order a GPU works, `stages.py` says. Here each stage is a `ModelShape` of its
own, so that all that prices a model prices a part of one; a tied head is a second copy of the embedding, on the highest
stage. GPUs that have like layers differ in what they have in hand: the lower one has more, so it is the one to price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from tightfit.inputs.flags import checkpointing_word
from tightfit.memory.stages import Direction, Pass, order_actions, split_layers
from tightfit.messages import Message
from tightfit.types import Levers, ModelShape, Tensor


class Waiting(NamedTuple):
    """Beside the micro batch at work."""

    begun: tuple[int, ...]  # of each of the GPU's stages, those that have passed forwards and not yet backwards
    travelling: int  # hidden states and gradients that were received ahead, or that were sent last


class Stage(NamedTuple):
    """One stage as it lies on a GPU."""

    number: int  # from the bottom of the model
    shape: ModelShape
    frozen: int  # of its layers, the lowest so many do not train
    row: tuple[int, int]  # GPUs of the row, and micro batches of a window
    layers: tuple[int, ...]  # of each stage of its GPU

    @property
    def waiting(self) -> tuple[Waiting, Waiting]:
        """In its forward turn, and in its backward turn; only bytes need it."""
        gpus, micro_batches = self.row
        at, place = divmod(self.number, gpus)
        return count_waiting(gpus, micro_batches, place, self.layers)[at]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineGpu:
    """One GPU of a pipeline."""

    place: int  # in the row
    alike: int  # GPUs of the row with like layers: those that follow it hold less
    stages: tuple[Stage, ...]  # bottom to top
    shape: ModelShape  # of all its stages
    frozen: int
    tied_numel: int  # of a copy of a tied embedding

    def count_recomputing(self, layers: int | None) -> int:
        """`layers`: of each stage; None: all."""
        counts = [stage.shape.n_layers for stage in self.stages]
        return sum(counts) if layers is None else sum(min(layers, count) for count in counts)

    def levers(self, levers: Levers) -> Levers:
        """The same as they are for this GPU's layers taken together."""
        depth = levers.checkpointing
        if depth.layers is not None:
            depth = replace(depth, layers=self.count_recomputing(depth.layers))
        return levers.change(frozen_layers=self.frozen, checkpointing=depth)


def lay_out(shape: ModelShape, levers: Levers) -> tuple[PipelineGpu, ...]:
    """The GPUs of a row that differ in their layers; of those that are alike the first, which holds most."""
    key = levers.pipeline_parallel, levers.stages_per_gpu, levers.accumulation
    adapts = levers.method != "full"
    return _lay_out(shape, split_layers(shape, levers), *key, 0 if adapts else levers.frozen_layers)


def count_depths(shape: ModelShape, levers: Levers) -> int:
    """How many layers can recompute: `layers:K` are the lowest K of the model, and in a pipeline those of each stage,
    since all wait for the slowest."""
    return shape.n_layers if levers.pipeline_parallel == 1 else max(map(len, split_layers(shape, levers)))


def find_depth_obstacle(shape: ModelShape, levers: Levers) -> Message | None:
    """Why so many layers of each stage cannot recompute; None: they can."""
    layers, depth = levers.checkpointing.layers, count_depths(shape, levers)
    if levers.pipeline_parallel == 1 or layers is None or layers <= depth:
        return None
    return Message("inputs.stage-recomputes-too-many", word=checkpointing_word(levers.checkpointing), depth=depth)


@lru_cache(maxsize=1024)
def _lay_out(
    shape: ModelShape, layers: tuple[range, ...], gpus: int, stages: int, micro_batches: int, frozen: int
) -> tuple[PipelineGpu, ...]:
    found: dict[tuple[tuple[ModelShape, int], ...], PipelineGpu] = {}
    for place in range(gpus):
        own = range(place, gpus * stages, gpus)
        parts = tuple(_part(shape, layers[at], frozen) for at in own)
        held = [len([layer for layer in layers[at] if layer < frozen]) for at in own]
        key = tuple(zip(parts, held, strict=True))
        if key in found:
            found[key] = replace(found[key], alike=found[key].alike + 1)
            continue
        counts = tuple(len(layers[at]) for at in own)
        tied = shape.before[0].numel if shape.tied and place in (0, gpus - 1) else 0
        made = [Stage(*each, (gpus, micro_batches), counts) for each in zip(own, parts, held, strict=True)]
        found[key] = PipelineGpu(place, 1, tuple(made), _join(parts), sum(held), tied)
    return tuple(found.values())


def _part(shape: ModelShape, layers: range, frozen: int) -> ModelShape:
    pattern = shape.pattern[layers.start : layers.stop]
    return _cut(shape, pattern, layers.start == 0, layers.stop == shape.n_layers, layers.start > frozen)


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


@lru_cache(maxsize=1024)
def count_waiting(
    gpus: int, micro_batches: int, place: int, layers: tuple[int, ...]
) -> tuple[tuple[Waiting, Waiting], ...]:
    """For each stage of the GPU at this place, in its forward turn and in its backward turn, when most of the `layers`
    that its stages have wait."""
    stages = len(layers)
    if stages == 1:
        ahead = Waiting((min(micro_batches, gpus - place) - 1,), (place > 0) + (place < gpus - 1))
        return ((ahead, ahead),)
    few = min(micro_batches, 3 * gpus + micro_batches % gpus)  # the middle of a step is always the same
    begun, sent, arriving = [0] * stages, set[Direction](), set[Pass]()
    most: list[dict[Direction, Waiting]] = [{} for _ in range(stages)]

    def weigh(waiting: Waiting) -> tuple[int, int]:
        return sum(map(mul, waiting.begun, layers)), waiting.travelling

    for action in order_actions(gpus, stages, few)[place]:
        this, stage = action.of, action.of.stage // gpus
        if action.what == "receive":
            arriving.add(this)
        elif action.what == "send":
            sent.add(this.direction)
        else:
            arriving.discard(this)
            begun[stage] -= this.direction == "backward"
            now, known = Waiting(tuple(begun), len(arriving) + len(sent)), most[stage].get(this.direction)
            if known is None or weigh(now) >= weigh(known):
                most[stage][this.direction] = now
            begun[stage] += this.direction == "forward"
    return tuple((each["forward"], each["backward"]) for each in most)
