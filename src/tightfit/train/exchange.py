"""What the ranks of a group send each other, to each its own: there in the forward pass, the gradient back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Splits:
    """How many rows go to each rank of a group, and how many come from each."""

    sent: list[int]
    received: list[int]

    def reverse(self) -> Splits:
        return Splits(self.received, self.sent)


def exchange(rows: Tensor, group: Any, splits: Splits | None = None) -> Tensor:
    """Rows for the ranks of a group, one rank's after the other's, for those that they have for this one. `splits`:
    how many; None: as many for each."""
    arrived: Tensor = _Exchange.apply(rows, group, splits)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, splits: Splits | None) -> Tensor:
        ctx.group, ctx.splits = group, splits
        return _send(rows, group, splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return _send(grad, ctx.group, ctx.splits and ctx.splits.reverse()), None, None


def _send(rows: Tensor, group: Any, splits: Splits | None) -> Tensor:
    received, sent = (splits.received, splits.sent) if splits else (None, None)
    arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
