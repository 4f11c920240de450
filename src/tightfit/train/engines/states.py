"""An optimizer's states as ranges of parameters, whichever way an engine holds them.

A checkpoint knows parameters by name and their elements by number. What this rank holds of the fp32 copies and of each
moment is handed out as such ranges, to be read or, with `write`, to be written into. One at a time: a range may be
unpacked, or fetched from NVMe, for as long as the caller looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tightfit.train.eight_bit import BLOCK, Which, read_8bit, write_8bit
from tightfit.train.shards import Shard
from tightfit.types import Optimizer

MASTER = "master"
"""The kind of the fp32 copies of weights; moments are called as torch's optimizers call them."""
PIECE = BLOCK * 2**16
"""Elements of an 8-bit state that are unpacked at a time."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""For each kind the parameters that have such a state, by path, and its shape; the same on every rank."""


@dataclass(frozen=True, slots=True)
class State:
    kind: str
    path: str
    """Of the parameter."""
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    """Flat: elements [start, start + its own number)."""
    alike: bool
    """Every rank holds the same range: one of them writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """fp16's loss scale."""

    value: float
    good_steps: int
    """Since the last overflow."""
    hysteresis: int | None
    """Overflows that are left before the scale falls, where an engine counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    optimizer_steps: int
    """Those that were skipped do not count."""
    scale: LossScale | None


def moments(optimizer: Optimizer) -> tuple[str, ...]:
    """What is kept of each element."""
    if optimizer == "sgd":
        return ()
    return ("exp_avg_sq",) if optimizer == "adafactor" else ("exp_avg", "exp_avg_sq")


def elementwise(trainable: Iterable[Shard], kinds: Iterable[str]) -> Shapes:
    whole = {shard.path: shard.shape for shard in trainable}
    return dict.fromkeys(kinds, whole)


def own_shapes(states: Iterable[State]) -> Shapes:
    """Of states that every rank has whole."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for state in states:
        found.setdefault(state.kind, {})[state.path] = state.shape
    return found


def per_parameter(
    trainable: Iterable[Shard], states: Mapping[Any, Any], copies: Mapping[int, Tensor], *, write: bool
) -> Iterator[State]:
    """Of an optimizer that works on the parameters, on this rank's parts of them, or on fp32 copies of whole ones.

    `copies`: those, by the id of the parameter.
    """
    for shard in trainable:
        worked_on = copies.get(id(shard.parameter), shard.parameter)
        if worked_on is not shard.parameter:
            yield State(MASTER, shard.path, shard.shape, 0, worked_on.detach().view(-1), alike=True)
        held = states.get(worked_on, {})
        if "state1" in held:
            yield from _eight_bit(shard, held, write=write)
            continue
        for kind, tensor in held.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                continue  # a counter
            local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
            flat = local.detach().reshape(-1)
            if shard.cut or tuple(local.shape) == shard.shape:
                yield State(kind, shard.path, shard.shape, shard.start, flat, alike=not shard.cut)
            else:  # adafactor's rows and columns
                yield State(kind, shard.path, tuple(local.shape), 0, flat, alike=True)


def _eight_bit(shard: Shard, held: Mapping[str, Any], *, write: bool) -> Iterator[State]:
    numbers: tuple[tuple[str, Which], ...] = (("exp_avg", 1), ("exp_avg_sq", 2))
    for kind, which in numbers:
        for begin in range(0, shard.size, PIECE):
            values = read_8bit(held, which, begin, min(begin + PIECE, shard.size))
            yield State(kind, shard.path, shard.shape, shard.start + begin, values, alike=not shard.cut)
            if write:
                write_8bit(held, which, values, begin)
