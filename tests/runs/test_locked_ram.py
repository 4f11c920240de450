"""Layers that stream lock RAM: a machine that would have to swap for it is told before anything starts."""

from __future__ import annotations

import pytest

from tightfit.runs import free_ram
from tightfit.runs.free_ram import check_free_ram
from tightfit.types import HardwareError

GIB = 2**30


def test_what_is_locked_must_be_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_ram, "free_ram", lambda: 100 * GIB)
    with pytest.raises(HardwareError, match=r"130.0 GiB are needed and 100.0 GiB are free now.*--host-ram 100GB"):
        check_free_ram("stream", 130 * GIB)
    check_free_ram("zero3", 130 * GIB)  # which may swap
    for free in (131 * GIB, None):
        monkeypatch.setattr(free_ram, "free_ram", lambda free=free: free)
        check_free_ram("stream", 130 * GIB)
