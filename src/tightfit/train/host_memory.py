"""Host memory of exactly the size that is asked for, locked so that a GPU copies to and from it by itself.

PyTorch's own pinned memory comes in powers of two: of 100 GiB it would take 128. Here pages are mapped and registered
with the driver as they are.

Ranks of one machine may share it. It is then one file without a name, of which every rank maps the same parts in the
same order: a container's /dev/shm, which is small, has nothing to do with it. Each rank touches some of it first, so
that it lies on the NUMA nodes of all. A rehearsed rank has such a file too, and all of it: the system then tells what
the ranks of a real training would share.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tightfit.messages import Message
from tightfit.train.place import Place, everyone, meet
from tightfit.types import ConfigError

HUGE = 2 * 2**20  # bytes of a huge page


class NotLocked(ConfigError):
    """The system lets no more memory be locked."""

    def __init__(self, locked_bytes: int, needed_bytes: int, *, may_stay: bool = False) -> None:
        """`may_stay`: less is needed with more layers on the GPU."""
        said = {"locked": locked_bytes / 2**30, "needed": needed_bytes / 2**30}
        super().__init__(Message("train.cannot-lock-layers" if may_stay else "train.cannot-lock-all", **said))
        self.locked_bytes, self.needed_bytes = locked_bytes, needed_bytes


class HostMemory:
    """What this rank, or all ranks of this machine together, take of it."""

    locked = 0
    """Bytes that the driver has locked for this process, of all that was taken."""

    def __init__(self, place: Place, *, shared: bool) -> None:
        self._locks, self._device, self._place = place.on_gpu, place.device, place
        self._file = share_file(place) if shared else None
        self._pages: dict[int, mmap.mmap] = {}  # by their address
        self.taken = 0

    def take(self, size: int, *, lock: bool = True) -> Tensor:
        """`size` bytes, all zero."""
        length = -(-max(size, 1) // HUGE) * HUGE
        if self._file is None:
            pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._touch_part(self._file, length // HUGE)
            pages = mmap.mmap(self._file, length, offset=self.taken)
        with suppress(OSError, AttributeError):  # it is faster with them, no more
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.taken += length
        made = torch.frombuffer(pages, dtype=torch.uint8).fill_(0)  # by all cores: the driver would touch page by page
        self._pages[made.data_ptr()] = pages
        if lock and self._locks:
            if not register(made, self._device):
                raise NotLocked(HostMemory.locked, HostMemory.locked + length)
            HostMemory.locked += length
        return made[:size]

    def give_back(self, memory: Tensor, *, locked: bool = True) -> None:
        """What `take` gave, and nobody reads any more; the system has it when the last tensor on it is gone. Of shared
        memory it has it as soon as every rank has given it back; its place in the file stays empty."""
        pages = self._pages.pop(memory.data_ptr())
        if locked and self._locks:
            unregister(memory, self._device)
            HostMemory.locked -= len(pages)
        if self._file is not None:
            meet(self._place)
            pages.madvise(mmap.MADV_REMOVE)

    def _touch_part(self, file: int, pages: int) -> None:
        """This rank's of so many huge pages; when all have theirs, none is touched by another first."""
        rank, ranks = (0, 1) if self._place.is_alone else (self._place.rank, self._place.world)
        begin, end = (pages * each // ranks for each in (rank, rank + 1))
        if begin < end:
            os.posix_fallocate(file, self.taken + begin * HUGE, (end - begin) * HUGE)
        meet(self._place)


def register(memory: Tensor, device: torch.device) -> bool:
    """Lock these pages for the GPU; whether that was possible. No page may be registered twice."""
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(driver.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    with suppress(RuntimeError):  # the next kernel would be told this error as its own
        torch.zeros(1, device=device)
    return False


def unregister(memory: Tensor, device: torch.device) -> None:
    """Before the system has these pages again: what comes to lie at their address could not be registered."""
    torch.cuda.synchronize(device)  # copies from there and to there are over
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(memory.data_ptr())


def share_file(place: Place) -> int:
    """A file of the first rank's, which has no name; every rank has it open."""
    number = os.memfd_create("tightfit") if place.rank == 0 or place.is_alone else -1
    if place.is_alone:
        return number
    (pid, *_), (there, *_) = everyone(place, os.getpid()), everyone(place, number)
    if place.rank:
        number = os.open(f"/proc/{pid}/fd/{there}", os.O_RDWR)
    meet(place)
    return number
