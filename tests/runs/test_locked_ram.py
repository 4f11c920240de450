"""Layers that stream lock RAM: a machine that would have to swap for it is told before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.runs.records import WorkerFile
from tightfit.start import machine
from tightfit.start.machine import check_free_ram
from tightfit.types import HardwareError

GIB = 2**30
WORKER = WorkerFile(
    model="qwen2.5-7b",
    method="full",
    engine="stream",
    optimizer="adamw",
    offload_optimizer="none",
    nodes=1,
    gpus_per_node=1,
    vendor="nvidia",
    folder="run",
    required_bytes=20 * GIB,
    peak_bytes=18 * GIB,
    host_bytes_per_node=130 * GIB,
    step_s=None,
    tokens_per_s=None,
)


def test_what_is_locked_must_be_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_ram", lambda: 100 * GIB)
    with pytest.raises(HardwareError, match=r"130.0 GiB are needed and 100.0 GiB are free now.*--host-ram 100GB"):
        check_free_ram(WORKER)
    check_free_ram(replace(WORKER, engine="zero3"))  # which may swap
    for free in (131 * GIB, None):
        monkeypatch.setattr(machine, "free_ram", lambda free=free: free)
        check_free_ram(WORKER)
