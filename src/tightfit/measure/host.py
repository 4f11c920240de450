"""What the host reaches: copies to and from the card, its optimizer, its memory, its disk."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tightfit.hardware.machine import free_ram
from tightfit.inputs.surroundings import cores
from tightfit.measure.bench import Bench, Found

MIB, GIB = 2**20, 2**30
SPARE = 4
"""A part takes at most one part in so many of the RAM that is free."""


class NotHere(Exception):
    """Why a part cannot be measured on this machine, in words."""


def _room(bench: Bench) -> int:
    """Bytes of RAM that this rank may take."""
    free = free_ram()
    return (GIB if free is None else free) // (SPARE * bench.world)


# --- copies between host and card -----------------------------------------------------------------


def host_link(bench: Bench) -> Found:
    """Bytes/s of pinned copies, the mean of both directions; one card alone, and each while all copy."""
    if not bench.on_gpu:
        raise NotHere("there is no GPU")
    size = min((64 if bench.quick else 256) * MIB, _room(bench))
    there = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(size, dtype=torch.uint8, device=bench.device)

    def copy() -> dict[str, float]:
        budget_s = 0.15 if bench.quick else 0.5
        seconds = {
            "to_card": bench.seconds(lambda: here.copy_(there, non_blocking=True), budget_s),
            "to_host": bench.seconds(lambda: there.copy_(here, non_blocking=True), budget_s),
        }
        return {name: size / each for name, each in seconds.items()}

    alone = bench.alone(copy)
    each = bench.together(copy) if bench.world > 1 else alone
    rates = {} if alone is None else {"host_link": sum(alone.values()) / 2}
    if each is not None:
        rates["host_link_together"] = sum(each.values()) / 2
    return Found(rates=rates, raw={"bytes": size, "alone": alone, "together": each})


# --- the host's optimizer -------------------------------------------------------------------------


def host_optimizer(bench: Bench) -> Found:
    """Parameters/s of Adam on the host: one rank with every core, and all ranks with their share of them."""
    most = (10_000_000 if bench.slow else 25_000_000) if bench.quick else 50_000_000
    numel = max(1_000_000, min(most, _room(bench) // 16))
    make, name = _find_adam()
    weight = torch.nn.Parameter(torch.zeros(numel))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = make(weight)
    optimizer.step()  # the first one makes its states

    def step() -> float:
        found = []
        for _ in range(3 if bench.quick else 6):
            began = time.perf_counter()
            optimizer.step()
            found.append(time.perf_counter() - began)
        return numel / median(found)

    shared = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        alone = bench.alone(step)
    finally:
        torch.set_num_threads(shared)
    each = bench.together(step) if bench.world > 1 else alone
    rates = {} if alone is None else {"host_optimizer": alone}
    if each is not None:
        rates["host_optimizer_together"] = each  # of this rank: whoever asked adds them up
    raw = {"optimizer": name, "parameters": numel, "threads": shared, "alone": alone, "together": each}
    return Found(rates=rates, raw=raw)


def _find_adam() -> tuple[Callable[[torch.nn.Parameter], Any], str]:
    """DeepSpeed's, if it is compiled already; or torch's own. Nothing is ever compiled for this."""
    with suppress(Exception):  # whatever a half-installed DeepSpeed raises
        if (module := _compiled_adam()) is not None:
            from deepspeed.ops.adam import cpu_adam

            cpu_adam.CPUAdamBuilder.load = lambda *_, **__: module
            return (lambda weight: cpu_adam.DeepSpeedCPUAdam([weight], adamw_mode=True)), "DeepSpeedCPUAdam"
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    except RuntimeError:  # before torch 2.4 the host has none
        return (lambda weight: torch.optim.AdamW([weight], foreach=True)), "torch AdamW"
    return (lambda weight: torch.optim.AdamW([weight], fused=True)), "torch fused AdamW"


def _compiled_adam() -> Any:
    """DeepSpeed's part, loaded from where it was compiled; None: it never was."""
    if find_spec("deepspeed") is None:
        return None
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory("cpu_adam", False))
    if not (folder / "cpu_adam.so").is_file():
        if not list(Path(str(find_spec("deepspeed").origin)).parent.glob("ops/adam/*cpu_adam*.so")):  # type: ignore[union-attr]
            return None
        from deepspeed.ops.adam import cpu_adam_op  # compiled when DeepSpeed was installed

        return cpu_adam_op
    return cpp_extension._import_module_from_library("cpu_adam", str(folder), True)  # type: ignore[no-untyped-call]


