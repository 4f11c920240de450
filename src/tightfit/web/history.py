"""A run's `events.jsonl` for the page, however long it is: as a rough picture at once, and exactly a little later.

A run of a million steps has a file of some hundred megabytes. The rough picture takes single lines from all over the
file, which takes no longer for a long file than for a short one. Then the file is read from its beginning in portions,
and the exact curve takes the place of the rough one when the end is reached; from there on only what is new is read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.diagnose.masks import masked
from tightfit.inputs.spelling import open_regular
from tightfit.messages import Said, change_texts
from tightfit.runs.events import (
    AttemptBegan,
    Checkpointed,
    Ended,
    Event,
    Probe,
    Progress,
    Proof,
    Resumed,
    Started,
    Step,
    events_of,
    time_of,
)
from tightfit.runs.lines import line_of
from tightfit.web.series import Bucket, Series, single

LONG_BYTES = 6 * 2**20
"""From here on there is a rough picture first."""
SAMPLES = 800
LINES = 200
RECENT = 256
"""Steps that are kept whole, for the lights."""
TAIL_BYTES = 64 * 1024
_CHUNK = 512 * 1024
_LONGEST = 1 << 22
_SAMPLE_BYTES = 2048
_GOOD = (Checkpointed, Probe, Proof, Resumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """Something that happened once."""

    at: float | None
    """Seconds since the epoch."""
    text: Said
    """What looks like a secret is struck out."""
    mood: str
    """`good`, `warn`, `bad` or nothing."""


class History:
    """Reads on where it stopped. Torn lines wait for their end; a file that became shorter was begun anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._offset, self._torn, self._rough = 0, b"", True
        self.series = Series()
        self._sampled: Series | None = None
        self.said: deque[HistoryLine] = deque(maxlen=LINES)
        self._recent: deque[Step] = deque(maxlen=RECENT)
        self.doing: Progress | None = None
        self.ended: Ended | None = None
        self.limit_bytes: int | None = None
        """What a card has, as the worker saw it."""
        self.share = 0.0
        """How much of the file is read."""

    @property
    def is_whole(self) -> bool:
        """Whether the end of the file was reached once."""
        return not self._rough

    @property
    def shown(self) -> Series:
        """The exact curve, or the rough one until there is it."""
        return self.series if self._sampled is None or self.is_whole else self._sampled

    def steps(self) -> tuple[Step, ...]:
        """The last ones of this start."""
        return tuple(self._recent)

    def read_on(self, patience_s: float) -> bool:
        """Read for so long at most; whether something was new."""
        deadline = time.monotonic() + patience_s
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    self._begin()
                if size == self._offset:
                    self._rough = False
                    return False
                if self._rough and self._sampled is None and size > LONG_BYTES:
                    self._sampled = sample(self._path)
                    self._take_tail()
                file.seek(self._offset)
                while (chunk := file.read(_CHUNK)) and time.monotonic() < deadline:
                    self._offset += len(chunk)
                    self._take(chunk)
                self.share = self._offset / max(1, size)
                if not chunk and self._rough:
                    self._end_rough()
                return True
        except OSError:  # not there yet, or not any more
            return False

    def _end_rough(self) -> None:
        if self._sampled is not None:
            self._take_tail()
        self._rough, self._sampled = False, None

    def _take_tail(self) -> None:
        """How far the run is, before all of it is read."""
        self._recent.clear()
        self._recent.extend(event for event in events_of(last_lines(self._path)) if isinstance(event, Step))

    def _take(self, chunk: bytes) -> None:
        *lines, self._torn = (self._torn + chunk).split(b"\n")
        if len(self._torn) > _LONGEST:
            self._torn = b""
        lines = [line for line in lines if line]
        for line, event in zip(lines, events_of(lines), strict=True):
            if isinstance(event, Step):
                self.series.add(_bucket(event))
                self.doing = None
                if self._sampled is None:
                    self._recent.append(event)
            elif event is not None:
                self._add(event, line)

    def _add(self, event: Event, line: bytes) -> None:
        if isinstance(event, Progress):
            self.doing = event
            return
        if isinstance(event, Started):
            self.limit_bytes = event.limit_bytes or self.limit_bytes
        if isinstance(event, Started | AttemptBegan | Resumed):
            if self._sampled is None:
                self._recent.clear()
            self.doing = self.ended = None
        if isinstance(event, Ended):
            self.ended = event
        self._say(event, line)

    def _say(self, event: Event, line: bytes) -> None:
        said, style = line_of(event)
        if said:
            mood = (
                "bad" if "red" in style else "warn" if "yellow" in style else "good" if isinstance(event, _GOOD) else ""
            )
            self.said.append(HistoryLine(at=time_of(line), text=change_texts(said, masked), mood=mood))


def _bucket(step: Step) -> Bucket:
    loss = None if step.loss is None or step.skipped else _finite(step.loss)
    return single(step.step, loss, step.tokens_per_s, [step.now_bytes, step.peak_bytes, step.host_bytes])


def _finite(number: float) -> float | None:
    return number if number - number == 0 else None


def sample(path: Path) -> Series:
    """A rough picture: steps from all over the file, and its last ones."""
    series = Series()
    for event in events_of(list(_samples(path))):
        if isinstance(event, Step):
            series.add(_bucket(event))
    return series


def _samples(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            # The first piece is the rest of a line, and the last one may lack its end.
            pieces = file.read(_SAMPLE_BYTES).split(b"\n")[1:-1]
            yield from pieces[:1]
    yield from last_lines(path)[-RECENT:]


def last_lines(path: Path, most_bytes: int = TAIL_BYTES) -> list[bytes]:
    """The whole lines at the end of a file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return []
    lines = data.split(b"\n")
    return lines[0 if size <= most_bytes else 1 : -1]
