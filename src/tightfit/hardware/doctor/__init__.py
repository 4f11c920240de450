"""A check-up of this machine in seconds: cards, links, host, disk, software, compilers, environment.

Nothing here imports torch, changes anything, or waits for a tool that hangs: tools are asked at the same time, each
with a limit, and what nobody tells is not guessed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from tightfit.hardware.doctor.building import building_rows, collectives, toolkit
from tightfit.hardware.doctor.disk import MeasuredDisk, disk_rows, measure
from tightfit.hardware.doctor.environment import environment_rows
from tightfit.hardware.doctor.gpus import gpu_rows
from tightfit.hardware.doctor.host import host_rows
from tightfit.hardware.doctor.links import Link, link_rows
from tightfit.hardware.doctor.packages import TorchBuild, installed, package_rows, torch_build
from tightfit.hardware.doctor.row import Row
from tightfit.hardware.probes import probe_cards
from tightfit.hardware.probes.card import Cards
from tightfit.hardware.probes.nvidia import links as nvidia_links
from tightfit.hardware.probes.nvidia import parse_links
from tightfit.hardware.probes.rocm_smi import show_links
from tightfit.hardware.probes.tools import Silent, place_of

PATIENCE_S = 6.0
TORCH_S = 8.5
"""Seconds from the start after which torch, the last to be asked, is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All that was found."""

    rows: tuple[Row, ...]
    cards: Cards
    torch: TorchBuild | None
    packages: Mapping[str, str]
    free_disk_bytes: int | None = None
    seconds: float = 0.0


def examine(folder: Path | None) -> Checkup:
    """Look at everything; `folder`: where a run would be kept. None: its disk is looked at later, by `with_disk`."""
    from concurrent.futures import ThreadPoolExecutor

    begun = time.monotonic()
    packages = installed()
    build = torch_build(packages.get("torch"))
    until = begun + TORCH_S if build is not None and build.for_gpus and _has_device() else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        asked = pool.submit(probe_cards, PATIENCE_S, ask_torch_until=until)
        links = pool.submit(_links, begun + PATIENCE_S)
        disk = None if folder is None else pool.submit(measure, folder)
        tools = pool.submit(toolkit, os.environ)
        found = asked.result()
        many = len(found.cards)
        rows = [
            *gpu_rows(found, build),
            *link_rows(found.cards, links.result()),
            *host_rows(many),
            *package_rows(packages, build),
            *collectives(build, _collective_packages(), many),
            *building_rows(tools.result(), build, os.environ, many),
            *environment_rows(os.environ, found.cards),
        ]
        seen = Checkup(rows=tuple(rows), cards=found, torch=build, packages=packages)
        seen = seen if disk is None else with_disk(seen, disk.result())
    return replace(seen, seconds=time.monotonic() - begun)


def with_disk(seen: Checkup, disk: MeasuredDisk) -> Checkup:
    """The same with a folder's disk."""
    return replace(seen, rows=(*seen.rows, *disk_rows(disk)), free_disk_bytes=disk.free_bytes)


def _has_device(root: Path = Path("/")) -> bool:
    """Whether a driver has made devices: without one torch would be imported for nothing."""
    return any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0", "kfd", "dxg"))


def _links(deadline: float) -> tuple[Link, ...]:
    if place_of("nvidia-smi") is not None:
        return nvidia_links(deadline)
    for tool in ("hy-smi", "rocm-smi"):
        if place_of(tool) is not None:
            try:
                return parse_links(show_links(tool))
            except Silent:
                return ()
    return ()


def _collective_packages() -> dict[str, str]:
    """`nvidia-nccl-cu12` and its like."""
    found = {}
    for each in distributions():
        name = (each.metadata["Name"] or "").lower() if each.metadata else ""
        if name.startswith(("nvidia-nccl-", "rccl")):
            found[name] = each.version
    return found
