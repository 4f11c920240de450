"""Faults for the tests: a rank breaks down at a chosen stage and step, as real ones do.

Off unless the tests' own variable names some and this folder is where Python looks:

    PYTHONPATH=tests TIGHTFIT_FAULTS="device-oom@rank=1,stage=forward,step=3; kill@rank=0,stage=write,step=4,repeat"

A fault happens once in a run, told by a file in the run's folder, so that the next attempt gets past it; with `repeat`
it happens every time. Exceptions have the types and the words of the real ones. What can be real here is: memory that
a limit refuses, a process that the kernel kills for want of memory, a full disk, SIGKILL, a thread that stands still,
a kernel that does not end (on a GPU), numbers that are none.

The stages are those of the heartbeat, and `write`: in the middle of writing a checkpoint, in the thread that does so.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tightfit.formats.worker.read import find_worker
from tightfit.runs import disk
from tightfit.train.build import body_of
from tightfit.types import ConfigError

MIB = 2**20
FAULTS = "faults"
WRITE = "write"
GROUPS = Path("/sys/fs/cgroup")
MOST_TO_FILL = 1024 * MIB
"""Only a disk with less left than this is filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    what: str
    rank: int
    stage: str
    step: int
    repeat: bool = False


class Faults:
    """Those of one rank."""

    def __init__(self, faults: list[tuple[int, InjectedFault]], run: Path) -> None:
        """Each with its number among all of the run's."""
        self._faults, self._run, self._saving = faults, run, 0
        if any(fault.stage == WRITE for _, fault in faults):
            # After bytes of a checkpoint have gone to the disk, and before it stands.
            sync = disk.sync

            def syncing(descriptor: int) -> None:
                sync(descriptor)
                self.at(WRITE, self._saving)

            disk.__dict__["sync"] = syncing

    def at(self, stage: str, step: int, model: Any = None) -> None:
        if stage == "save":
            self._saving = step
        for number, fault in self._faults:
            if (fault.stage, fault.step) != (stage, step):
                continue
            if not fault.repeat:
                marker = self._run / FAULTS / str(number)
                marker.parent.mkdir(exist_ok=True)
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    continue
            happen(fault.what, self._run, model)


def read_faults(text: str, run: Path, rank: int) -> Faults:
    """This rank's of all that the text names."""
    faults = []
    for number, word in enumerate(word.strip() for word in text.split(";") if word.strip()):
        what, _, rest = word.partition("@")
        said = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        try:
            repeat = said.pop("repeat", None) is not None
            where = {"rank": int(said.pop("rank")), "step": int(said.pop("step"))}
            fault = InjectedFault(what=what, stage=said.pop("stage"), repeat=repeat, **where)
        except (KeyError, ValueError):
            raise ConfigError(f"the fault {word!r} is not KIND@rank=N,stage=S,step=N: mend it") from None
        if said or what not in (*ERRORS, *DEEDS):
            raise ConfigError(f"there is no fault {word!r}: the kinds are {', '.join((*ERRORS, *DEEDS))}")
        if fault.rank == rank:
            faults.append((number, fault))
    return Faults(faults, run)


# --- words of GPUs and their libraries ------------------------------------------------------------

_CUDA = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
_ACCELERATOR: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


def _out_of_memory(
    asked: str, free: str, own: str, tensors: str, pieces: str, others: str = "", total: str = "4.00 GiB"
) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is "
        f"free. {others}Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory "
        f"{tensors} is allocated by PyTorch, and {pieces} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management"
    )


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "fragmentation": (
        torch.OutOfMemoryError,
        _out_of_memory("20.00 MiB", "10.00 MiB", "3.99 GiB", "3.50 GiB", "464.00 MiB"),
    ),
    "other-process": (
        torch.OutOfMemoryError,
        _out_of_memory(
            "512.00 MiB",
            "96.00 MiB",
            "820.00 MiB",
            "400.00 MiB",
            "12.00 MiB",
            "Process 4711 has 3.10 GiB memory in use. ",
        ),
    ),
    "shared-memory": (
        RuntimeError,
        "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit.",
    ),
    "nccl": (
        dist.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error. \nLast error:\nsocketPollConnect: connect to 10.0.0.2<41234> "
        "returned Connection refused, exceeded error retry count after 35 attempts",
    ),
    "nccl-timeout": (
        dist.DistBackendError,
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=118, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=1800000) ran for 1800012 milliseconds before timing out.",
    ),
    "ecc": (_ACCELERATOR, f"CUDA error: uncorrectable ECC error encountered{_CUDA}"),
    "gpu-lost": (
        RuntimeError,
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this "
        "GPU",
    ),
    "cuda": (_ACCELERATOR, f"CUDA error: unknown error{_CUDA}"),
    "bug": (KeyError, "no_such_field"),
}
"""What is only said."""


