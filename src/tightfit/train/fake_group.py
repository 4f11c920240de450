"""The group of a rehearsal: torch's fake one, which allocates every buffer and sends nothing.

What it gathers are copies of this rank's own share. What it scatters, torch before 2.13 leaves as it lay in memory:
such gradients may be infinite, fp16 then skips every step, and the optimizer's memory is never measured. So this rank's
share is put there. Nothing more is allocated than in a real group.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter")
"""By the names of several torch versions; the last one takes a list of shares, the others the whole."""


def join_alone(rank: int, world: int) -> None:
    """Become the one real rank of a group of `world`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    for name in _SCATTERS:
        for module in (dist, dist.distributed_c10d):  # DeepSpeed and FSDP2 call both
            if hasattr(module, name):
                setattr(module, name, fill_own_share(getattr(module, name)))


def fill_own_share(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose first argument is filled with this rank's share of the second."""
    how = signature(scatter)

    def scattered(*words: Any, **named: Any) -> Any:
        told = how.bind(*words, **named)
        output, given, *_ = told.args
        done = scatter(*words, **named)
        rank, size = dist.get_rank(told.arguments.get("group")), output.numel()
        share = given.view(-1)[rank * size : (rank + 1) * size] if isinstance(given, Tensor) else given[rank].view(-1)
        if share.data_ptr() != output.data_ptr():  # ZeRO-3 scatters in place
            with torch.no_grad():
                output.view(-1).copy_(share)
        return done

    return scattered
