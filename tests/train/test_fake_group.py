"""The group of a rehearsal."""

from __future__ import annotations

import pytest

import warm_desk

SCATTERS = """
import torch, torch.distributed as dist
from tightfit.train import place

place.join_alone(1, 3)
whole = torch.arange(6.0)
parts = list(whole.reshape(3, 2))
nothing = lambda output, input, op=None, group=None, async_op=False: "sent"
for scatter, given in (
    (dist.reduce_scatter_tensor, whole),
    (dist.distributed_c10d.reduce_scatter_tensor, whole),
    (dist.reduce_scatter, parts),
    (place.fill_own_share(nothing), whole),
    (place.fill_own_share(nothing), parts),
):
    output = torch.full((2,), float("nan"))
    scatter(output, given, group=None)
    assert output.tolist() == [2.0, 3.0], (scatter, output)
assert place.fill_own_share(nothing)(whole[2:4], whole) == "sent"
assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
exchanged = torch.full((6,), float("nan"))
dist.all_to_all_single(exchanged, whole)
assert exchanged.tolist() == whole.tolist()
gathered = torch.full((6,), float("nan"))
dist.all_gather_into_tensor(gathered, torch.ones(2))
assert gathered.tolist() == [1.0] * 6
for dtype, size in ((torch.bfloat16, 4), (torch.bfloat16, 3), (torch.uint8, 8)):
    part = torch.arange(size).to(dtype)
    for named in ({}, {"async_op": True}):
        gathered = torch.zeros(3, size, dtype=dtype)
        work = dist.all_gather_into_tensor(gathered, part, **named)
        assert bool(work) == bool(named)
        assert gathered.tolist() == [part.tolist()] * 3, (dtype, size, named)
    gathered = torch.zeros(3, size, dtype=dtype)
    gathered[1] = part
    dist.all_gather_into_tensor(gathered, gathered[1])  # as FSDP2 gathers
    assert gathered.tolist() == [part.tolist()] * 3, (dtype, size)
"""


@pytest.mark.thorough
def test_what_is_scattered_is_this_ranks_share_and_never_what_lay_in_memory() -> None:
    done = warm_desk.python(SCATTERS, ranks=True)
    assert done.returncode == 0, done.stderr