def _device_oom(run: Path, model: Any) -> NoReturn:
    """The plan was right, and the card has a little less than it should; without a plan, it is a card of 4 GiB."""
    predicted = find_worker(run / "plan").get("predicted")
    held = 3.9 * 2**10 if predicted is None else predicted["gpu"]["peak_bytes"] / 2**20
    own, tensors, total = (f"{held + more:.2f} MiB" for more in (80, 0, 96))
    raise torch.OutOfMemoryError(_out_of_memory("24.00 MiB", "16.00 MiB", own, tensors, "20.00 MiB", total=total))


def _pin(run: Path, model: Any) -> NoReturn:
    def pin_memory() -> NoReturn:
        raise _ACCELERATOR(f"CUDA error: out of memory{_CUDA}")

    pin_memory()


# --- what really happens --------------------------------------------------------------------------


def _host_oom(run: Path, model: Any) -> None:
    """The system refuses memory beyond a limit of this process: more than it has freed and could use again."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16 * MIB, before[1]))
    try:
        torch.empty(4096 * MIB, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _outgrow_group(run: Path, model: Any) -> NoReturn:
    """The kernel kills this process, as the one that goes beyond the limit of a memory group."""
    old = (GROUPS / "memory").is_dir()
    group = GROUPS / ("memory" if old else "") / f"tightfit-fault-{os.getpid()}"
    group.mkdir()
    limit = "memory.limit_in_bytes" if old else "memory.max"
    (group / limit).write_text(str(32 * MIB), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    held = [bytearray(os.urandom(MIB)) for _ in range(1024)]
    raise RuntimeError(f"the kernel let this process have {len(held)} MiB beyond its limit")


def _disk_full(run: Path, model: Any) -> NoReturn:
    """The disk is full until this process ends: the file has no name any more."""
    if disk.room(run) > MOST_TO_FILL:
        raise ConfigError(f"{run} is on a disk that is no test's: nothing was filled")
    path = run / "filling"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    path.unlink()
    while True:
        try:
            os.write(descriptor, bytes(MIB))
        except OSError as error:
            error.filename = str(path)
            raise


def _hang(run: Path, model: Any) -> None:
    time.sleep(10**6)  # by name, so that the stack of a rank that hangs says so


def _gpu_hang(run: Path, model: Any) -> NoReturn:
    """A kernel that does not end: the thread that trains waits for it inside the driver, and the GPU looks busy."""
    torch.cuda._sleep(2**62)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    raise RuntimeError("the kernel ended after all")


def _nan(run: Path, model: Any) -> None:
    """The next batch is poisoned where it enters the model."""

    def poison(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return output * float("nan")

    hook = body_of(model).get_input_embeddings().register_forward_hook(poison)


DEEDS: dict[str, Callable[[Path, Any], None]] = {
    "device-oom": _device_oom,
    "pinned": _pin,
    "host-oom": _host_oom,
    "host-oom-killed": _outgrow_group,
    "disk-full": _disk_full,
    "kill": lambda run, model: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _hang,
    "gpu-hang": _gpu_hang,
    "nan": _nan,
}


def happen(what: str, run: Path, model: Any) -> None:
    """The fault of this kind, here and now."""
    if what in ERRORS:
        kind, text = ERRORS[what]
        raise kind(text)
    DEEDS[what](run, model)
