"""The host: RAM, swap, shared memory, limits of the process and of its control group, NUMA, disks."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.doctor.row import Check, Light, gib
from tightfit.hardware.machine import (
    control_groups,
    fingerprint_of,
    free_ram,
    ram_here,
    read_count,
    read_meminfo,
    read_text,
)
from tightfit.hardware.measured import find_measured
from tightfit.hardware.probes.card import Cards
from tightfit.hardware.probes.readings import GIB, MIB, find_json, number
from tightfit.hardware.probes.tools import Silent, run_child
from tightfit.messages import Listing, Message, Said

_LITTLE_RAM = 0.1
_LITTLE_SHM = GIB
_DOCKER_SHM = 64 * MIB
_FEW_FILES = 4096
_FEW_PROCESSES = 1024
_SWAP_COMMANDS = (
    "sudo fallocate -l 64G /swapfile && sudo chmod 600 /swapfile",
    "sudo mkswap /swapfile && sudo swapon /swapfile",
)


def host_rows(cards: int, root: Path = Path("/")) -> Iterator[Check]:
    """`cards`: GPUs of this machine; `root`: where /proc, /sys and /dev are looked for."""
    (total, said), free = ram_here(root), free_ram(root)
    if total is None:
        yield Check("ram", "host", "yellow", Message("doctor.ram-unknown"), Message("doctor.ram-unknown-fix"))
    else:
        group = Message("doctor.ram-of-group") if said else None
        what = Message("doctor.ram", total=gib(total), group=group, free=None if free is None else gib(free))
        fix = Message("doctor.little-ram") if free is not None and free < _LITTLE_RAM * total else None
        yield Check("ram", "host", "yellow" if fix else "green", what, fix)

    swap, unused = read_meminfo(root, "SwapTotal"), read_meminfo(root, "SwapFree")
    if swap:
        used = None if unused is None else gib(swap - unused)
        yield Check("swap", "host", "green", Message("doctor.swap", total=gib(swap), used=used))
    else:
        yield Check("swap", "host", "green", Message("doctor.no-swap"), Message("doctor.no-swap-fix"), _SWAP_COMMANDS)

    # NCCL, and data loaders with workers, hand over through /dev/shm; a container has 64 MiB of it unless asked.
    with suppress(OSError):
        told = os.statvfs(root / "dev/shm")
        size, left = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
        if min(size, left) >= _LITTLE_SHM:
            yield Check("shm", "host", "green", Message("doctor.shm", size=gib(size), free=gib(left)))
        else:
            what, fix = Message("doctor.little-shm", size=gib(size), free=gib(left)), Message("doctor.little-shm-fix")
            light: Light = "red" if size <= _DOCKER_SHM and cards > 1 else "yellow"
            yield Check("shm", "host", light, what, fix, ("sudo mount -o remount,size=16G /dev/shm",))

    # CUDA pins through its driver, beyond this limit; InfiniBand does not.
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Check("memlock", "host", "green", Message("doctor.memlock-unlimited"))
    elif not any((root / "sys/class/infiniband").glob("*")):
        yield Check("memlock", "host", "green", Message("doctor.memlock", size=gib(locked)))
    else:
        what, fix = Message("doctor.memlock-infiniband", size=gib(locked)), Message("doctor.memlock-fix")
        yield Check("memlock", "host", "yellow" if locked >= GIB else "red", what, fix, ("ulimit -l unlimited",))

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        what, fix = Message("doctor.open-files", count=files), Message("doctor.open-files-fix")
        more = 65536 if most == resource.RLIM_INFINITY else min(most, 65536)
        yield Check("open-files", "host", "yellow" if files < 1024 else "green", what, fix, (f"ulimit -n {more}",))

    # What the control group allows of CPUs: a quota and its period, in one file or in two.
    shares = []
    for version, place in control_groups(root, "cpu"):
        if version:
            quota, period = read_count(place / "cpu.cfs_quota_us"), read_count(place / "cpu.cfs_period_us")
            shares += [quota / period] if quota and period else []
        elif found := re.match(r"([1-9][0-9]{0,14})\s+([1-9][0-9]{0,14})\b", read_text(place / "cpu.max").strip()):
            shares.append(int(found[1]) / int(found[2]))
    # macOS has no affinity.
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if shares and have is not None and min(shares) < have:
        what = Message("doctor.cpu-limit", allowed=min(shares), have=have)
        yield Check("cpu-limit", "host", "yellow", what, Message("doctor.cpu-limit-fix"))
    else:
        yield Check("cpu-limit", "host", "green", Message("doctor.cpus", have=have))

    counts = (read_count(place / "pids.max") for _, place in control_groups(root, "pids"))
    pids = min(filter(None, counts), default=None)
    if pids is not None and pids < _FEW_PROCESSES:
        what, fix = Message("doctor.pids-limit", allowed=pids), Message("doctor.pids-limit-fix")
        yield Check("pids-limit", "host", "yellow", what, fix)

    nodes = len([*root.glob("sys/devices/system/node/node[0-9]*")])
    if nodes > 1:
        yield Check("numa", "host", "green", Message("doctor.numa", nodes=nodes), Message("doctor.numa-fix"))


def measured_row(cards: Cards) -> Check:
    """When it was found out what this machine reaches."""
    measured, said = find_measured(fingerprint_of(cards))
    if measured is not None:
        return Check("measured", "host", "green", Message("doctor.measured", on=measured.on))
    what, fix = Message("doctor.not-measured"), Message("doctor.not-measured-fix")
    return Check("measured", "host", "green", said[0] if said else what, fix, ("tightfit measure",))


_LITTLE_DISK = 20 * GIB
_NO_DISK = GIB
_SLOW_DISK = 100e6
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDisk:
    """What was found out about a folder's disk. None: not told."""

    folder: Path
    free_bytes: int | None = None
    bytes_per_s: float | None = None
    problem: Said | None = None


