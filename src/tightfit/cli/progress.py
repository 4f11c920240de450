"""How far something is, on stderr: a line that changes on a terminal, and in a pipe a new one now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from tightfit.messages.wide import pad

EVERY_S = 10  # in a pipe, it is said this often
WIDE = 78


class ProgressLine:
    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = monotonic) -> None:
        self._quiet, self._clock, self._is_terminal = quiet, clock, sys.stderr.isatty()
        self._said, self._said_at = "", clock()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._said and self._is_terminal:
            print("\r" + " " * WIDE + "\r", end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        now = self._clock()
        if self._quiet or line == self._said or (not self._is_terminal and now - self._said_at < EVERY_S):
            return
        self._said, self._said_at = line, now
        start, end = ("\r", "") if self._is_terminal else ("", "\n")
        print(start + (pad(line, WIDE) if self._is_terminal else line), end=end, file=sys.stderr, flush=True)
