"""What DeepSpeed compiles the first time it is used, and the lock that torch keeps meanwhile.

Torch's lock is a file, which its maker holds open. A process that was killed while it compiled leaves the file, and
everybody who comes later waits for it without end and without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOCK = "lock"


def compiled_parts() -> Path:
    """The folder with a folder for each part."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", False)).parent


def left_locks(folder: Path) -> tuple[Path, ...]:
    """Locks that no process of this machine holds; none where that cannot be known."""
    locks = [path for path in sorted(folder.glob(f"*/{LOCK}")) if path.is_file()]
    if not locks or not Path("/proc/self/fd").exists():
        return ()
    held = set(_open_files())
    return tuple(path for path in locks if os.path.realpath(path) not in held)


def remove(locks: tuple[Path, ...]) -> str:
    """Take them away; the sentence about it."""
    for path in locks:
        path.unlink(missing_ok=True)
    return f"a process that was killed while it compiled had left {locks[0]}: removed"


def _open_files() -> Iterator[str]:
    """Of all processes that may be looked at: those of this user, whose folder it is."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            for entry in (process / "fd").iterdir():
                with suppress(OSError):
                    yield str(entry.readlink())
