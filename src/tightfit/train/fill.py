"""The values of every parameter, written straight into this rank's part of it.

Read in pieces, so that the host never holds more than one piece, and rounded to the working precision even where
the part rests in fp32: DeepSpeed makes its fp32 copies from 16-bit weights, so only a model that every engine rounds
is the same model on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from tightfit.train.shards import outline

PIECE_ELEMENTS = 1 << 24


class TensorSource(Protocol):
    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor: ...


Progress = Callable[[int, int], None]
"""Elements done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where values come from."""

    draws: TensorSource
    """From the seed: adapters, and everything where there are no weights."""
    weights: TensorSource | None
    rounding: torch.dtype

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        source = self.draws if self.weights is None or ".lora_" in name else self.weights
        return source.read(name, shape, start, stop)

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """For what cannot be read in pieces: a matrix that is quantised."""
        return self.read(name, shape, 0, prod(shape)).view(shape)


def fill(model: nn.Module, origin: Origin, rank: int, progress: Progress) -> None:
    """Every parameter that still waits for its values."""
    waiting = [shard for shard in outline(model, rank) if shard.parameter.dtype.is_floating_point]  # 4-bit ones have
    total, done = sum(shard.size for shard in waiting), 0
    with torch.no_grad():
        for shard in waiting:
            with shard.access(write=True) as target:
                for begin in range(0, target.numel(), PIECE_ELEMENTS):
                    end = min(begin + PIECE_ELEMENTS, target.numel())
                    values = origin.read(shard.name, shard.shape, shard.start + begin, shard.start + end)
                    target[begin:end].copy_(values.to(origin.rounding))
            done += shard.size
            progress(done, total)


def fill_buffers(model: nn.Module, weights: TensorSource) -> None:
    """Buffers that the checkpoint holds: a router's correction, say, is learnt, and no build can compute it."""
    kept = set(model.state_dict())
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for path, module in model.named_modules():
        for leaf, buffer in list(module._buffers.items()):
            name = f"{path}.{leaf}" if path else leaf
            if buffer is None or name not in kept:
                continue
            values = weights.read(name, tuple(buffer.shape), 0, buffer.numel()).view(buffer.shape)
            precise = buffer.is_floating_point() and any(word in name for word in wide)
            dtype = torch.float32 if precise else buffer.dtype
            module._buffers[leaf] = values.to(buffer.device, dtype)
