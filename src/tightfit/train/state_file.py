"""States of units in a raw file, where the host's memory has no room for them all.

Two buffers hold two units' states: while one unit is updated the next one's are read into the other buffer, past the
page cache, and what was updated is written back behind it. A unit always has the same buffer, so that its tensors have
fixed addresses. All the room is claimed and written to before the training starts, so that a disk which fills up later
has room for it still; unless a file system writes elsewhere whatever it changes, and then the run ends with a sentence.
The file has no name: it ends with its process, however that ends, and a run goes on from its checkpoints, which hold
all of it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from tightfit.memory.units import BUFFERS
from tightfit.messages import Message, say_why
from tightfit.train.host_states import pad
from tightfit.train.nvme import GIBIBYTE, NvmeError, open_nameless

ALIGNMENT = 4096  # of offsets, sizes and addresses, for direct I/O
CHUNK, AT_ONCE = 8 * 2**20, 8  # bytes that one request moves, and requests under way: an NVMe wants several


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Buffer:
    """Memory for one unit's states, and what is being read or written there, in this order."""

    def __init__(self, memory: Tensor) -> None:
        if memory.data_ptr() % ALIGNMENT:
            raise ValueError(f"direct I/O wants memory at multiples of {ALIGNMENT}")
        self.memory, self.bytes = memory, memory.numpy().data
        self.holds: int | None = None
        self._queue, self._pending = ThreadPoolExecutor(1), list[Future[None]]()

    def submit(self, work: Callable[[int, memoryview], None], offset: int, size: int) -> None:
        self._pending.append(self._queue.submit(work, offset, self.bytes[:size]))

    def wait(self) -> None:
        """Until nothing is under way; what failed is raised here, whenever somebody asks: nothing after it counts."""
        while self._pending:
            self._pending[0].result()
            del self._pending[0]

    def close(self) -> None:
        self._queue.shutdown()


class StateFile:
    def __init__(self, folder: Path, sizes: Sequence[int], allocate: Callable[[int], Tensor]) -> None:
        """`sizes`: bytes of each unit's states (`host_states.count_bytes`); `allocate` gives memory for the buffers, at
        an address of whole pages."""
        self._folder, self._sizes = folder, [align(size) for size in sizes]
        self._offsets = [0, *accumulate(self._sizes)]
        self._file = open_nameless(folder)
        try:
            os.posix_fallocate(self._file, 0, self._offsets[-1])
        except OSError as error:
            os.close(self._file)
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise NvmeError(Message("train.nvme-unwritable", folder=folder, why=say_why(error))) from None
            said = {"need": self._offsets[-1] / GIBIBYTE, "free": shutil.disk_usage(folder).free / GIBIBYTE}
            raise NvmeError(Message("train.nvme-too-small", path=folder, **said)) from None
        self._requests = ThreadPoolExecutor(AT_ONCE)
        self._buffers = [
            Buffer(allocate(max(self._sizes[number::BUFFERS]))) for number in range(min(BUFFERS, len(sizes)))
        ]

    def room(self, unit: int) -> Callable[[int], Tensor]:
        """What a unit's `HostStates` allocates with: pieces of its buffer, one after the other."""
        memory, taken = self._buffer(unit).memory[: self._sizes[unit]], 0

        def allocate(size: int) -> Tensor:
            nonlocal taken
            begin, taken = taken, taken + pad(size)
            if taken > memory.numel():
                raise ValueError(f"unit {unit} has {memory.numel()} bytes and wants {taken}")
            return memory[begin : begin + size]

        return allocate

    @contextmanager
    def resident(self, unit: int, *, write: bool, then: int | None = None) -> Iterator[None]:
        """A unit's states in memory. `write`: what is changed meanwhile goes back to the file; `then`: the unit whose
        turn is next. What could not be read or written before is raised here."""
        buffer = self._buffer(unit)
        self._fetch(unit)
        buffer.wait()
        if then is not None and self._buffer(then) is not buffer:
            self._fetch(then)
        yield
        if write:
            buffer.submit(self._write, self._offsets[unit], self._sizes[unit])
        if then is not None:
            self._fetch(then)

    def wait(self) -> None:
        """Until all that was changed is in the file."""
        for buffer in self._buffers:
            buffer.wait()

    def close(self) -> None:
        """When all that is under way has ended; the file is gone then."""
        try:
            self.wait()
        finally:
            for buffer in self._buffers:
                buffer.close()
            self._requests.shutdown()
            os.close(self._file)

    def _buffer(self, unit: int) -> Buffer:
        return self._buffers[unit % BUFFERS]

    def _fetch(self, unit: int) -> None:
        buffer = self._buffer(unit)
        if buffer.holds != unit:
            buffer.holds = unit
            buffer.submit(self._read, self._offsets[unit], self._sizes[unit])

    def _read(self, offset: int, into: memoryview) -> None:
        self._move(lambda part, at: os.preadv(self._file, [part], at), offset, into)

    def _write(self, offset: int, source: memoryview) -> None:
        self._move(lambda part, at: os.pwritev(self._file, [part], at), offset, source)

    def _move(self, request: Callable[[memoryview, int], int], offset: int, memory: memoryview) -> None:
        def move(begin: int) -> None:
            end = min(begin + CHUNK, len(memory))
            while begin < end:
                moved = request(memory[begin:end], offset + begin)
                if not moved:
                    raise OSError(errno.EIO, f"the file of the states ends at {offset + begin}")
                begin += moved

        try:
            for done in [self._requests.submit(move, begin) for begin in range(0, len(memory), CHUNK)]:
                done.result()
        except OSError as error:
            raise NvmeError(Message("train.nvme-failed", folder=self._folder, why=say_why(error))) from error
