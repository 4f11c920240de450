"""Processes by number: whether one is still the one that was meant, and whole groups of them.

A number alone says little, for numbers are given out again. A number with the moment at which its process
began, counted from a boot that has a name of its own, is one process for ever.

For the worker: end when the desk that started it has gone, whatever ended the desk.

Each rank inherits the reading end of a pipe whose writing end only the desk holds. Nothing is ever written: when the
desk ends, by a signal that cannot be caught too, the kernel closes its end and the read returns. The rank then takes
its whole session with it, data loaders included. A signal on the parent's death would reach the rank alone.

The processes of somebody else's program, known by a mark in their environment, and their end with ours.

Launchers start ranks in sessions of their own, which no signal to a group would reach; the environment they all
inherit. A guard beside the program holds the reading end of a pipe whose writing end only `tightfit run` holds: when
that ends, by a signal that cannot be caught too, the read returns and the guard ends whatever carries the mark.

    python -m tightfit.runs.processes FD MARK
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tightfit.inputs.surroundings import inherited

PROC = Path("/proc")


class Stat(NamedTuple):
    has_ended: bool  # it only waits to be noticed
    group: int
    session: int
    cpu_s: float
    began_ticks: int  # since the machine was switched on


def stat_of(pid: int) -> Stat | None:
    """None: there is no such process, or no /proc. Its name stands in brackets and may hold anything, brackets too."""
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Stat(fields[0] in (b"Z", b"X"), int(fields[2]), int(fields[3]), cpu_s, int(fields[19]))
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
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def boot_id() -> str:
    """The name of this machine's run since it was switched on; empty: not known here."""
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
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
    with suppress(OSError, ValueError, IndexError):
        up = float((PROC / "uptime").read_bytes().split()[0])
        if (found := stat_of(pid)) is not None:
            return time.time() - up + found.began_ticks / os.sysconf("SC_CLK_TCK")
    return None


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
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses what has ended
        os.killpg(group, what)


# --- a rank ends with its desk -------------------------------------------------------------------


PARENT_FD = "TIGHTFIT_PARENT_FD"  # the variable that names the pipe to a rank


def end_with_parent(fd: int) -> threading.Thread:
    """Watch the pipe from a thread of this process; call it once, before anything slow."""
    os.set_inheritable(fd, False)

    def watch() -> None:
        try:
            while os.read(fd, 1):
                pass
        except OSError:  # closed by the process itself: it no longer wants to be watched
            return
        if os.getsid(0) == os.getpid():
            for pid in members_of(frozenset({os.getpid()})):
                if pid != os.getpid():
                    tell_one(pid, signal.SIGKILL)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="tightfit-parent", daemon=True)
    watcher.start()
    return watcher


# --- the processes of somebody else's program ----------------------------------------------------


MARK = "TIGHTFIT_RUN_MARK"
LOOK_S = 0.05
ORPHANS_S = 5.0  # what processes have to leave by themselves whose `tightfit run` was killed
_LEAVE_S = 10.0


def carriers_of(mark: str) -> list[int]:
    """The processes that carry this mark and still run; none are found where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for pid in every_pid():
        with suppress(OSError):  # another user's, or one that is gone
            carries = wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if carries and (stat := stat_of(pid)) is not None and not stat.has_ended:
                found.append(pid)
    return found


def end_carriers(mark: str, patience_s: float = ORPHANS_S) -> None:
    """Ask all that carry the mark to end, and end what does not."""
    deadline, number = time.monotonic() + patience_s, signal.SIGTERM
    told: set[int] = set()
    while left := carriers_of(mark):
        if time.monotonic() > deadline:
            number, told = signal.SIGKILL, set()
        for pid in left:
            if pid not in told:
                tell_one(pid, number)
                told.add(pid)
        time.sleep(LOOK_S)


@contextmanager
def guard(mark: str) -> Iterator[None]:
    """Beside the program, from before its start to after its end."""
    read, write = os.pipe()
    process: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # no process to be had: the program is worth more than its guard
        process = subprocess.Popen(
            [sys.executable, "-m", "tightfit.runs.processes", str(read), mark],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read,),
            start_new_session=True,
            cwd="/",  # a module of the user's must not be taken for one of Python's
            env=inherited({}),
        )
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        if process is not None:
            try:
                process.wait(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def stand_guard(fd: int, mark: str) -> None:
    """Wait for the other end of the pipe to close, and end what is left then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(fd, 1):
        pass
    end_carriers(mark)


if __name__ == "__main__":
    stand_guard(int(sys.argv[1]), sys.argv[2])
