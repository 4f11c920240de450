"""The disk that the run would be kept on, and the NVMe drives."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.doctor.row import Row, gib
from tightfit.hardware.machine import read_text
from tightfit.hardware.probes.readings import GIB, number
from tightfit.hardware.probes.shapes import tree_of
from tightfit.hardware.probes.tools import Silent, run
from tightfit.messages import Listing, Message, Said

_CHILD = Path(__file__).with_name("disk_speed.py")
_LITTLE = 20 * GIB
_NOTHING = GIB
_SLOW = 100e6
_PATIENCE_S = 3.0
_IN_RAM = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDisk:
    """What was found out about a folder's disk. None: not told."""

    folder: Path
    free_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    problem: Said | None = None


def measure(folder: Path) -> MeasuredDisk:
    """Room and speed of the disk of a folder, which need not exist yet. It takes a second at most."""
    whole = Path(os.path.abspath(folder))
    try:
        child = [sys.executable, "-IS", str(_CHILD), str(whole)]
        tree = tree_of(run(Message("doctor.the-disk"), child, timeout_s=_PATIENCE_S))
    except Silent as silence:
        return MeasuredDisk(folder=whole, problem=silence.said)
    if not isinstance(tree, dict):
        return MeasuredDisk(folder=whole, problem=Message("doctor.disk-not-seen"))
    place = Path(str(tree.get("folder", whole)))
    if isinstance(tree.get("problem"), str):
        return MeasuredDisk(folder=place, problem=str(tree["problem"]).lower())
    free, total, done, took = (number(tree.get(key)) for key in ("free", "total", "bytes", "seconds"))
    return MeasuredDisk(
        folder=place,
        free_bytes=None if free is None else int(free),
        total_bytes=None if total is None else int(total),
        bytes_per_s=done / took if done and took else None,
    )


def disk_rows(found: MeasuredDisk, root: Path = Path("/")) -> list[Row]:
    return [_room(found, root), *_speed(found), *_nvme(root)]


def _room(found: MeasuredDisk, root: Path) -> Row:
    where = str(found.folder)
    if found.problem is not None or found.free_bytes is None:
        why = found.problem or Message("doctor.disk-silent")
        what, fix = Message("doctor.disk-unwritable", folder=where, why=why), Message("doctor.disk-unwritable-fix")
        return Row(id="disk", group="disk", light="red", what=what, fix=fix)
    kind = _kind(found.folder, root)
    what = Message("doctor.disk", folder=where, free=gib(found.free_bytes), kind=kind)
    if found.free_bytes < _NOTHING:
        return Row(id="disk", group="disk", light="red", what=what, fix=Message("doctor.disk-full"))
    if kind in _IN_RAM:
        return Row(id="disk", group="disk", light="yellow", what=what, fix=Message("doctor.disk-in-ram"))
    if found.free_bytes < _LITTLE:
        return Row(id="disk", group="disk", light="yellow", what=what, fix=Message("doctor.disk-little"))
    return Row(id="disk", group="disk", light="green", what=what)


def _speed(found: MeasuredDisk) -> list[Row]:
    if found.bytes_per_s is None:
        return []
    what = Message("doctor.disk-speed", folder=str(found.folder), speed=found.bytes_per_s / 1e6)
    if found.bytes_per_s >= _SLOW:
        return [Row(id="disk-speed", group="disk", light="green", what=what)]
    return [Row(id="disk-speed", group="disk", light="yellow", what=what, fix=Message("doctor.disk-slow"))]


def _kind(folder: Path, root: Path) -> str | None:
    """The file system that a folder is on."""
    best: tuple[int, str] | None = None
    for line in read_text(root / "proc/mounts").splitlines():
        cells = line.split()
        if len(cells) < 3:
            continue
        place = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), cells[1]))
        if folder == place or place in folder.parents:
            depth = len(place.parts)
            best = (depth, cells[2]) if best is None or depth >= best[0] else best
    return best[1] if best else None


def _nvme(root: Path) -> list[Row]:
    drives = []
    for drive in sorted(root.glob("sys/block/nvme*n*")):
        sectors = read_text(drive / "size").strip()
        size = int(sectors) * 512 if re.fullmatch("[0-9]{1,15}", sectors) else 0
        if size:
            model = " ".join(read_text(drive / "device/model").split())
            drives.append(f"{drive.name} {gib(size)}" + (f" {model}" if model else ""))
    if not drives:
        return [Row(id="nvme", group="disk", light="green", what=Message("doctor.no-nvme"))]
    what, fix = Message("doctor.nvme", drives=Listing(drives)), Message("doctor.nvme-fix")
    return [Row(id="nvme", group="disk", light="green", what=what, fix=fix)]
