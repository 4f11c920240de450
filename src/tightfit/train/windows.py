"""What one optimizer step is made of, dealt out to ranks and micro batches.

A window is `effective_batch` samples, and which ones depends on the step's number alone. Rank and micro batch only
decide who computes which of them, so another number of GPUs or another micro batch trains on the same windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.train.build import attention_of
from tightfit.train.data.order import Order
from tightfit.train.data.samples import IGNORED, Samples, batch, flatten
from tightfit.train.place import Place
from tightfit.types import Levers


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One rank's part of a window."""

    micro_batches: tuple[Any, ...]  # arrays of sample numbers
    divisor: float  # tokens of the whole window, all ranks', that the loss counts
    tokens: int  # tokens of the whole window
    samples: Any  # the numbers of all its samples


class Windows:
    def __init__(self, samples: Samples, order: Order, levers: Levers, place: Place, pad_id: int) -> None:
        self._samples, self._order, self._levers, self._place, self._pad = samples, order, levers, place, pad_id
        # The kernel that runs, not the one that was asked for: sdpa would pay for a long row with the square of it.
        self._one_row = attention_of(levers, place.on_gpu)[0] == "flash"

    def window(self, step: int) -> Window:
        return self.of(self._order.window(step))

    def of(self, indices: Any) -> Window:
        """The window of these samples, in this order."""
        micro, rank = self._levers.micro_batch, self._place.rank
        begins = range(rank * micro, len(indices) + rank * micro, micro * self._place.world)
        return Window(
            micro_batches=tuple(indices[begin : begin + micro] for begin in begins),
            divisor=float(max(1, int(self._samples.loss_tokens[indices].sum()))),
            tokens=int(self._samples.lengths[indices].sum()),
            samples=indices,
        )

    def inputs(self, window: Window) -> Iterator[dict[str, Tensor]]:
        """The tensors of each micro batch, on the device."""
        return map(self.tensors, window.micro_batches)

    def tensors(self, indices: Any, pad_to: int | None = None, unheard: Any = None) -> dict[str, Tensor]:
        """`unheard`: which of the rows do not count in the loss."""
        made = batch(self._samples, indices, self._pad, pad_to=pad_to)
        if unheard is not None:
            made.labels[torch.as_tensor(unheard)] = IGNORED
        if made.position_ids is not None and self._one_row:
            made = flatten(made)  # transformers sees the borders of packed documents in a single row only
        tensors = {"input_ids": made.input_ids, "labels": made.labels}
        if made.position_ids is not None:
            tensors["position_ids"] = made.position_ids
        if self._place.on_gpu:
            device = self._place.device
            tensors = {name: each.pin_memory().to(device, non_blocking=True) for name, each in tensors.items()}
        return tensors


def seed_step(seed: int, step: int, place: Place) -> None:
    """Dropout differs from rank to rank and from step to step, and not from run to run: a run that was interrupted
    draws the same numbers as one that was not."""
    drawn = hashlib.sha256(f"{seed}/{step}/{place.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(drawn[:8], "little", signed=True))