def measure_disk(folder: Path) -> MeasuredDisk:
    """Room and speed of the disk of a folder, which need not exist yet. It takes a second at most."""
    whole = Path(os.path.abspath(folder))
    try:
        disk = Message("doctor.the-disk")
        tree = find_json(run_child(disk, "disk", str(whole), timeout_s=_PATIENCE_S, flags=("-IS",)))
    except Silent as silence:
        return MeasuredDisk(folder=whole, problem=silence.said)
    if not isinstance(tree, dict):
        return MeasuredDisk(folder=whole, problem=Message("doctor.disk-not-seen"))
    place = Path(str(tree.get("folder", whole)))
    if isinstance(tree.get("problem"), str):
        return MeasuredDisk(folder=place, problem=str(tree["problem"]).lower())
    free, done, took = (number(tree.get(key)) for key in ("free", "bytes", "seconds"))
    speed = done / took if done and took else None
    return MeasuredDisk(folder=place, free_bytes=None if free is None else int(free), bytes_per_s=speed)


def disk_rows(found: MeasuredDisk, root: Path = Path("/")) -> Iterator[Check]:
    folder, free = str(found.folder), found.free_bytes
    if found.problem is not None or free is None:
        what = Message("doctor.disk-unwritable", folder=folder, why=found.problem or Message("doctor.disk-silent"))
        yield Check("disk", "disk", "red", what, Message("doctor.disk-unwritable-fix"))
    else:
        # the kind of file system that a folder is on: the deepest mount above it, the last where several are the same
        kinds: dict[Path, str] = {}
        for line in read_text(root / "proc/mounts").splitlines():
            cells = line.split()
            if len(cells) > 2:
                kinds[Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), cells[1]))] = cells[2]
        kind = next((kinds[place] for place in (found.folder, *found.folder.parents) if place in kinds), None)
        what, fix = Message("doctor.disk", folder=folder, free=gib(free), kind=kind), None
        if free < _NO_DISK:
            fix = Message("doctor.disk-full")
        elif kind in ("tmpfs", "ramfs"):
            fix = Message("doctor.disk-in-ram")
        elif free < _LITTLE_DISK:
            fix = Message("doctor.disk-little")
        light: Light = "red" if free < _NO_DISK else "yellow" if fix else "green"
        yield Check("disk", "disk", light, what, fix)
    if found.bytes_per_s is not None:
        what = Message("doctor.disk-speed", folder=folder, speed=found.bytes_per_s / 1e6)
        fix = Message("doctor.disk-slow") if found.bytes_per_s < _SLOW_DISK else None
        yield Check("disk-speed", "disk", "yellow" if fix else "green", what, fix)
    drives = []
    for drive in sorted(root.glob("sys/block/nvme*n*")):
        if sectors := read_count(drive / "size"):
            drives.append(" ".join([drive.name, gib(sectors * 512), *read_text(drive / "device/model").split()]))
    if drives:
        what, fix = Message("doctor.nvme", drives=Listing(drives)), Message("doctor.nvme-fix")
        yield Check("nvme", "disk", "green", what, fix)
    else:
        yield Check("nvme", "disk", "green", Message("doctor.no-nvme"))
