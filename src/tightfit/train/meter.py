"""Memory of this process, on its GPU and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_PAGE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    now_bytes: int | None
    """Allocated on the GPU; None: there is none."""
    peak_bytes: int | None
    """The most since the last `restart`."""
    reserved_bytes: int | None
    host_bytes: int
    host_peak_bytes: int
    alloc_retries: int | None
    """Times since the process began that the allocator had to free its cache and try again; None: there is no GPU."""


class Meter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def restart(self) -> None:
        """Peaks are counted from here."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> Reading:
        host = _host()
        if not self.on_gpu:
            return Reading(
                now_bytes=None,
                peak_bytes=None,
                reserved_bytes=None,
                host_bytes=host["VmRSS"],
                host_peak_bytes=host["VmHWM"],
                alloc_retries=None,
            )
        stats = torch.cuda.memory_stats(self._device)  # once: memory_allocated and its kin each read all of it again
        return Reading(
            now_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            host_bytes=host["VmRSS"],
            host_peak_bytes=host["VmHWM"],
            alloc_retries=stats.get("num_alloc_retries", 0),
        )


def _host() -> dict[str, int]:
    """Resident memory now and at its highest, as the kernel counts it."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return found
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * _PAGE
    return found
