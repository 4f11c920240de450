"""The lock of a run folder: one run at a time, on whatever machine, and a second is told who holds it.

Two things hold a folder. The kernel's lock on the open file ends with its process, however that ended, so on one
machine a run that was killed is followed at once. Other machines may not see it, and some file systems have none. So
the file is a lease as well: it names its holder, who counts up a number in it every few seconds. A file that names
another machine, or another boot of this one, is watched: if the number stands still for a minute, its holder has gone.
Nobody's clock is compared with anybody else's; whoever watches counts seconds of his own.

Whoever takes a lease over first makes a file that is named after it, which only one can, then looks whether it is still
the same, and puts his own in its place whole. A holder that was only asleep, or cut off from the disk, finds another's
name in the file at its next beat, and ends at once without writing anything more. While its ranks still write, which
shows in their heartbeats and events, the run lives, whatever the lease says.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from tightfit.inputs.records import as_record, parse_json
from tightfit.messages import Message, text
from tightfit.owned import NotOurs, flock, fresh_beside, open_new
from tightfit.runs.processes import PROC, boot_id, is_alive, mark_of, this_host
from tightfit.types import ConfigError


class InUse(ConfigError):
    """Another run holds the folder, and nothing in it is ours to write."""

    def __init__(self, who: Message, advice: Message | None = None) -> None:
        super().__init__(Message("runs.who-and-advice", who=who, advice=advice or Message("runs.wait-or-other")))
        self.who = who


LOCK = "lock"
BEAT_S = 5.0
EXPIRES_S = 60.0  # a lease whose number stands still for so long is nobody's any more
TAKE_OVER_S = 4 * BEAT_S  # and for so long, where the user says that its holder has gone
LOST = 3  # the exit code of a run whose lease somebody else has taken
_BEGINS = b'{"pid": '  # how each of our locks does; one that was torn is empty, or breaks off later
_MOST_BYTES = 4096
_LENGTH = 1024  # a record is written in place, so it keeps its length
_LOOK_S = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    pid: int
    host: str
    since: str
    job: str | None = None  # the scheduler's number for it; None: there is none
    id: str | None = None  # of this lease alone; None: an earlier version wrote it, which has no heartbeat
    boot: str | None = None
    space: str | None = None  # the kernel's name for the space in which `pid` is a number
    mark: str | None = None  # see `mark_of`
    beat: int = 0

    @classmethod
    def ours(cls, job: str | None) -> Owner:
        pid = os.getpid()
        return cls(
            pid=pid,
            host=this_host(),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            job=job,
            id=uuid.uuid4().hex,
            boot=boot_id(),
            space=_space(),
            mark=mark_of(pid),
        )

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine as it runs now."""
        return self.host == this_host() and self.boot in (None, boot_id())

    @property
    def words(self) -> Message:
        return Message("runs.owner", pid=self.pid, host=self.host, since=self.since)

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_LENGTH - 1) + b"\n"


class FolderLock:
    def __init__(self, path: Path, file: int, owner: Owner) -> None:
        self._path, self._file, self._owner = path, file, owner
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls, folder: Path, job: str | None = None, *, take_over: bool = False, say: Say | None = None
    ) -> FolderLock:
        """Hold the folder's lock, or say who does. `job`: the scheduler's number for this run; `take_over`: the user
        says that whoever held it elsewhere has gone."""
        path, owner, speak = folder / LOCK, Owner.ours(job), say or _say
        fresh = fresh_beside(path)
        file = open_new(fresh)
        try:
            os.pwrite(file, owner.text(), 0)
            if flock(file, wait=False) == "none":
                speak(text("runs.no-flock", folder=folder))
            while not _put(fresh, path):
                with _open_lock(path) as other:
                    if other is not None:
                        seen = _judge(other, folder, job, take_over=take_over, say=speak)
                        if _put_instead(fresh, path, other, seen):
                            break
        except BaseException:
            os.close(file)
            with suppress(OSError):
                fresh.unlink()
            raise
        return cls(path, file, owner)

    def release(self) -> None:
        """Let it go, and leave no file that would name us."""
        self._done.set()
        self._thread.join()
        with suppress(OSError):
            if _is(self._path, self._file):
                self._path.unlink()
        os.close(self._file)

    def _keep(self) -> None:
        """Show that we live, and leave when somebody has taken our place."""
        owner = self._owner
        while not self._done.wait(BEAT_S):
            with suppress(OSError):  # a disk that is gone for a moment is no reason to stop training
                now = _read_path(self._path)
                if now is not None and now.id != owner.id:
                    # another run writes in the folder: not a byte more of ours. The ranks end with this process
                    with suppress(OSError):
                        said = text("runs.taken-over", owner=now.words, folder=self._path.parent)
                        os.write(2, f"tightfit: {said}\n".encode())
                    os._exit(LOST)
                owner = replace(owner, beat=owner.beat + 1)
                os.pwrite(self._file, owner.text(), 0)


def check_unlocked(folder: Path, *, here: bool = False) -> None:
    """The same sentence as `take`, without holding, writing or waiting for anything. `here`: what another machine may
    hold is left to `take`."""
    with suppress(OSError), _open_lock(folder / LOCK) as file:
        if file is None or not _is_held(file, folder, None):
            return
        owner = _owner(file)
        if owner is not None and not here:
            who = Message("runs.in-use-elsewhere", folder=folder, owner=owner.words)
            raise InUse(who, Message("runs.other-or-take-over"))


