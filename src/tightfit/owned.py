"""What is ours on a disk: the only ways in which the package removes, moves and replaces files.

A folder is ours when it holds a record that only we write: a run's `run.json`, a checkpoint's manifest, a plan's
`worker.json`. It is never ours by its own name. Of such a folder only the files go that the record, or the one list of
what we write there, names. Everything else is a stranger: another name, a link wherever it leads, a mount, a device, a
pipe. A stranger makes us refuse before anything is touched.

A look and a deed are two moments. So a folder is not removed as a tree: each of our files is unlinked by its name, in a
folder that is held open and was entered without following a link, and the folder goes only if that has emptied it. What
somebody puts there meanwhile stays. A new file is created where no other may be, and a rename that must not replace
anything is made as a second name for the same file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, Protocol, cast

from tightfit.messages import Said
from tightfit.types import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
"""How a file system says that it has no locks: Lustre mounted without them, some network and user-space ones."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES)
"""Why a file system gives no second name to a file."""


class NotOurs(ConfigError):
    """Something is in the way that somebody else has put there."""

    def __init__(self, path: Path, sentence: Said) -> None:
        super().__init__(sentence)
        self.path = path


class Ours(Protocol):
    """What we write below one folder; names are relative to it, with slashes."""

    def has_file(self, name: str) -> bool: ...

    def has_folder(self, name: str) -> bool: ...


class Patterns:
    """Names by regular expressions for whole ones."""

    def __init__(self, files: str, folders: str = "(?!)") -> None:
        self._files, self._folders = re.compile(files), re.compile(folders)

    def has_file(self, name: str) -> bool:
        return self._files.fullmatch(name) is not None

    def has_folder(self, name: str) -> bool:
        return self._folders.fullmatch(name) is not None


class Listed:
    """The names that a record lists, and the folders that they lie in."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files = frozenset(files)
        self._folders = {str(place) for name in self._files for place in PurePosixPath(name).parents}

    def has_file(self, name: str) -> bool:
        return name in self._files

    def has_folder(self, name: str) -> bool:
        return name in self._folders


def find_strangers(path: Path, names: Ours) -> list[Path]:
    """Everything at and below a folder that is not ours, a folder of somebody else's once and whole; sorted. What
    cannot be looked into is a stranger too."""
    mounts = _mounts()

    def look(folder: Path, prefix: str) -> Iterator[Path]:
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            yield folder
            return
        for entry in entries:
            name, place = prefix + entry.name, folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                if not names.has_folder(name) or os.path.realpath(place) in mounts:
                    yield place
                else:
                    yield from look(place, f"{name}/")
            elif not (entry.is_file(follow_symlinks=False) and names.has_file(name)):
                yield place

    if path.is_symlink() or not path.is_dir() or os.path.realpath(path) in mounts:
        return [path]
    return list(look(path, ""))


def check_ours(path: Path, names: Ours, advice: Said) -> None:
    """Raise for the first stranger at or below a folder. `advice`: what to do, after its name."""
    if strangers := find_strangers(path, names):
        raise NotOurs(strangers[0], f"{strangers[0]} was not written by tightfit: {advice}")


def remove_folder(path: Path, names: Ours, *, last: str = "") -> list[Path]:
    """Remove our files below a folder, and the folders that this empties, itself too; what stays, as it is not ours.
    `last`: the record that lists the others, and goes after them."""
    if (strangers := find_strangers(path, names)) and strangers[0] == path:
        return strangers
    mounts = _mounts()

    def empty(folder: int, place: Path, prefix: str) -> None:
        device = os.fstat(folder).st_dev
        for name in sorted(os.listdir(folder), key=lambda name: prefix + name == last):
            seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(seen.st_mode) and names.has_file(prefix + name):
                os.unlink(name, dir_fd=folder)
            elif stat.S_ISDIR(seen.st_mode) and names.has_folder(prefix + name) and seen.st_dev == device:
                if os.path.realpath(place / name) in mounts:
                    continue
                with _enter(name, folder) as inside:
                    empty(inside, place / name, f"{prefix}{name}/")
                _remove_empty(name, folder)

    with _enter(path.name, path.parent) as top:
        empty(top, path, "")
    _remove_empty(path, None)
    return find_strangers(path, names) if path.exists() else []


def remove_file(path: Path) -> bool:
    """Remove a file whose name only we give; whether there was one. A link or a folder of that name is a stranger."""
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(seen.st_mode):
        raise NotOurs(path, f"{path} was not written by tightfit: move it away")
    path.unlink(missing_ok=True)
    return True


def move_file(old: Path, new: Path) -> None:
    """Rename a file, or a folder; FileExistsError where there is something by that name already."""
    if stat.S_ISREG(old.lstat().st_mode):
        try:
            os.link(old, new, follow_symlinks=False)
            old.unlink()
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    old.rename(new)


def open_new(path: Path, mode: int = 0o644) -> int:
    """A file that nobody else has made: what stands there, a link too, is left alone and FileExistsError raised."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_own(path: Path, mode: str) -> BinaryIO:
    """A file of ours to write on in; a link is followed to a device only, which has nothing to lose. `ab` or `wb`."""

    def without_links(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            if not os.path.exists(name) or os.path.isfile(name) or os.path.isdir(name):
                raise NotOurs(path, f"{path} is a link, and what it leads to stays as it is: move it away") from None
            return os.open(name, flags & ~(os.O_CREAT | os.O_TRUNC))

    return cast("BinaryIO", open(path, mode, buffering=0, opener=without_links))


KernelLock = Literal["held", "busy", "none"]
"""What the kernel's lock says: it is ours now, somebody else's, or there is no such thing on this disk."""


def flock(file: int, *, wait: bool = True) -> KernelLock:
    """Take the kernel's lock on an open file, which it keeps as long as that is open. Without such locks nobody
    waits."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return "none"
    return "held"


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """An error of writing to an open file says nothing of which: it gets this name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, data: bytes, *, sync: bool = False, private: bool = False) -> None:
    """Put a file of ours in place whole or not at all: others may read it at any moment. OSError: it is as it was.
    `private`: no other user may."""
    fresh = fresh_beside(path)
    file = open_new(fresh, 0o600 if private else 0o644)
    try:
        try:
            with name_errors(path):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file, rest) :]
                if sync:
                    os.fsync(file)
        finally:
            os.close(file)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def fresh_beside(path: Path) -> Path:
    """A name for what is to replace a file, which no other process on any machine gives; `FRESH` knows them."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.new")


FRESH = r"\.{}\.\d+-[0-9a-f]+\.new"  # the pattern of those names, with the file's own in the middle


@contextmanager
def _enter(name: str, parent: int | Path) -> Iterator[int]:
    """A folder held open; never what a link leads to."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(parent / name, flags) if isinstance(parent, Path) else os.open(name, flags, dir_fd=parent)
    try:
        yield opened
    finally:
        os.close(opened)


def _remove_empty(path: Path | str, parent: int | None) -> None:
    try:
        os.rmdir(path, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise


def _mounts() -> frozenset[str]:
    """Where something else is mounted; a folder that is bound from the same disk shows by nothing else."""
    try:
        text = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return frozenset()
    places = (line.split()[4] for line in text.splitlines() if line.count(" ") > 4)
    return frozenset(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place) for place in places)
