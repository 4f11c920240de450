"""The footprint model knows how our scan cuts its launches: the same as the scan itself."""

from __future__ import annotations

import pytest
import torch

from tightfit.mamba.arguments import Scan
from tightfit.memory.ssm import CUDA_CHANNELS, CUDA_STATES, TIGHTFIT_BORDER, TIGHTFIT_STEPS, cut_cuda_scan, cut_scan

gpu_scan = pytest.importorskip("tightfit.mamba.gpu_scan")


@pytest.mark.parametrize("states", [1, 8, 16, 64])
@pytest.mark.parametrize(("batch", "channels", "length"), [(1, 9728, 2048), (8, 5120, 2048), (3, 31, 65), (1, 1, 1)])
def test_the_same_cut(batch: int, channels: int, length: int, states: int) -> None:
    def empty(*size: int) -> torch.Tensor:
        return torch.empty(*size, device="meta")

    scan = Scan(
        u=empty(batch, channels, length), delta=empty(batch, channels, length), A=empty(channels, states),
        B=empty(batch, states, length), C=empty(batch, states, length), D=None, z=None, delta_bias=None,
        delta_softplus=True, initial_state=None, starts=None,
    )  # fmt: skip
    assert (gpu_scan.BORDER, gpu_scan.STEPS) == (TIGHTFIT_BORDER, TIGHTFIT_STEPS)
    for config, backward in ((gpu_scan.FORWARD, False), (gpu_scan.BACKWARD, True)):
        cut, known = gpu_scan._Cut(scan, config), cut_scan(batch, channels, length, states, backward=backward)
        assert (cut.wide, cut.slots) == (known.wide, known.slots)
        assert cut.part * cut.segments * batch == known.programs
        assert cut.part * batch * cut.padded * 2 * cut.wide * 4 == known.sums


@pytest.mark.parametrize(("batch", "channels", "length"), [(1, 9728, 2048), (8, 5120, 2048), (3, 64, 65), (1, 128, 2)])
def test_the_same_cut_on_nvidias_cards(batch: int, channels: int, length: int) -> None:
    cuda_scan = gpu_scan.cuda_scan
    known = (cuda_scan.STATES, cuda_scan.CHANNELS, cuda_scan.BORDER)
    assert known == (CUDA_STATES, CUDA_CHANNELS, TIGHTFIT_BORDER)
    cut = cuda_scan.Cut(batch, channels, length, cuda_scan.BACKWARD_PROGRAMS)
    asked = cut_cuda_scan(batch, channels, length)
    assert (cut.segments, cut.tiles * cut.segments * batch) == (asked.slots, asked.programs)
    assert cut.tiles * batch * cut.padded * 2 * CUDA_STATES * 4 == asked.sums
