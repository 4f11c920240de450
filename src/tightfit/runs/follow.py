"""Follow a file of events while a worker appends to it.

A line counts when its end is there: what is half written now is read again with the next look. A file that has
become shorter was begun anew. What the file holds before anybody looks is an earlier start's, which a run that goes on
from a checkpoint appends to.
"""

from __future__ import annotations

from pathlib import Path

from tightfit.inputs.spelling import open_regular
from tightfit.runs.events import Event, event_of, events_of

_CHUNK = 1 << 20
_LONGEST = 1 << 22
"""Bytes of one line, above which it is no event of ours."""


class Follower:
    """Reads on where it stopped."""

    def __init__(self, path: Path, *, start: int | None = None) -> None:
        """`start`: the first byte that counts; left out: what comes from now on."""
        self.path = path
        self._offset = _size(path) if start is None else start
        self._torn = b""

    def poll(self) -> list[Event]:
        """The events that have come since the last look."""
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._torn = 0, b""
                file.seek(self._offset)
                found: list[Event] = []
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    *lines, self._torn = (self._torn + chunk).split(b"\n")
                    if len(self._torn) > _LONGEST:
                        self._torn = b""
                    found += [
                        event for event in events_of([line for line in lines if line.strip()]) if event is not None
                    ]
                return found
        except OSError:  # not there yet, or not any more
            return []

    def rest(self) -> list[Event]:
        """What is left when nobody writes any more: a last line may lack its end."""
        found = self.poll()
        last = event_of(self._torn)
        self._torn = b""
        return found if last is None else [*found, last]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not there yet
        return 0
