"""What a rank says about its own memory."""

from __future__ import annotations

import pytest
import torch

from tightfit.train.host_memory import HostMemory
from tightfit.train.place import Place, read_memory, restart_peaks


def test_without_a_gpu_only_the_host_is_known() -> None:
    reading = read_memory(Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="python"))
    assert (reading.now_bytes, reading.peak_bytes) == (None, None)
    assert reading.alloc_retries is None
    assert 0 < reading.host_bytes <= reading.host_peak_bytes


def test_of_what_ranks_share_each_has_its_part() -> None:
    """As it is in the ranks' plan: else a run of several GPUs would teach that each needs RAM for all."""
    places = [
        Place(rank=1, local_rank=0, world=world, device=torch.device("cpu"), launcher="python", rehearsal=True)
        for world in (1, 4)
    ]
    size = 64 * 2**20
    before = [read_memory(place).host_bytes for place in places]
    shared = HostMemory(places[1], shared=True).take(size)
    after = [read_memory(place).host_bytes for place in places]
    whole, part = (now - then for now, then in zip(after, before, strict=True))
    assert whole - part == pytest.approx(size * 3 / 4, rel=0.02)
    assert int(shared.sum()) == 0


@pytest.mark.gpu
def test_a_cache_that_had_to_be_freed_is_counted() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    device = torch.device("cuda", 0)
    restart_peaks(device)
    place = Place(rank=0, local_rank=0, world=1, device=device, launcher="python")
    before = read_memory(place)
    assert before.now_bytes == torch.cuda.memory_allocated(device)
    half = int(torch.cuda.mem_get_info(device)[0] * 0.6)
    held = torch.empty(half, dtype=torch.uint8, device=device)
    del held  # kept by the allocator, so that what follows finds no room beside it
    again = torch.empty(half + half // 4, dtype=torch.uint8, device=device)
    after = read_memory(place)
    assert after.peak_bytes == torch.cuda.max_memory_allocated(device)
    assert after.peak_bytes >= again.numel()
    assert (after.alloc_retries or 0) > (before.alloc_retries or 0)
