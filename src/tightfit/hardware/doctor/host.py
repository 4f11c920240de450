"""The host: RAM, swap, shared memory, limits of the process and of its control group, NUMA."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from tightfit.hardware.doctor.row import Row, gib
from tightfit.hardware.machine import free_ram, ram_here
from tightfit.hardware.probes.readings import GIB, MIB

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
    rows = [_ram(root), _swap(root), *_shm(root, cards), _memlock(root), *_files(), *_group(root), *_numa(root)]
    return rows


def _ram(root: Path) -> Row:
    total, said = ram_here(root)
    free = free_ram(root)
    if total is None:
        return Row(
            id="ram", group="host", light="yellow", what="host RAM could not be read", fix="say it with --host-ram"
        )
    by_group = " (what this process's control group allows)" if said else ""
    what = f"host RAM: {gib(total)}{by_group}" + ("" if free is None else f", {gib(free)} of it free")
    if free is not None and free < _LITTLE_RAM * total:
        fix = "end what holds it (`ps aux --sort=-rss | head` shows it): a training that offloads would be killed"
        return Row(id="ram", group="host", light="yellow", what=what, fix=fix)
    return Row(id="ram", group="host", light="green", what=what)


def _swap(root: Path) -> Row:
    total, free = _meminfo(root, "SwapTotal"), _meminfo(root, "SwapFree")
    pinned = "pinned buffers, as offloading has them, cannot be swapped out"
    if total:
        used = "" if free is None else f", {gib(total - free)} of it used"
        return Row(id="swap", group="host", light="green", what=f"swap: {gib(total)}{used}; {pinned}")
    return Row(
        id="swap",
        group="host",
        light="green",
        what=f"no swap; {pinned}, and it helps only what is read once, such as weights while they are loaded",
        fix="if loading a model is killed for want of RAM, these would add some (they are not run for you)",
        commands=SWAP_COMMANDS,
    )


def _meminfo(root: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _shm(root: Path, cards: int) -> list[Row]:
    """NCCL, and data loaders with workers, hand over through /dev/shm; a container has 64 MiB of it unless asked."""
    try:
        told = os.statvfs(root / "dev/shm")
    except OSError:
        return []
    size, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    what = f"shared memory (/dev/shm): {gib(size)}, {gib(free)} of it free"
    if min(size, free) >= _LITTLE_SHM:
        return [Row(id="shm", group="host", light="green", what=what)]
    return [
        Row(
            id="shm",
            group="host",
            light="red" if size <= _DOCKER_SHM and cards > 1 else "yellow",
            what=f"{what}: ranks and data loaders that hand over more die with SIGBUS (exit code -7)",
            fix="start the container with --ipc=host or --shm-size=16g; outside one, make it larger",
            commands=("sudo mount -o remount,size=16G /dev/shm",),
        )
    ]


def _memlock(root: Path) -> Row:
    """CUDA pins through its driver, beyond this limit; InfiniBand does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    words = "memory that may be locked: " + ("without limit" if unlimited else gib(soft))
    cards = any((root / "sys/class/infiniband").glob("*"))
    if unlimited or not cards:
        tail = "" if unlimited else " (pinned buffers of CUDA and HIP are not bound by it; InfiniBand would be)"
        return Row(id="memlock", group="host", light="green", what=words + tail)
    return Row(
        id="memlock",
        group="host",
        light="yellow" if soft >= GIB else "red",
        what=f"{words}, and NCCL registers its buffers with the InfiniBand cards of this machine",
        fix="raise it: in a container with --ulimit memlock=-1, else in /etc/security/limits.conf",
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
            what=f"a process may open {soft} files: enough for most, not for data sets of thousands of shards",
            fix="raise it if `Too many open files` is seen",
            commands=(f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)}",),
        )
    ]


# --- control groups -----------------------------------------------------------------------------


def _group(root: Path) -> list[Row]:
    """What the control group allows of CPUs and processes, in both versions; RAM is in its own row."""
    rows = []
    cpus = _least(root, {"": ("", "cpu.max"), "cpu": ("cpu", "cpu.cfs_quota_us")}, _quota)
    have = _cores()
    if cpus is not None and have is not None and cpus < have:
        fix = "give the container more with --cpus: data loading and offloaded optimizers need them"
        what = f"the control group allows {cpus:g} of {have} CPU cores"
        rows.append(Row(id="cpu-limit", group="host", light="yellow", what=what, fix=fix))
    else:
        rows.append(Row(id="cpu-limit", group="host", light="green", what=f"CPU cores for this process: {have}"))
    pids = _least(root, {"": ("", "pids.max"), "pids": ("pids", "pids.max")}, _count)
    if pids is not None and pids < _FEW_PROCESSES:
        what = f"the control group allows {pids:g} processes and threads"
        fix = "start the container with --pids-limit=-1: every rank has dozens of threads"
        rows.append(Row(id="pids-limit", group="host", light="yellow", what=what, fix=fix))
    return rows


def _cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count()


def _least(root: Path, files: Mapping[str, tuple[str, str]], read: Callable[[Path], float | None]) -> float | None:
    """The narrowest limit from our own group up to the root. `files`: controller → folder below the mount, and name."""
    found: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
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
    words = _read(path).split()
    period = words[1] if len(words) > 1 else _read(path.with_name("cpu.cfs_period_us")).strip()
    if not words or not re.fullmatch("[0-9]{1,15}", words[0]) or not re.fullmatch("[0-9]{1,15}", period):
        return None
    return int(words[0]) / int(period) if int(period) and int(words[0]) else None


def _count(path: Path) -> float | None:
    text = _read(path).strip()
    return float(text) if re.fullmatch("[0-9]{1,15}", text) else None


# --- NUMA ---------------------------------------------------------------------------------------


def _numa(root: Path) -> list[Row]:
    nodes = [path.name for path in root.glob("sys/devices/system/node/node[0-9]*")]
    if len(nodes) < 2:
        return []
    what = f"NUMA: {len(nodes)} nodes; memory of another node is slower for offloaded optimizers"
    fix = "with offload, bind each rank to the node of its GPU: deepspeed --bind_cores_to_rank"
    return [Row(id="numa", group="host", light="green", what=what, fix=fix)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
