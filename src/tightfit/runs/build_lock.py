"""Torch's lock on a part that is compiled at first use, and what a process leaves that was killed meanwhile.

The lock is a file, `lock` in the part's folder, which its maker holds open until it removes it. A maker that is killed
leaves the file, and everybody who comes later waits for it without end and without a word. Whether somebody still holds
it is told by the open files of this user's processes; on a disk that several machines share that is not the whole
truth, so what is not known to be ours is named and never removed.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tightfit.messages import Listing, Message
from tightfit.runs.processes import PROC, every_pid

LOCK = "lock"
OLD_S = 60.0  # a lock that is younger may be somebody's who has only just begun
OWN_DISKS = frozenset("apfs btrfs ext2 ext3 ext4 f2fs hfs overlay ramfs tmpfs xfs zfs".split())
"""File systems that one machine alone can have mounted; any other may be shared."""
_COMPILERS = re.compile(r"(ninja|nvcc|hipcc|c\+\+|g\+\+|clang(\+\+)?|cc1plus|cicc|ptxas)(-[\d.]+)?$")


def build_folder(environment: Mapping[str, str]) -> Path:
    """Where torch keeps what it compiles, as it finds it in this environment."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    home = Path(environment.get("HOME") or Path.home())
    return Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "torch_extensions"


def find_left_locks(environment: Mapping[str, str], *, ours_since: float | None = None) -> tuple[Path, ...]:
    """Locks that nobody holds, the oldest first; none where that cannot be seen.
    `ours_since`: only those made from that moment on, by processes that have ended since: they need not be old."""
    if not (PROC / "self/fd").exists():
        return ()
    made, now = list[tuple[float, Path]](), time.time()
    # A folder that the user named holds the parts; torch's own has one for each Python and device between.
    for pattern in (f"*/{LOCK}", f"*/*/{LOCK}"):
        with suppress(OSError):
            for path in build_folder(environment).glob(pattern):
                with suppress(OSError):
                    stamp = path.stat().st_mtime
                    if is_lock(path) and (now - stamp > OLD_S if ours_since is None else stamp >= ours_since):
                        made.append((stamp, path))
    if not made:
        return ()
    held, busy = set[str](), set[str]()  # open files, and folders in which a compiler runs, whoever started it
    for process in (PROC / str(pid) for pid in every_pid()):
        with suppress(OSError):  # it has ended, or is somebody else's
            for entry in (process / "fd").iterdir():
                with suppress(OSError):
                    held.add(str(entry.readlink()))
        if ours_since is None:
            with suppress(OSError, ValueError):
                program = os.path.basename((process / "cmdline").read_bytes().split(b"\0")[0]).decode(errors="replace")
                if _COMPILERS.search(program):
                    busy.add(os.path.realpath((process / "cwd").readlink()))
    left = [
        (stamp, path)
        for stamp, path in made
        if os.path.realpath(path) not in held and os.path.realpath(path.parent) not in busy
    ]
    return tuple(path for _, path in sorted(left))


def clear(environment: Mapping[str, str], since: float | None = None) -> list[Message]:
    """Remove the locks that nobody can hold any more, name those that another machine or user may; what is said.
    `since`: only those that were made from that moment on."""
    ours = [path for path in find_left_locks(environment, ours_since=since or 0.0) if _can_be_seen(path)]
    others = [path for path in find_left_locks(environment, ours_since=since) if path not in ours]
    return [*([remove(ours)] if ours else []), *([describe(others)] if others else [])]


def remove(locks: Sequence[Path]) -> Message:
    for path in locks:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return Message("runs.locks-removed", locks=_name_locks(locks))


def describe(locks: Sequence[Path]) -> Message:
    """What to do about those that may be somebody else's."""
    id_ = "runs.lock-held" if len(locks) == 1 else "runs.locks-held"
    return Message(id_, locks=_name_locks(locks), command=command(locks))


def command(locks: Sequence[Path]) -> str:
    return f"rm {shlex.join(map(str, locks))}"


def _name_locks(locks: Sequence[Path]) -> Message:
    if len(locks) < 3:
        return Message("runs.several", parts=Listing(map(str, locks), "and"))
    return Message("runs.more-locks", first=locks[0], more=len(locks) - 1)


def is_lock(path: Path) -> bool:
    """Whether it can be torch's: an empty file, and no link."""
    try:
        seen = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_size == 0


def _can_be_seen(path: Path) -> bool:
    """Whether whoever may hold it is a process of this user on this machine."""
    import psutil

    real = Path(os.path.realpath(path))
    around = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    deepest = max(reversed(around), key=lambda part: len(part.mountpoint), default=None)  # the last hides the others
    with suppress(OSError):
        return deepest is not None and deepest.fstype in OWN_DISKS and path.stat().st_uid == os.geteuid()
    return False
