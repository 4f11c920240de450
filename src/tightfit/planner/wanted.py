"""Whether anybody still waits for an answer: a search asks it as it goes, and ends where nobody does.

A slider that moves asks often, and most of what it asked is of no interest a moment later. Who asks says how to find
out, in the thread that searches; who says nothing waits to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_wanted: ContextVar[Callable[[], bool] | None] = ContextVar("is_wanted", default=None)


class AbandonedError(Exception):
    """Nobody waits for this answer any more."""


@contextmanager
def only_while(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """What is searched for meanwhile ends with an AbandonedError soon after it is no longer wanted."""
    before = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(before)


def check_wanted() -> None:
    ask = _is_wanted.get()
    if ask is not None and not ask():
        raise AbandonedError
