"""Processes by number: whether one is still the one that was meant, and whole groups of them.

A number alone says little, for numbers are given out again. A number with the moment at which its process
began, counted from a boot that has a name of its own, is one process for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Stat(NamedTuple):
    """What the kernel counts of a process."""

    has_ended: bool
    """It only waits to be noticed."""
    group: int
    session: int
    cpu_s: float
    began_ticks: int
    """Since the machine was switched on."""


def stat_of(pid: int) -> Stat | None:
    """None: there is no such process, or no /proc. Its name stands in brackets and may hold anything, brackets too."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Stat(fields[0] in (b"Z", b"X"), int(fields[2]), int(fields[3]), cpu_s, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def every_pid() -> Iterator[int]:
    """The numbers of all processes; none where there is no /proc."""
    with suppress(OSError):
        yield from (int(name) for name in os.listdir(PROC) if name.isdigit())


def this_host() -> str:
    """The name of this machine, as locks and reservations say it."""
    return socket.gethostname()


def mark_of(pid: int) -> str | None:
    """When the process began, in words that no other process of this number shares; None: not known here."""
    found = stat_of(pid)
    return None if found is None else f"{boot_id()}:{found.began_ticks}"


def resident_bytes(pid: int) -> int | None:
    """The RAM that a process holds; None: nobody says."""
    try:
        return int((PROC / str(pid) / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """The name of this machine's run since it was switched on; empty: not known here."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_alive(pid: int, mark: str | None) -> bool:
    """Whether the process that had this number and mark still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; or a number that no process has
        return mark is None or mark_of(pid) in (mark, None)
    found = stat_of(pid)
    if found is None:
        return not PROC.joinpath("self").exists()  # where there is no /proc, the number has to do
    return not found.has_ended and (mark is None or mark_of(pid) == mark)


def began_at(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; None: nobody says."""
    found = stat_of(pid)
    try:
        up = float((PROC / "uptime").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return None if found is None else time.time() - up + found.began_ticks / os.sysconf("SC_CLK_TCK")


def members_of(sessions: frozenset[int]) -> list[int]:
    """The processes of these sessions that still run; none are found where there is no /proc. A group would not do:
    ninja, with which DeepSpeed compiles, gives every compiler one of its own."""
    stats = ((pid, stat_of(pid)) for pid in every_pid())
    return [pid for pid, stat in stats if stat is not None and not stat.has_ended and stat.session in sessions]


def end_session(session: int) -> None:
    """End a session's first group, and whatever of the session has a group of its own."""
    tell(session, signal.SIGKILL)
    for pid in members_of(frozenset({session})):
        tell_one(pid, signal.SIGKILL)


def tell_one(pid: int, what: signal.Signals) -> None:
    """A signal to a process that may have ended meanwhile."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, what)


def tell(group: int, what: signal.Signals) -> None:
    """Send a signal to a whole group, which may have ended meanwhile."""
    try:
        os.killpg(group, what)
    except (ProcessLookupError, PermissionError):  # macOS refuses what has ended
        return