def _judge(file: int, folder: Path, job: str | None, *, take_over: bool, say: Say) -> Owner | None:
    """Return when its holder has gone: what it said last."""
    owner = _owner(file)
    if not _is_held(file, folder, job) or owner is None:
        return owner
    if owner.id is None and not take_over:
        who = Message("runs.in-use-mute", folder=folder, owner=owner.words)
        raise InUse(who, Message("runs.other-or-take-over"))
    patience = TAKE_OVER_S if take_over else EXPIRES_S
    say(text("runs.watching-lock", folder=folder, owner=owner.words, seconds=patience))
    deadline, before = time.monotonic() + patience, _signs(folder)
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        now = _read_path(folder / LOCK)  # opened anew each time: so a network disk is asked, and not its cache
        if now is None or now.id != owner.id:
            break  # somebody else has it, or nobody: whoever asked looks again
        if now.beat != owner.beat or _signs(folder) != before:
            raise InUse(Message("runs.in-use-lives", folder=folder, owner=owner.words))
    return owner


def _signs(folder: Path) -> tuple[object, ...]:
    """What the ranks of a run change while they live, also where whoever started them is stopped."""
    found: list[object] = []
    with suppress(OSError):
        found.append((folder / "events.jsonl").stat().st_size)
    with suppress(OSError):
        found += [path.read_bytes() for path in sorted((folder / "heartbeats").iterdir()) if path.is_file()]
    return tuple(found)


def _is_held(file: int, folder: Path, job: str | None) -> bool:
    """False: nobody can hold it any more. InUse: somebody here does. True: somebody elsewhere may."""
    kernel, owner = flock(file, wait=False), _owner(file)
    lives = owner is not None and owner.is_here and owner.space == _space() and is_alive(owner.pid, owner.mark)
    if kernel == "busy" or (lives and owner is not None and owner.mark is not None):
        who = Message("runs.another-run") if owner is None else owner.words
        raise InUse(Message("runs.in-use", folder=folder, owner=who))
    if owner is None or (job is not None and owner.job == job):  # a scheduler starts a job again when it has ended
        return False
    sees = kernel == "held" or owner.space == _space()
    return not (owner.is_here and sees)


@contextmanager
def _open_lock(path: Path) -> Iterator[int | None]:
    """To write, since over NFS only a writer may ask for the whole lock; None: it is not there. A link, or a file that
    says anything but what a lock says, is somebody else's."""
    stranger = NotOurs(path, Message("runs.not-ours-move", path=path))
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise stranger from None
        raise
    try:
        said = os.pread(file, _MOST_BYTES, 0) if stat.S_ISREG(os.fstat(file).st_mode) else b"?"
        if said.strip(b"\0\n") and not said.startswith(_BEGINS):
            raise stranger
        yield file
    finally:
        os.close(file)


def _put(fresh: Path, path: Path) -> bool:
    """Whether there was no lock, and now there is ours."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    except OSError:  # no second names on this disk
        return _put_instead(fresh, path, None, None)
    fresh.unlink()
    return True


def _put_instead(fresh: Path, path: Path, other: int | None, seen: Owner | None) -> bool:
    """Take the place of a lease that is nobody's any more, or of none; False: there is another by now. One at a time
    may try."""
    turn = path.with_name(f".{LOCK}.{'none' if seen is None else seen.id or 'old'}.next")
    try:
        mine = open_new(turn)
    except FileExistsError:
        # somebody is about to take the lease over, for a moment; or was killed in it
        with _open_lock(turn) as file:
            if file is not None:
                if _is_held(file, turn.parent, None):
                    who = Message("runs.being-taken-over", folder=turn.parent)
                    raise InUse(who, Message("runs.wait-or-remove", path=turn)) from None
                turn.unlink(missing_ok=True)
        return False
    try:
        flock(mine, wait=False)
        os.pwrite(mine, Owner.ours(None).text(), 0)
        if os.path.lexists(path) if other is None else not _is(path, other) or _read_path(path) != seen:
            return False
        fresh.replace(path)
        return True
    finally:
        with suppress(OSError):
            turn.unlink()
        os.close(mine)


def is_lock(name: str) -> bool:
    """Whether a file in a run's folder is its lock, or one of those by which it is put in place."""
    return name == LOCK or name.startswith(f".{LOCK}.")


def _owner(file: int) -> Owner | None:
    """None: nobody has signed it."""
    for _ in range(5):
        text = os.pread(file, _MOST_BYTES, 0).strip(b"\0\n")
        if not text:
            return None
        with suppress(ValueError):
            return as_record(parse_json(text), Owner)
        time.sleep(0.02)  # its holder may be writing, or was killed while it wrote
    return None


def _read_path(path: Path) -> Owner | None:
    with _open_lock(path) as file:
        return None if file is None else _owner(file)


def _space() -> str | None:
    with suppress(OSError):
        return os.readlink(PROC / "self" / "ns" / "pid")
    return None


def _is(path: Path, file: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"tightfit: {text}\n")
        sys.stderr.flush()
