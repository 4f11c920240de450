"""The processes of somebody else's program, known by a mark in their environment, and their end with ours.

Launchers start ranks in sessions of their own, which no signal to a group would reach; the environment they all
inherit. A guard beside the program holds the reading end of a pipe whose writing end only `tightfit run` holds: when
that ends, by a signal that cannot be caught too, the read returns and the guard ends whatever carries the mark.

    python -m tightfit.runs.marked FD MARK
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType

from tightfit.inputs.surroundings import inherited
from tightfit.runs.processes import PROC, every_pid, stat_of, tell_one

MARK = "TIGHTFIT_RUN_MARK"
LOOK_S = 0.05
ORPHANS_S = 5.0
"""What processes have to leave by themselves whose `tightfit run` was killed."""
_LEAVE_S = 10.0


def members(mark: str) -> list[int]:
    """The processes that carry this mark and still run; none are found where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for pid in every_pid():
        with suppress(OSError):  # another user's, or one that is gone
            carries = wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if carries and (stat := stat_of(pid)) is not None and not stat.has_ended:
                found.append(pid)
    return found


def end_members(mark: str, patience_s: float = ORPHANS_S) -> None:
    """Ask all that carry the mark to end, and end what does not."""
    deadline, number = time.monotonic() + patience_s, signal.SIGTERM
    told: set[int] = set()
    while left := members(mark):
        if time.monotonic() > deadline:
            number, told = signal.SIGKILL, set()
        for pid in left:
            if pid not in told:
                tell_one(pid, number)
                told.add(pid)
        time.sleep(LOOK_S)


class Guard:
    """Beside the program, from before its start to after its end."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._write: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        read, self._write = os.pipe()
        try:
            command = [sys.executable, "-m", "tightfit.runs.marked", str(read), self._mark]
            quiet = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command,
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                pass_fds=(read,),
                start_new_session=True,
                cwd="/",  # a module of the user's must not be taken for one of Python's
                env=inherited({}),
            )
        except OSError:  # no process to be had: the program is worth more than its guard
            self._process = None
        finally:
            os.close(read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._write is not None
        os.close(self._write)
        if self._process is not None:
            try:
                self._process.wait(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def watch(fd: int, mark: str) -> None:
    """Wait for the other end of the pipe to close, and end what is left then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(fd, 1):
        pass
    end_members(mark)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
