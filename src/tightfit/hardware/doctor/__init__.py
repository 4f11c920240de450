"""A check-up of this machine in seconds: cards, links, host, disk, software, compilers, environment.

Nothing here imports torch, changes anything, or waits for a tool that hangs: tools are asked at the same time, each
with a limit, and what nobody tells is not guessed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.hardware.doctor import software
from tightfit.hardware.doctor.environment import environment_rows
from tightfit.hardware.doctor.gpus import gpu_rows, link_rows
from tightfit.hardware.doctor.host import MeasuredDisk, disk_rows, host_rows, measure_disk, measured_row
from tightfit.hardware.doctor.row import Check
from tightfit.hardware.probes import PATIENCE_S, probe_cards, probe_links
from tightfit.hardware.probes.card import Cards

_TORCH_S = 8.5  # seconds from the start after which torch, the last to be asked, is given up
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""What a driver makes: without one torch would be imported for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All that was found."""

    rows: tuple[Check, ...]
    cards: Cards
    torch: software.TorchBuild | None
    packages: Mapping[str, str]
    free_disk_bytes: int | None = None
    seconds: float = 0.0


def examine(folder: Path | None) -> Checkup:
    """Look at everything; `folder`: where a run would be kept. None: its disk is looked at later, by `with_disk`."""
    from concurrent.futures import ThreadPoolExecutor

    begun = time.monotonic()
    packages = software.installed()
    build = software.torch_build(packages.get("torch"))
    is_torch_asked = build is not None and build.for_gpus and any(map(os.path.exists, _DEVICES))
    with ThreadPoolExecutor(max_workers=4) as pool:
        asked = pool.submit(probe_cards, ask_torch_until=begun + _TORCH_S if is_torch_asked else None)
        links = pool.submit(probe_links, begun + PATIENCE_S)
        disk = None if folder is None else pool.submit(measure_disk, folder)
        tools = pool.submit(software.find_compilers, os.environ)
        found = asked.result()
        many = len(found.cards)
        rows = (
            *gpu_rows(found, build),
            *link_rows(found.cards, links.result()),
            *host_rows(many),
            measured_row(found),
            *software.package_rows(packages, build),
            *software.collectives(build, software.collective_packages(), many),
            *software.building_rows(tools.result(), build, os.environ, many),
            *environment_rows(os.environ, found.cards),
        )
        seen = Checkup(rows=rows, cards=found, torch=build, packages=packages)
        seen = seen if disk is None else with_disk(seen, disk.result())
    return replace(seen, seconds=time.monotonic() - begun)


def with_disk(seen: Checkup, disk: MeasuredDisk) -> Checkup:
    """The same with a folder's disk."""
    return replace(seen, rows=(*seen.rows, *disk_rows(disk)), free_disk_bytes=disk.free_bytes)
