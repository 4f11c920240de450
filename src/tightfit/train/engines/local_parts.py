"""An optimizer that knows no sharded tensors, on FSDP2's shards.

bitsandbytes hands pointers to its kernels and refuses DTensors. Its updates and its blocks of states go element by
element over one tensor, so each rank can let it work on the plain tensor that lies under each of its shards. What the
engine sees stays a DTensor: the loss scale's check and the clipping look at all ranks' gradients, and only the step
itself is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Groups = list[dict[str, Any]]


class LocalParts(torch.optim.Optimizer):
    """Groups and states by DTensor, as other optimizers have them; `inner` has the same by local part.

    `state[param]` is the very dict that `inner.state[local]` is. A rank without rows of a parameter has an empty part,
    which is never stepped and has no states.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.locals: dict[torch.Tensor, nn.Parameter] = {
            param: nn.Parameter(_part(param)) for group in self.param_groups for param in group["params"]
        }
        self.inner = make([group | {"params": [self.locals[p] for p in group["params"]]} for group in groups])
        for param, local in self.locals.items():
            self.state[param] = self.inner.state[local]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        for param, local in self.locals.items():
            local.data = _part(param)  # the first forward pass pads and pins shards, which moves them
            local.grad = None if param.grad is None or local.numel() == 0 else _part(param.grad)
        try:
            self.inner.step()
        finally:
            for local in self.locals.values():
                local.grad = None


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory."""
    assert isinstance(tensor, DTensor)
    part = tensor.to_local().detach()
    assert part.is_contiguous()  # of another layout bitsandbytes would update a copy
    return part
