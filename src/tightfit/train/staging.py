"""A buffer on the host that holds a rank's part of a checkpoint while it is being written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tightfit.inputs.machine import free_ram
from tightfit.train.saved_model import HOST_BYTES, Piece, TensorSet

ALIGNED = 64
SPARE_BYTES = 2 * 2**30
"""What must stay free on the host beside the buffers."""

Held = dict[str, list[Piece]]
"""By the stem of a set."""


class Staging:
    """Sized once, for pieces that are the same at every save; the memory is taken with the first."""

    def __init__(self, sets: Iterable[TensorSet]) -> None:
        self.bytes = sum(_room(piece, each) for each in sets for piece in each.pieces())
        self._buffer: Tensor | None = None

    def take(self, sets: Iterable[TensorSet]) -> Held:
        """Copies of all pieces, as they will be in the files."""
        if self._buffer is None:
            self._buffer = torch.empty(self.bytes, dtype=torch.uint8)
        held: Held = {}
        begin = 0
        for each in sets:
            copies = held[each.style.stem] = []
            for piece in each.pieces():
                dtype, size = each.names[piece.name][1], _room(piece, each)
                numel = piece.tensor.numel()
                target = self._buffer[begin : begin + numel * dtype.itemsize].view(dtype)
                _copy(target, piece.tensor.detach().reshape(-1))
                copies.append(Piece(piece.name, piece.shape, piece.start, target))
                begin += size
        return held


def may_stage(needed: int) -> bool:
    """Whether the host has so much to spare."""
    free = free_ram()
    return free is not None and free >= needed + SPARE_BYTES


def _room(piece: Piece, tensors: TensorSet) -> int:
    return -(-piece.tensor.numel() * tensors.names[piece.name][1].itemsize // ALIGNED) * ALIGNED


def _copy(target: Tensor, values: Tensor) -> None:
    """In pieces: a change of dtype makes a copy on the GPU first."""
    step = HOST_BYTES // max(values.dtype.itemsize, target.dtype.itemsize)
    for low in range(0, values.numel(), step):
        target[low : low + step].copy_(values[low : low + step])
