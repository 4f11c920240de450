"""What live runs of this user hold on this machine: RAM, GPUs and a port.

A run that has just started holds little of what it will need, so the system's own free memory would promise the same
RAM to two runs. Each run therefore writes down what its plan says, for as long as its process lives. Entries of dead
processes count for nothing and are removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.inputs.records import find_record, record_text
from tightfit.messages import Message
from tightfit.owned import flock, replace_file
from tightfit.runs.processes import is_alive, mark_of, this_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """One run's share of this machine."""

    pid: int
    mark: str | None
    """See `mark_of`."""
    host: str
    folder: str
    """The run's folder: how people know it."""
    host_bytes: int
    """RAM of this node that the plan says it needs."""
    gpus: tuple[str, ...]
    """Its GPUs, by the names that `Device.key` gives."""
    port: int | None

    @classmethod
    def ours(cls, folder: Path, host_bytes: int, gpus: tuple[str, ...], port: int | None) -> Reservation:
        pid = os.getpid()
        return cls(
            pid=pid,
            mark=mark_of(pid),
            host=this_host(),
            folder=str(folder),
            host_bytes=host_bytes,
            gpus=gpus,
            port=port,
        )

    @property
    def words(self) -> Message:
        """`the run in /data/out (process 4711)`"""
        return Message("runs.reserved-by", folder=self.folder, pid=self.pid)


class Reservations:
    """The entries in one folder, a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def live(self) -> tuple[Reservation, ...]:
        """Of runs that live on this machine. Entries that another machine has put there stay as they are."""
        found = []
        try:
            paths = sorted(self._folder.glob("*.json"))
        except OSError:
            return ()
        for path in paths:
            entry = find_record(path, Reservation)
            if entry is None or entry.host != this_host():
                continue
            if is_alive(entry.pid, entry.mark):
                found.append(entry)
            else:
                with suppress(OSError):
                    path.unlink()
        return tuple(found)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this is held no other run reserves anything. A cache that cannot be written reserves nothing."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            flock(file)
            yield
        finally:
            os.close(file)

    def add(self, entry: Reservation) -> bool:
        """Write an entry down; False: there is no place to write it to."""
        try:
            replace_file(self._path(entry), record_text(entry).encode())
        except OSError:
            return False
        return True

    def remove(self, entry: Reservation) -> None:
        with suppress(OSError):
            self._path(entry).unlink()

    def _path(self, entry: Reservation) -> Path:
        return self._folder / f"{entry.host}-{entry.pid}.json"
