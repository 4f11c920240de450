"""What a rank says about its own memory."""

from __future__ import annotations

import pytest
import torch

from tightfit.train.place import read_memory, restart_peaks


def test_without_a_gpu_only_the_host_is_known() -> None:
    reading = read_memory(torch.device("cpu"))
    assert (reading.now_bytes, reading.peak_bytes) == (None, None)
    assert reading.alloc_retries is None
    assert 0 < reading.host_bytes <= reading.host_peak_bytes


@pytest.mark.gpu
def test_a_cache_that_had_to_be_freed_is_counted() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    device = torch.device("cuda", 0)
    restart_peaks(device)
    before = read_memory(device)
    assert before.now_bytes == torch.cuda.memory_allocated(device)
    half = int(torch.cuda.mem_get_info(device)[0] * 0.6)
    held = torch.empty(half, dtype=torch.uint8, device=device)
    del held  # kept by the allocator, so that what follows finds no room beside it
    again = torch.empty(half + half // 4, dtype=torch.uint8, device=device)
    after = read_memory(device)
    assert after.peak_bytes == torch.cuda.max_memory_allocated(device)
    assert after.peak_bytes >= again.numel()
    assert (after.alloc_retries or 0) > (before.alloc_retries or 0)
