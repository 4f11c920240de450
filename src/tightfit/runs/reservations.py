"""What live runs of this user hold on this machine: RAM, GPUs and a port.

A run that has just started holds little of what it will need, so the system's own free memory would promise the same
RAM to two runs. Each run therefore writes down what its plan says, for as long as its process lives. Entries of dead
processes count for nothing and are removed.

The port on which the ranks of a run meet.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.inputs.records import find_record, record_text
from tightfit.messages import Message
from tightfit.owned import flock, replace_file
from tightfit.runs.processes import is_alive, mark_of, this_host
from tightfit.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    pid: int
    mark: str | None  # see `mark_of`
    host: str
    folder: str  # the run's folder: how people know it
    host_bytes: int  # RAM of this node that the plan says it needs
    gpus: tuple[str, ...]  # its GPUs, by the names that `Device.key` gives
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
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def live(self) -> tuple[Reservation, ...]:
        """Of runs that live on this machine. Entries that another machine has put there stay as they are."""
        found, paths = [], list[Path]()
        with suppress(OSError):
            paths = sorted(self._folder.glob("*.json"))
        for path in paths:
            entry = find_record(path, Reservation)
            if entry is not None and entry.host == this_host():
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


_TRIES = 256
_LOWEST = 15_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(taken: Collection[int] = ()) -> int:
    """A port that nobody listens on and no run that is just starting was given (`taken`); the one after it is free too.

    Where it can, it lies below those from which the system gives every outgoing connection one: until somebody listens
    there, seconds later, such a connection could take it.
    """
    for _ in range(_TRIES):
        port = random.SystemRandom().randrange(_LOWEST, _first_ephemeral() - 1)
        if {port - 1, port, port + 1}.isdisjoint(taken) and _is_free(port) and _is_free(port + 1):
            return port
    raise ConfigError(Message("runs.no-port"))


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + _TRIES else 65_536  # a system that gives out nearly all of them


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def check_port(port: int) -> None:
    """A port that was named must be free on every address, as the ranks' store binds it."""
    families = [(socket.AF_INET, "")] + ([(socket.AF_INET6, "::")] if socket.has_ipv6 else [])
    for family, address in families:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left may be taken
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except PermissionError:
            raise ConfigError(Message("runs.systems-port", port=port)) from None
        except OSError as error:
            if error.errno in _IN_USE:
                raise ConfigError(Message("runs.port-in-use", port=port)) from None


_IN_USE = (errno.EADDRINUSE,)  # other errors mean that there is no such family of addresses here
