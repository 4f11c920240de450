"""The file-system calls by which a checkpoint comes to be, each in one place.

Nothing that a save does to the disk goes around this module: a test stops the process after each of these calls in
turn, and the newest whole checkpoint must be found every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tightfit import owned
from tightfit.owned import Ours

WRITE_BYTES = 2**20  # at a time: a call may hold the file for as long as it takes, and ranks write to the same one


def make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def make_new_folder(path: Path) -> None:
    """One that is ours from its first moment."""
    path.mkdir()


def create(path: Path, size: int) -> int:
    """A new file of that size. Its blocks are taken as they are written: to take them first is slow on network disks,
    and whoever writes much looks at `room` before."""
    descriptor = owned.open_new(path)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_write(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def put(descriptor: int, data: memoryview, offset: int) -> None:
    """All of it, however often the system has to be asked."""
    begin, size = offset, data.nbytes
    while data:
        count = os.pwrite(descriptor, data[:WRITE_BYTES], offset)
        data, offset = data[count:], offset + count
    if size >= WRITE_BYTES and hasattr(os, "posix_fadvise"):
        # The disk begins to write now, while the next bytes are made ready, and little is left for `sync` to wait for.
        with suppress(OSError):
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def write_text(path: Path, text: str) -> None:
    """A small file, whole, and on the disk when this returns."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Likewise."""
    descriptor = create(path, 0)
    try:
        put(descriptor, memoryview(data), 0)
        sync(descriptor)
    finally:
        os.close(descriptor)


def by_library(write: Callable[[Path], object], folder: Path) -> None:
    """Small files that a library knows how to write. It does not sync them: whoever calls does, with `sync_path`."""
    write(folder)


def sync_path(path: Path) -> None:
    """A file that others have written, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    old.rename(new)


def remove_file(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path, names: Ours, *, last: str = "") -> None:
    """What of it is ours; the rest stays, and the folder with it. `last`: see there."""
    owned.remove_folder(path, names, last=last)


def room(path: Path) -> int:
    """Bytes that may still be written where `path` is, or will be."""
    place = next(each for each in (path, *path.parents) if each.exists())
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
