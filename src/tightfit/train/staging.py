"""A buffer on the host that holds a rank's part of a checkpoint while it is being written.

The memory is taken and touched in the background while training begins, for the system hands out new pages at a few
gigabytes a second: an H200 waited 11 s for the first save of a 7.6B model's share (13 GB), and 1.4 s for the next.
Where there is a GPU the buffer is registered with it, so that it writes there by itself: 0.3 s.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tightfit.hardware.machine import free_ram
from tightfit.train.saved_model import HOST_BYTES, TensorPiece, TensorSet

ALIGNED = 64
SPARE_BYTES = 2 * 2**30
"""What must stay free on the host beside the buffers."""

Held = dict[str, list[TensorPiece]]
"""By the stem of a set."""


class Staging:
    """Sized once, for pieces that are the same at every save."""

    def __init__(self, sets: Iterable[TensorSet]) -> None:
        self.bytes = sum(_room(piece, each) for each in sets for piece in each.pieces())
        self._buffer: Tensor | None = None
        self._queued = False
        """Copies may be queued: the GPU can write to the buffer by itself."""

    def prepare(self, device: torch.device) -> None:
        """Take the memory; from any thread, once. `device`: where the pieces are."""
        buffer = torch.empty(self.bytes, dtype=torch.uint8)
        for low in range(0, self.bytes, HOST_BYTES):  # in parts: others get a turn
            buffer[low : low + HOST_BYTES].zero_()
        if device.type == "cuda" and self.bytes:
            torch.cuda.set_device(device)  # a new thread is on the first GPU, and would open a context there
            refused = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), self.bytes, 0)  # type: ignore[no-untyped-call]
            self._queued = int(refused) == 0  # a limit on locked memory: copies are slower then, and no less right
        self._buffer = buffer

    def take(self, sets: Iterable[TensorSet]) -> Held:
        """Copies of all pieces, as they will be in the files."""
        assert self._buffer is not None
        held: Held = {}
        begin = 0
        for each in sets:
            copies = held[each.style.stem] = []
            for piece in each.pieces():
                dtype, size = each.names[piece.name][1], _room(piece, each)
                numel = piece.tensor.numel()
                target = self._buffer[begin : begin + numel * dtype.itemsize].view(dtype)
                # In pieces: a change of dtype makes a copy on the GPU first.
                values = piece.tensor.detach().reshape(-1)
                step = HOST_BYTES // max(values.dtype.itemsize, target.dtype.itemsize)
                for low in range(0, values.numel(), step):
                    target[low : low + step].copy_(values[low : low + step], non_blocking=self._queued)
                copies.append(TensorPiece(piece.name, piece.shape, piece.start, target))
                begin += size
        if self._queued:
            torch.cuda.synchronize()
        return held


def may_stage(needed: int) -> bool:
    """Whether the host has so much to spare."""
    free = free_ram()
    return free is not None and free >= needed + SPARE_BYTES


def _room(piece: TensorPiece, tensors: TensorSet) -> int:
    return -(-piece.tensor.numel() * tensors.names[piece.name][1].itemsize // ALIGNED) * ALIGNED
