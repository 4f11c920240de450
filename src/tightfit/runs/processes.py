"""Processes by number: whether one is still the one that was meant, and whole groups of them.

A number alone says little, for numbers are given out again. A number with the moment at which its process
began, counted from a boot that has a name of its own, is one process for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that has ended and waits to be noticed."""


def this_host() -> str:
    """The name of this machine, as locks and reservations say it."""
    return socket.gethostname()


def mark_of(pid: int) -> str | None:
    """When the process began, in words that no other process of this number shares; None: not known here."""
    found = _stat(pid)
    return None if found is None else f"{boot_id()}:{found[1]}"


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
    found = _stat(pid)
    if found is None:
        return not PROC.joinpath("self").exists()  # where there is no /proc, the number has to do
    return found[0] not in _ENDED and (mark is None or mark_of(pid) == mark)


def began_at(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; None: nobody says."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        up = float((PROC / "uptime").read_bytes().split()[0])
        return time.time() - up + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def members_of(sessions: frozenset[int]) -> list[int]:
    """The processes of these sessions that still run; none are found where there is no /proc. A group would not do:
    ninja, with which DeepSpeed compiles, gives every compiler one of its own."""
    found = []
    for entry in PROC.glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None and stat[0] not in _ENDED and stat[2] in sessions:
            found.append(int(entry.name))
    return found


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


def _stat(pid: int) -> tuple[str, str, int] | None:
    """State, start and session of a process. Its name stands in brackets and may hold anything, brackets too."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except (OSError, ValueError):
        return None
    fields = text.rpartition(")")[2].split()
    return (fields[0], fields[19], int(fields[3])) if len(fields) > 19 else None
