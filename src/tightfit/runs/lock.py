"""The lock of a run folder: one run at a time, and a second is told who holds it.

The kernel's lock on the open file decides, and ends with its process however that ended: a lock is never left behind.
What the file says is for people. On a disk that several machines share the kernel's lock may be kept from one machine
only, so a file that names another machine is believed: nobody here can know whether that run still lives. Unless it
is of the same job of a scheduler's, which starts one again elsewhere only when it has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tightfit.owned import NotOurs
from tightfit.runs.processes import this_host
from tightfit.types import ConfigError


class InUse(ConfigError):
    """Another run holds the folder, and nothing in it is ours to write."""


LOCK = "lock"
_BEGINS = b'{"pid": '
"""How each of our locks does; one that was torn is empty, or breaks off later."""
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a lock."""

    pid: int
    host: str
    since: str
    job: str | None = None
    """The scheduler's number for it; None: there is none."""


class FolderLock:
    """Held from `take` to `release`."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    @classmethod
    def take(cls, folder: Path, job: str | None = None) -> FolderLock:
        """Hold the folder's lock, or say who does. `job`: the scheduler's number for this run."""
        path = folder / LOCK
        while True:
            file = _opened(path, os.O_CREAT)
            try:
                _hold(file, folder)
                if _is(path, file):
                    _check_hosts(file, folder, job)
                    owner = Owner(pid=os.getpid(), host=this_host(), since=_now(), job=job)
                    _sign(path, file, owner)
                    return cls(path, file)
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # somebody has removed it between our opening and our holding it

    def release(self) -> None:
        """Let it go, and leave no file that would name us."""
        with suppress(OSError):
            if _is(self._path, self._file):
                self._path.unlink()
        os.close(self._file)


def check_unlocked(folder: Path) -> None:
    """The same sentence as `take`, without holding or writing anything."""
    try:
        file = _opened(folder / LOCK)
    except OSError:
        return
    try:
        _hold(file, folder)
        _check_hosts(file, folder)
    finally:
        os.close(file)


def _opened(path: Path, flags: int = 0) -> int:
    """To write, since over NFS only a writer may ask for the whole lock. A link, or a file that says anything but what
    a lock says, is somebody else's."""
    stranger = NotOurs(path, f"{path} was not written by tightfit: move it away, or name another --output")
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o644)
    except OSError as error:
        raise stranger if error.errno in (errno.ELOOP, errno.EISDIR) else error from None
    said = os.pread(file, _MOST_BYTES, 0) if stat.S_ISREG(os.fstat(file).st_mode) else b"?"
    if said.strip(b"\0\n") and not said.startswith(_BEGINS):
        os.close(file)
        raise stranger
    return file


def _hold(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUse(f"{folder} is in use by {_who(file)}: wait for it, or name another --output") from None


def _check_hosts(file: int, folder: Path, job: str | None = None) -> None:
    owner = _owner(file)
    if owner is not None and owner.host != this_host() and (job is None or owner.job != job):
        raise InUse(
            f"{folder} is in use by {_who(file)}, another machine, so whether it still runs cannot be seen from here: "
            f"name another --output, or remove {folder / LOCK} if it has ended"
        )


def _who(file: int) -> str:
    owner = _owner(file)
    return "another run" if owner is None else f"the run of process {owner.pid} on {owner.host} since {owner.since}"


def _owner(file: int) -> Owner | None:
    try:
        said = json.loads(os.pread(file, _MOST_BYTES, 0))
        return Owner(pid=int(said["pid"]), host=str(said["host"]), since=str(said["since"]), job=said.get("job"))
    except (ValueError, KeyError, TypeError, RecursionError):  # a run that was killed while it wrote
        return None


def _sign(path: Path, file: int, owner: Owner) -> None:
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, (json.dumps(asdict(owner)) + "\n").encode(), 0)
    except OSError:  # a full disk; the file is ours, and nobody's name is in it
        path.unlink(missing_ok=True)
        raise


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
