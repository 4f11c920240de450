"""The disk that the run would be kept on, and the NVMe drives."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.doctor.row import Row, gib
from tightfit.hardware.probes.readings import GIB, number
from tightfit.hardware.probes.shapes import tree_of
from tightfit.hardware.probes.tools import Silent, run

_CHILD = Path(__file__).with_name("disk_speed.py")
_LITTLE = 20 * GIB
_NOTHING = GIB
_SLOW = 100e6
_PATIENCE_S = 3.0
_IN_RAM = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found out about a folder's disk. None: not told."""

    folder: Path
    free_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    problem: str | None = None


def measure(folder: Path) -> Measured:
    """Room and speed of the disk of a folder, which need not exist yet. It takes a second at most."""
    whole = Path(os.path.abspath(folder))
    try:
        tree = tree_of(run("the disk", [sys.executable, "-IS", str(_CHILD), str(whole)], timeout_s=_PATIENCE_S))
    except Silent as silence:
        return Measured(folder=whole, problem=str(silence).rstrip("."))
    if not isinstance(tree, dict):
        return Measured(folder=whole, problem="the disk could not be looked at")
    place = Path(str(tree.get("folder", whole)))
    if isinstance(tree.get("problem"), str):
        return Measured(folder=place, problem=str(tree["problem"]).lower())
    free, total, done, took = (number(tree.get(key)) for key in ("free", "total", "bytes", "seconds"))
    return Measured(
        folder=place,
        free_bytes=None if free is None else int(free),
        total_bytes=None if total is None else int(total),
        bytes_per_s=done / took if done and took else None,
    )


def disk_rows(found: Measured, root: Path = Path("/")) -> list[Row]:
    return [_room(found, root), *_speed(found), *_nvme(root)]


def _room(found: Measured, root: Path) -> Row:
    where = str(found.folder)
    if found.problem is not None or found.free_bytes is None:
        why = found.problem or "it does not say what is free"
        fix = "name a folder that you may write to with --output, or saving.folder in the job file"
        return Row(id="disk", group="disk", light="red", what=f"{where} cannot be written to: {why}", fix=fix)
    kind = _kind(found.folder, root)
    what = f"{where}: {gib(found.free_bytes)} free" + (f" ({kind})" if kind else "")
    if found.free_bytes < _NOTHING:
        return Row(id="disk", group="disk", light="red", what=what, fix="make room: a checkpoint needs more")
    if kind in _IN_RAM:
        fix = "keep runs on a real disk: this one counts as RAM, and is gone after a restart"
        return Row(id="disk", group="disk", light="yellow", what=what, fix=fix)
    if found.free_bytes < _LITTLE:
        fix = "make room: a checkpoint of a 7B model with its optimizer takes about 100 GB"
        return Row(id="disk", group="disk", light="yellow", what=what, fix=fix)
    return Row(id="disk", group="disk", light="green", what=what)


def _speed(found: Measured) -> list[Row]:
    if found.bytes_per_s is None:
        return []
    what = f"{found.folder} takes {found.bytes_per_s / 1e6:,.0f} MB/s, each block synced"
    if found.bytes_per_s >= _SLOW:
        return [Row(id="disk-speed", group="disk", light="green", what=what)]
    fix = "keep runs on a faster disk, or save less often (--save-every 1h): every checkpoint waits for it"
    return [Row(id="disk-speed", group="disk", light="yellow", what=what, fix=fix)]


def _kind(folder: Path, root: Path) -> str | None:
    """The file system that a folder is on."""
    best: tuple[int, str] | None = None
    for line in _read(root / "proc/mounts").splitlines():
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
        sectors = _read(drive / "size").strip()
        size = int(sectors) * 512 if re.fullmatch("[0-9]{1,15}", sectors) else 0
        if size:
            model = " ".join(_read(drive / "device/model").split())
            drives.append(f"{drive.name} {gib(size)}" + (f" {model}" if model else ""))
    if not drives:
        return [Row(id="nvme", group="disk", light="green", what="no NVMe drive is seen, so nothing offloads to one")]
    what = f"NVMe: {', '.join(drives)}"
    fix = "to offload to it, name its room and a folder there: --nvme 1TB and hardware.nvme_path"
    return [Row(id="nvme", group="disk", light="green", what=what, fix=fix)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