# --- the host's memory ----------------------------------------------------------------------------


def host_memory(bench: Bench) -> Found:
    """Bytes/s read and written by a copy, while all ranks copy."""
    size = max(8 * MIB, min((64 if bench.quick else 256) * MIB, _room(bench) // 2))
    here, there = (torch.ones(size, dtype=torch.uint8) for _ in range(2))

    def copy() -> float:
        found = []
        for _ in range(5 if bench.quick else 15):
            began = time.perf_counter()
            there.copy_(here)
            found.append(time.perf_counter() - began)
        return 2 * size / median(found)

    copy()
    each = bench.together(copy)
    return Found(rates={"host_memory": each}, raw={"bytes": size, "together": each})


# --- the disk -------------------------------------------------------------------------------------

CHUNK = 8 * MIB
ROOM = 20 * GIB  # a disk with less left is not written to
IN_MEMORY = ("tmpfs", "ramfs")


def nvme(bench: Bench, folder: Path) -> Found:
    """Bytes/s written, with what it takes to be safe, and read again; past the system's cache where that can be."""
    found = bench.alone(lambda: _disk(bench, folder))
    if found is None:
        return Found(rates={}, raw=None)
    return Found(rates={"nvme_write": found["write"], "nvme_read": found["read"]}, raw=found)


def _disk(bench: Bench, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    told = os.statvfs(folder)
    if told.f_bavail * told.f_frsize < ROOM:
        raise NotHere(f"{folder} has less than {ROOM // GIB} GiB free")
    if _kind_of(folder) in IN_MEMORY:
        raise NotHere(f"{folder} is kept in memory")
    chunks = (GIB // 2 if bench.slow else GIB) // CHUNK
    buffer = mmap.mmap(-1, CHUNK)  # starts at a page, as direct writing wants it
    buffer.write(os.urandom(CHUNK))
    direct = getattr(os, "O_DIRECT", 0)
    # Without a name from the first byte on: nothing is left behind, even by a process that is killed.
    made = os.O_RDWR | getattr(os, "O_TMPFILE", 0)
    try:
        file = os.open(folder, made | direct, 0o600)
    except OSError:  # not on this disk: a name that is gone before anything is written
        direct, place = 0, folder / f".measure-{os.getpid()}"
        file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        place.unlink()
    try:
        deadline, done = time.perf_counter() + 4.0, 0
        began = time.perf_counter()
        while done < chunks and time.perf_counter() < deadline:
            os.write(file, buffer)
            done += 1
        os.fsync(file)
        write = done * CHUNK / (time.perf_counter() - began)
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, os.SEEK_SET)
        deadline, count = time.perf_counter() + 3.0, 0
        began = time.perf_counter()
        while count < done and time.perf_counter() < deadline:
            os.readv(file, [buffer])
            count += 1
        read = count * CHUNK / (time.perf_counter() - began)
    finally:
        os.close(file)
        buffer.close()
    return {"folder": str(folder), "direct": bool(direct), "bytes": done * CHUNK, "write": write, "read": read}


def _kind_of(folder: Path) -> str | None:
    """The kind of file system: that of the deepest mount above it."""
    kinds: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            cells = line.split()
            if len(cells) > 2:
                kinds[cells[1]] = cells[2]
    return next((kinds[str(place)] for place in (folder, *folder.parents) if str(place) in kinds), None)
