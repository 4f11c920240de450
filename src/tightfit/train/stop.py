"""Being asked to stop: by SLURM before its limit, by a scheduler that needs the machine, by Ctrl-C.

Until there is something to save the first signal ends the process at once, with 128 + its number. From `arm()` on the
first one is only noted, for the loop to look at between two steps, and the second one ends the process.

A handler of Python's runs in the main thread and between two of its instructions: not while that thread waits in a
collective for a rank that is gone, or in the store for one that downloads. So the handlers do nothing, and a thread
of our own reads the numbers that the interpreter writes to a pipe the moment a signal comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_S = 0.5
"""Whoever asks all processes of a service or of a machine reaches the ranks directly and through the desk as well:
what comes so soon after the first signal is the same wish."""
FLUSH_S = 2.0  # a disk that hangs, or a thread that does while it prints, holds nobody back longer


_last_duties: list[Callable[[], object]] = []


def do_before_leaving(duty: Callable[[], object]) -> None:
    """Have this done when the process leaves, whatever makes it: `leave` asks none of Python's own exit handlers."""
    _last_duties.append(duty)


def leave(code: int) -> NoReturn:
    """Leave at once. Everything is written and closed; libraries' own threads abort now and then when they are taken
    down one by one, and a training that is done would look like one that crashed."""

    def flush() -> None:
        for duty in _last_duties:
            with suppress(Exception):
                duty()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the disk that they go to may be full
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    with suppress(RuntimeError):  # no thread is to be had any more
        flushing.start()
        flushing.join(FLUSH_S)
    os._exit(code)


class Stop:
    """Whether this process was asked to stop. One that is not installed is never asked by a signal."""

    def __init__(self, leave: Callable[[int], object] = leave, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave, self._clock = leave, clock
        self._armed, self._since = False, 0.0
        self.why: str | None = None  # the name of the first signal, `SIGTERM`
        self._writes_to: int | None = None

    def install(self) -> Stop:
        """Listen from now on. Only the main thread may; a signal that is ignored (nohup, a background job) stays so."""
        reading, self._writes_to = os.pipe()
        os.set_blocking(self._writes_to, False)
        signal.set_wakeup_fd(self._writes_to, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _nothing)
                signal.siginterrupt(number, False)  # libraries that do not expect one are not woken from their reads

        def listen() -> None:
            while numbers := os.read(reading, 64):
                for number in numbers:
                    self.hear(number)

        threading.Thread(target=listen, name="tightfit-stop", daemon=True).start()

        def forget() -> None:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                if signal.getsignal(number) is _nothing:
                    signal.signal(number, signal.SIG_DFL)

        os.register_at_fork(after_in_child=forget)  # or a child would write to the same pipe
        return self

    @property
    def is_asked(self) -> bool:
        return self.why is not None

    def arm(self) -> None:
        """The loop runs: what was done so far can be saved at the next step. It stays so to the end of the process, as
        what follows the loop is the saving of the model."""
        self._armed = True

    def hear(self, number: int) -> None:
        """A signal came."""
        if number not in SIGNALS:
            return
        if not self._armed or (self.is_asked and self._clock() - self._since >= SAME_S):
            self._leave(128 + number)
        elif not self.is_asked:
            self._since, self.why = self._clock(), signal.Signals(number).name

    def deaf(self) -> None:
        """All is done and the exit code is known: whoever ends the ranks that are left must not spoil it."""
        if self._writes_to is not None:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Without a handler of Python's nothing is written to the pipe."""
