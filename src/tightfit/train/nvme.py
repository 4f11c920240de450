"""What DeepSpeed keeps in files on an NVMe: weights, and the optimizer's states.

A parameter's part is in memory only while it is used. Between uses its tensor is a stand-in of one element, and the
part is in a swap file, which DeepSpeed's swapper reads into one of a few locked buffers. Whoever wants to read or to
change such a part borrows one of these buffers (`resident`), and the swapper's own books stay right: we read and write
through it, and never the files themselves, whose names and padding are its own affair.

The optimizer's files hold an fp32 copy and the moments of a sub group of parameters (`nvme_states`). Parts that are
smaller than a mebibyte are not swapped; both functions hand them out as they lie in memory.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightfit.messages import Message, say_why
from tightfit.owned import Patterns, find_strangers, flock, remove_folder
from tightfit.types import Buckets, Levers, UserError

SWAP_FILES = Patterns(r".*\.swp", r".*")  # what DeepSpeed writes below a rank's folder
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
MEBIBYTE, GIBIBYTE = 2**20, 2**30
CAN_LOCK = 1 << 14  # CAP_IPC_LOCK, among the capabilities of a process: it locks as much memory as it likes


class NvmeError(UserError):
    """What NVMe offload needs is not there."""


def on_nvme(levers: Levers) -> bool:
    return "nvme" in (levers.offload_optimizer, levers.offload_param)


def open_nameless(folder: Path) -> int:
    """A new file there that is read and written past the page cache, and ends with its process: its number."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".direct-", dir=folder)
    except OSError as error:
        raise NvmeError(Message("train.nvme-unwritable", folder=folder, why=say_why(error))) from None
    os.close(number)
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        raise NvmeError(Message("train.nvme-no-direct-io", folder=folder)) from None
    finally:
        os.unlink(name)


def check_room(folders: Collection[Path], file_bytes: int) -> None:
    """Refuse folders that have less."""
    has = sum(shutil.disk_usage(folder).free for folder in folders)
    if has < file_bytes:
        said = {"need": file_bytes / GIBIBYTE, "free": has / GIBIBYTE}
        raise NvmeError(Message("train.nvme-too-small", path=", ".join(sorted(map(str, folders))), **said))


def check_folder(folder: Path, file_bytes: int) -> None:
    """Refuse at once what could not hold files of all ranks that are on this node; nothing stays there."""
    os.close(open_nameless(folder))
    check_room([folder], file_bytes)


def check(deepspeed: Mapping[str, Any], rank: int, *, trained: int, world: int, file_bytes: int) -> None:
    """Refuse what would fail later without a word that helps; nothing is built for it. `trained`: how many numbers each
    of the `world` ranks trains; `file_bytes`: of all ranks that are on this node. The folders are this process's until
    it ends."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    folders = _folders(deepspeed)
    for folder in folders:
        os.close(open_nameless(folder))  # DeepSpeed reads and writes past the page cache, which not every system can
        # DeepSpeed empties the folders for its swap files without a look at what lies there.
        for place in (folder / "zero_stage_3", *folder.glob("zero_stage_3/*")):
            if place.is_symlink():
                raise NvmeError(Message("train.nvme-link", place=place))
        for place in folder.glob(f"zero_stage_3/*/rank{rank}"):
            if strangers := find_strangers(place, SWAP_FILES):
                raise NvmeError(Message("train.nvme-stranger", path=strangers[0]))
        # Swap files are named after ranks alone: two runs in one folder would read each other's numbers.
        lock = os.open(folder / f".rank{rank}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if flock(lock, wait=False) == "busy":  # else the process holds it open, and so locked, to its end
            os.close(lock)
            raise NvmeError(Message("train.nvme-in-use", folder=folder))
    left = 0  # by an earlier run, and written over: its room counts as free
    for path in (path for folder in folders for path in folder.glob("zero_stage_3/*/rank*/*.swp")):
        with suppress(OSError):
            left += path.stat().st_blocks * 512
    check_room(folders, file_bytes - left)
    # At least: buffers for weights, of 16 bits or more, and for the optimizer's sub groups, of 32.
    zero, usual = deepspeed["zero_optimization"], Buckets()
    group = min(int(zero.get("sub_group_size", usual.sub_group_size)), trained)
    param, optimizer = zero.get("offload_param", {}), zero.get("offload_optimizer", {})
    locked = 0
    if param.get("device") == "nvme":
        locked += 2 * int(param.get("buffer_count", usual.param_buffer_count) * param["buffer_size"])
        locked += 2 * group * world  # DeepSpeed locks a sub group whole, on every rank
    if optimizer.get("device") == "nvme":
        locked += 4 * optimizer.get("buffer_count", usual.optimizer_buffer_count) * group
    # Buffers are locked in memory; where that is not allowed DeepSpeed aborts.
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < locked and not _may_lock():
        raise NvmeError(Message("train.nvme-memlock", locked=locked / MEBIBYTE, limit=limit / MEBIBYTE))
    if shutil.which("c++") is None:
        raise NvmeError(Message("train.nvme-needs-compiler"))
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise NvmeError(Message("train.nvme-needs-libaio"))


def load() -> None:
    """Compile DeepSpeed's file operations; the first time it takes about two minutes."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise NvmeError(Message("train.nvme-did-not-build", why=reason)) from error


