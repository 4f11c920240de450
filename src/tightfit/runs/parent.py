"""For the worker: end when the desk that started it has gone, whatever ended the desk.

Each rank inherits the reading end of a pipe whose writing end only the desk holds. Nothing is ever written: when the
desk ends, by a signal that cannot be caught too, the kernel closes its end and the read returns. The rank then takes
its whole session with it, data loaders included. A signal on the parent's death would reach the rank alone.
"""

from __future__ import annotations

import os
import signal
import threading

from tightfit.runs.processes import members_of, tell_one

PARENT_FD = "TIGHTFIT_PARENT_FD"
"""The variable that names the pipe to a rank."""


def end_with_parent(fd: int) -> threading.Thread:
    """Watch the pipe from a thread of this process; call it once, before anything slow."""
    os.set_inheritable(fd, False)
    watcher = threading.Thread(target=_watch, args=(fd,), name="tightfit-parent", daemon=True)
    watcher.start()
    return watcher


def _watch(fd: int) -> None:
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
