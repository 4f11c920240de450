"""What the host reaches: copies to and from the card, its optimizer, its memory, its disk."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tightfit.hardware.machine import free_ram
from tightfit.inputs.surroundings import cores
from tightfit.measure.bench import Bench, Found
from tightfit.messages import Message

MIB, GIB = 2**20, 2**30
SPARE = 4
"""A part takes at most one part in so many of the RAM that is free."""


class NotHere(Exception):
    """Why a part cannot be measured on this machine."""

    def __init__(self, said: Message) -> None:
        super().__init__(said)
        self.said = said


def _room(bench: Bench) -> int:
    """Bytes of RAM that this rank may take."""
    free = free_ram()
    return (GIB if free is None else free) // (SPARE * bench.world)


# --- copies between host and card -----------------------------------------------------------------


def host_link(bench: Bench) -> Found:
    """Bytes/s of pinned copies, the mean of both directions; one card alone, and each while all copy."""
    if not bench.on_gpu:
        raise NotHere(Message("measure.no-gpu-here"))
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
    take = make(weight)
    take()  # the first one makes its states

    def step() -> float:
        found = []
        for _ in range(4 if bench.quick else 12):
            began = time.perf_counter()
            take()
            found.append(time.perf_counter() - began)
        return numel / min(found)  # a step is milliseconds here: a neighbour on a rented host slows some of them

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


def _find_adam() -> tuple[Callable[[torch.nn.Parameter], Callable[[], object]], str]:
    """What makes a step for a weight: DeepSpeed's, if it is compiled already, or torch's own. Nothing is ever compiled
    for this, and DeepSpeed not imported, which takes as long as the whole measurement may."""
    with suppress(Exception):  # whatever a part of another version raises
        if (compiled := _compiled_adam()) is not None:
            step = _deepspeed_step(compiled, torch.nn.Parameter(torch.zeros(1024)))
            step()
            return partial(_deepspeed_step, compiled), "DeepSpeedCPUAdam"
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    except RuntimeError:  # before torch 2.4 the host has none
        return (lambda weight: torch.optim.AdamW([weight], foreach=True).step), "torch AdamW"
    return (lambda weight: torch.optim.AdamW([weight], fused=True).step), "torch fused AdamW"


def _deepspeed_step(compiled: Any, weight: torch.nn.Parameter) -> Callable[[], object]:
    """As DeepSpeedCPUAdam calls it: weights, gradients and both moments in fp32."""
    usual = (1e-3, 0.9, 0.999, 1e-8, 0.01)
    grad = torch.full_like(weight.data, 1e-3) if weight.grad is None else weight.grad
    first, second = (torch.zeros_like(weight.data) for _ in range(2))
    compiled.create_adam(0, *usual, True, False)
    return lambda: compiled.adam_update(0, 1, *usual, True, weight.data, grad, first, second)


def _compiled_adam() -> Any:
    """DeepSpeed's part, loaded from where it was compiled: at its first use, or when DeepSpeed was installed."""
    installed = find_spec("deepspeed")
    if installed is None or installed.origin is None:
        return None
    from torch.utils.cpp_extension import _get_build_directory

    places = [Path(_get_build_directory("cpu_adam", False)) / "cpu_adam.so"]
    places += Path(installed.origin).parent.glob("ops/adam/cpu_adam_op*.so")
    for place in filter(Path.is_file, places):
        spec = spec_from_file_location(place.name.partition(".")[0], place)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


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
        raise NotHere(Message("measure.little-room", folder=str(folder), least=ROOM // GIB))
    if _kind_of(folder) in IN_MEMORY:
        raise NotHere(Message("measure.in-memory", folder=str(folder)))
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
