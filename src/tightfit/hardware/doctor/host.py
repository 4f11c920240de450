"""The host: RAM, swap, shared memory, limits of the process and of its control group, NUMA."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from tightfit.hardware.doctor.row import Row, gib
from tightfit.hardware.machine import free_ram, ram_here, read_meminfo, read_text
from tightfit.hardware.probes.readings import GIB, MIB
from tightfit.messages import Message

_LITTLE_RAM = 0.1
_LITTLE_SHM = GIB
_DOCKER_SHM = 64 * MIB
_FEW_FILES = 4096
_FEW_PROCESSES = 1024
SWAP_COMMANDS = (
    "sudo fallocate -l 64G /swapfile && sudo chmod 600 /swapfile",
    "sudo mkswap /swapfile && sudo swapon /swapfile",
)


def host_rows(cards: int, root: Path = Path("/")) -> list[Row]:
    """`cards`: GPUs of this machine; `root`: where /proc, /sys and /dev are looked for."""
    return [_ram(root), _swap(root), *_shm(root, cards), _memlock(root), *_files(), *_group(root), *_numa(root)]


def _ram(root: Path) -> Row:
    total, said = ram_here(root)
    free = free_ram(root)
    if total is None:
        what, fix = Message("doctor.ram-unknown"), Message("doctor.ram-unknown-fix")
        return Row(id="ram", group="host", light="yellow", what=what, fix=fix)
    what = Message(
        "doctor.ram",
        total=gib(total),
        group=Message("doctor.ram-of-group") if said else None,
        free=None if free is None else gib(free),
    )
    if free is not None and free < _LITTLE_RAM * total:
        return Row(id="ram", group="host", light="yellow", what=what, fix=Message("doctor.little-ram"))
    return Row(id="ram", group="host", light="green", what=what)


def _swap(root: Path) -> Row:
    total, free = read_meminfo(root, "SwapTotal"), read_meminfo(root, "SwapFree")
    if total:
        what = Message("doctor.swap", total=gib(total), used=None if free is None else gib(total - free))
        return Row(id="swap", group="host", light="green", what=what)
    what, fix = Message("doctor.no-swap"), Message("doctor.no-swap-fix")
    return Row(id="swap", group="host", light="green", what=what, fix=fix, commands=SWAP_COMMANDS)


def _shm(root: Path, cards: int) -> list[Row]:
    """NCCL, and data loaders with workers, hand over through /dev/shm; a container has 64 MiB of it unless asked."""
    try:
        told = os.statvfs(root / "dev/shm")
    except OSError:
        return []
    size, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    if min(size, free) >= _LITTLE_SHM:
        return [Row(id="shm", group="host", light="green", what=Message("doctor.shm", size=gib(size), free=gib(free)))]
    return [
        Row(
            id="shm",
            group="host",
            light="red" if size <= _DOCKER_SHM and cards > 1 else "yellow",
            what=Message("doctor.little-shm", size=gib(size), free=gib(free)),
            fix=Message("doctor.little-shm-fix"),
            commands=("sudo mount -o remount,size=16G /dev/shm",),
        )
    ]


def _memlock(root: Path) -> Row:
    """CUDA pins through its driver, beyond this limit; InfiniBand does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Row(id="memlock", group="host", light="green", what=Message("doctor.memlock-unlimited"))
    if not any((root / "sys/class/infiniband").glob("*")):
        return Row(id="memlock", group="host", light="green", what=Message("doctor.memlock", size=gib(soft)))
    return Row(
        id="memlock",
        group="host",
        light="yellow" if soft >= GIB else "red",
        what=Message("doctor.memlock-infiniband", size=gib(soft)),
        fix=Message("doctor.memlock-fix"),
        commands=("ulimit -l unlimited",),
    )


def _files() -> list[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES or hard == soft == resource.RLIM_INFINITY:
        return []
    return [
        Row(
            id="open-files",
            group="host",
            light="yellow" if soft < 1024 else "green",
            what=Message("doctor.open-files", count=soft),
            fix=Message("doctor.open-files-fix"),
            commands=(f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}",),
        )
    ]


# --- control groups -----------------------------------------------------------------------------


def _group(root: Path) -> list[Row]:
    """What the control group allows of CPUs and processes, in both versions; RAM is in its own row."""
    rows = []
    cpus = _least(root, {"": ("", "cpu.max"), "cpu": ("cpu", "cpu.cfs_quota_us")}, _quota)
    # macOS has no affinity.
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cpus is not None and have is not None and cpus < have:
        what, fix = Message("doctor.cpu-limit", allowed=cpus, have=have), Message("doctor.cpu-limit-fix")
        rows.append(Row(id="cpu-limit", group="host", light="yellow", what=what, fix=fix))
    else:
        rows.append(Row(id="cpu-limit", group="host", light="green", what=Message("doctor.cpus", have=have)))
    pids = _least(root, {"": ("", "pids.max"), "pids": ("pids", "pids.max")}, _count)
    if pids is not None and pids < _FEW_PROCESSES:
        what, fix = Message("doctor.pids-limit", allowed=pids), Message("doctor.pids-limit-fix")
        rows.append(Row(id="pids-limit", group="host", light="yellow", what=what, fix=fix))
    return rows


def _least(root: Path, files: Mapping[str, tuple[str, str]], read: Callable[[Path], float | None]) -> float | None:
    """The narrowest limit from our own group up to the root. `files`: controller → folder below the mount, and name."""
    found: list[float] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        for controller in controllers.split(","):
            if controller not in files:
                continue
            folder, name = files[controller]
            group = PurePosixPath("/", path)
            for each in (group, *group.parents):
                if ".." in each.parts:
                    continue
                limit = read(root / "sys/fs/cgroup" / folder / each.relative_to("/") / name)
                if limit is not None:
                    found.append(limit)
    return min(found, default=None)


def _quota(path: Path) -> float | None:
    """CPUs: `200000 100000` in version 2, and a quota beside its period in version 1; `max` and -1 mean none."""
    words = read_text(path).split()
    period = words[1] if len(words) > 1 else read_text(path.with_name("cpu.cfs_period_us")).strip()
    if not words or not re.fullmatch("[0-9]{1,15}", words[0]) or not re.fullmatch("[0-9]{1,15}", period):
        return None
    return int(words[0]) / int(period) if int(period) and int(words[0]) else None


def _count(path: Path) -> float | None:
    text = read_text(path).strip()
    return float(text) if re.fullmatch("[0-9]{1,15}", text) else None


# --- NUMA ---------------------------------------------------------------------------------------


def _numa(root: Path) -> list[Row]:
    nodes = len([*root.glob("sys/devices/system/node/node[0-9]*")])
    if nodes < 2:
        return []
    what, fix = Message("doctor.numa", nodes=nodes), Message("doctor.numa-fix")
    return [Row(id="numa", group="host", light="green", what=what, fix=fix)]
