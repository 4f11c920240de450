"""The group of a rehearsal: torch's fake one, which allocates every buffer and sends nothing.

What it gathers are copies of this rank's own share. What it scatters, torch before 2.13 leaves as it lay in memory:
such gradients may be infinite, fp16 then skips every step, and the optimizer's memory is never measured. So this rank's
share is put there. Nothing more is allocated than in a real group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def join_alone(rank: int, world: int) -> None:
    """Become the one real rank of a group of `world`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    for name, own in _SCATTERS.items():
        for module in (dist, dist.distributed_c10d):  # DeepSpeed and FSDP2 call both
            if hasattr(module, name):
                setattr(module, name, _filling(getattr(module, name), own))


def _filling(scatter: Callable[..., Any], own: Callable[[Any, int, int], Tensor]) -> Callable[..., Any]:
    """The same function, whose first argument is filled with this rank's share of the second."""
    how = signature(scatter)

    def scattered(*words: Any, **named: Any) -> Any:
        told = how.bind(*words, **named)
        output, given, *_ = told.args
        done = scatter(*words, **named)
        share = own(given, dist.get_rank(told.arguments.get("group")), output.numel())
        if share.data_ptr() != output.data_ptr():  # ZeRO-3 scatters in place
            with torch.no_grad():
                output.view(-1).copy_(share)
        return done

    return scattered


def _of_whole(given: Tensor, rank: int, size: int) -> Tensor:
    return given.view(-1)[rank * size : (rank + 1) * size]


def _of_list(given: Sequence[Tensor], rank: int, size: int) -> Tensor:
    return given[rank].view(-1)


_SCATTERS: dict[str, Callable[[Any, int, int], Tensor]] = {
    "reduce_scatter_tensor": _of_whole,
    "reduce_scatter_single": _of_whole,
    "reduce_scatter": _of_list,
}
"""By the names of several torch versions."""