def _folders(deepspeed: Mapping[str, Any]) -> set[Path]:
    zero = deepspeed["zero_optimization"]
    blocks = (zero.get("offload_param", {}), zero.get("offload_optimizer", {}))
    return {Path(block["nvme_path"]) for block in blocks if block.get("device") == "nvme"}


def _may_lock() -> bool:
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & CAN_LOCK)
    return False


def discard(deepspeed: Mapping[str, Any], rank: int) -> None:
    """Remove this rank's swap files; they are worth nothing to anybody else, and as large as the training."""
    for folder in _folders(deepspeed):
        for files in folder.glob(f"zero_stage_3/*/rank{rank}"):
            with suppress(OSError):
                remove_folder(files, SWAP_FILES)


def is_on_nvme(param: Any) -> bool:
    """Whether this rank's part of a parameter rests in a file."""
    place: object = getattr(getattr(param, "ds_tensor", None), "final_location", None)
    return place == "nvme"


@contextmanager
def resident(param: Any, *, write: bool) -> Iterator[None]:
    """A parameter's part in memory, at its `ds_tensor`; `write`: what is changed meanwhile goes back to the file."""
    if not is_on_nvme(param):
        yield
        return
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    swapper, part = param.nvme_swapper, param.ds_tensor
    if part.status == PartitionedParamStatus.INFLIGHT:  # fetched ahead for a pass that did not come
        swapper.synchronize_reads()
    with ExitStack() as release:
        if part.status != PartitionedParamStatus.AVAILABLE:
            swapper.swap_in([param], async_op=False)
            release.callback(swapper.remove_partition_and_release_buffers, [param])
        yield
        if write:
            swapper.swap_out_and_release([param])
            release.pop_all()


def nvme_states(wrapper: Any, write: bool) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every sub group of a ZeRO-3 optimizer with its flat fp32 tensors: `master`, `exp_avg`, `exp_avg_sq`.

    A sub group is in memory until the next one is asked for. `write`: what was changed goes back to the files, and
    moments that do not exist before the first step are made, as zeros; otherwise they are left out. Not between a
    backward pass and its step: gradients lie in the same buffers.
    """
    for number, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        in_file = wrapper._swappable_optimizer_subgroup(number)
        with ExitStack() as release:
            if in_file:
                wrapper._optimizer_states_and_gradient_swap_in(number)
                release.callback(wrapper._release_swap_buffers, number)
            if write:
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                if isinstance(wrapper.optimizer, DeepSpeedCPUAdam) and not wrapper.optimizer.state.get(master):
                    zeros = {name: torch.zeros_like(master.data, dtype=torch.float32) for name in MOMENTS}
                    wrapper.optimizer.state[master] = {"step": 0, **zeros}
            state = wrapper.optimizer.state.get(master, {})
            yield number, {"master": master.data} | {name: state[name].data for name in MOMENTS if name in state}
            if in_file and write:
                wrapper._optimizer_states_and_gradient_swap_out(number)
                release.pop_all()
