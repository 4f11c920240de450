"""A run's `events.jsonl` for the page, however long it is: as a rough picture at once, and exactly a little later.

A run of a million steps has a file of some hundred megabytes. The rough picture takes single lines from all over the
file, which takes no longer for a long file than for a short one. Then the file is read from its beginning in portions,
and the exact curve takes the place of the rough one when the end is reached; from there on only what is new is read.

The curve is of bounded length: steps are gathered in buckets of equal size, with the last value of each, and for the
loss its least and its greatest, so that no spike is lost. When there are too many buckets, each two become one. A run
that went back to a checkpoint makes some steps again: those that it made before are forgotten, as the training has
forgotten them. A reader keeps the same list of buckets and is told from which on it has changed, and what stands there.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tightfit.diagnose.masks import masked
from tightfit.inputs.spelling import open_regular
from tightfit.messages import change_texts
from tightfit.runs import events
from tightfit.runs.lines import line_of

MOST = 1600  # buckets; a screen has no more columns
LONG_BYTES = 6 * 2**20  # from here on there is a rough picture first
SAMPLES = 800
LINES = 200
RECENT = 256  # steps that are kept whole, for the lights
TAIL_BYTES = 64 * 1024
_CHUNK = 512 * 1024
_LONGEST = 1 << 22
_SAMPLE_BYTES = 2048
_GOOD = (events.Checkpointed, events.Probe, events.Proof, events.Resumed)


Number = TypeVar("Number", int, float)


def _most(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else max(one, other)


@dataclass(slots=True)
class Bucket:
    """Some steps in a row. None: nobody says."""

    step: int  # the last one
    count: int
    loss: float | None
    loss_low: float | None
    loss_high: float | None
    tokens_per_s: float | None
    now_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None

    def take(self, other: Bucket) -> None:
        """Add steps that come later."""
        self.step, self.count = other.step, self.count + other.count
        self.loss = other.loss if other.loss is not None else self.loss
        self.tokens_per_s = other.tokens_per_s if other.tokens_per_s is not None else self.tokens_per_s
        lows = [low for low in (self.loss_low, other.loss_low) if low is not None]
        self.loss_low = min(lows, default=None)
        self.loss_high = _most(self.loss_high, other.loss_high)
        self.now_bytes = _most(self.now_bytes, other.now_bytes)
        self.peak_bytes = _most(self.peak_bytes, other.peak_bytes)
        self.host_bytes = _most(self.host_bytes, other.host_bytes)

    def row(self) -> list[float | int | None]:
        """What a reader is told, in this order."""
        row = [self.step, self.loss, self.loss_low, self.loss_high, self.tokens_per_s]
        return [*row, self.now_bytes, self.peak_bytes, self.host_bytes]


def single(step: int, loss: float | None, tokens_per_s: float | None, held: Sequence[int | None]) -> Bucket:
    """One step. `held`: bytes now, at the peak, and of the host."""
    now, peak, host = held
    return Bucket(step, 1, loss, loss, loss, tokens_per_s, now, peak, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    start: int  # the buckets from here on are replaced
    each: int  # steps in a bucket
    rows: list[list[float | int | None]]


class Series:
    """Grows with every step, and stays short."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._each = most, 1
        self._buckets: list[Bucket] = []
        self._told = 0  # the buckets before this one are as they were when they were last told

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, bucket: Bucket) -> None:
        buckets = self._buckets
        if buckets and bucket.step <= buckets[-1].step:
            del buckets[bisect_left(buckets, bucket.step, key=lambda each: each.step) :]
            self._told = min(self._told, len(buckets))
        if buckets and buckets[-1].count + bucket.count <= self._each:
            buckets[-1].take(bucket)
            self._told = min(self._told, len(buckets) - 1)
            return
        buckets.append(bucket)
        if len(buckets) > self._most:
            halved = buckets[::2]
            for first, second in zip(halved, buckets[1::2], strict=False):
                first.take(second)
            self._buckets, self._each, self._told = halved, 2 * self._each, 0

    def whole(self) -> Change:
        return Change(start=0, each=self._each, rows=[bucket.row() for bucket in self._buckets])

    def changed(self) -> Change | None:
        """What is new since it was last asked; None: nothing."""
        start, self._told = self._told, len(self._buckets)
        rows = [bucket.row() for bucket in self._buckets[start:]]
        return Change(start=start, each=self._each, rows=rows) if rows else None


class History:
    """Reads on where it stopped. Torn lines wait for their end; a file that became shorter was begun anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._offset, self._torn, self._rough = 0, b"", True
        self.series = Series()
        self._sampled: Series | None = None
        self.said: deque[dict[str, object]] = deque(maxlen=LINES)  # when, what (without secrets), and in which mood
        self._recent: deque[events.Step] = deque(maxlen=RECENT)
        self.doing: events.Progress | None = None
        self.ended: events.Ended | None = None
        self.limit_bytes: int | None = None  # what a card has, as the worker saw it
        self.share = 0.0  # how much of the file is read

    @property
    def is_whole(self) -> bool:
        """Whether the end of the file was reached once."""
        return not self._rough

    @property
    def shown(self) -> Series:
        """The exact curve, or the rough one until there is it."""
        return self.series if self._sampled is None or self.is_whole else self._sampled

    def steps(self) -> tuple[events.Step, ...]:
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
                    if self._sampled is not None:
                        self._take_tail()
                    self._rough, self._sampled = False, None
                return True
        except OSError:  # not there yet, or not any more
            return False

    def _take_tail(self) -> None:
        """How far the run is, before all of it is read."""
        self._recent.clear()
        self._recent.extend(
            event for event in events.events_of(last_lines(self._path)) if isinstance(event, events.Step)
        )

    def _take(self, chunk: bytes) -> None:
        *lines, self._torn = (self._torn + chunk).split(b"\n")
        if len(self._torn) > _LONGEST:
            self._torn = b""
        lines = [line for line in lines if line]
        for line, event in zip(lines, events.events_of(lines), strict=True):
            if isinstance(event, events.Step):
                self.series.add(_bucket(event))
                self.doing = None
                if self._sampled is None:
                    self._recent.append(event)
            elif isinstance(event, events.Progress):
                self.doing = event
            elif event is not None:
                self._add(event, line)

    def _add(self, event: events.Event, line: bytes) -> None:
        if isinstance(event, events.Started):
            self.limit_bytes = event.limit_bytes or self.limit_bytes
        if isinstance(event, events.Started | events.AttemptBegan | events.Resumed):
            if self._sampled is None:
                self._recent.clear()
            self.doing = self.ended = None
        if isinstance(event, events.Ended):
            self.ended = event
        said, style = line_of(event)
        if said:
            moods = {"bad": "red" in style, "warn": "yellow" in style, "good": isinstance(event, _GOOD)}
            mood = next((name for name, holds in moods.items() if holds), "")
            self.said.append({"at": events.time_of(line), "text": change_texts(said, masked), "mood": mood})


def _bucket(step: events.Step) -> Bucket:
    is_number = step.loss is not None and not step.skipped and math.isfinite(step.loss)
    held = [step.now_bytes, step.peak_bytes, step.host_bytes]
    return single(step.step, step.loss if is_number else None, step.tokens_per_s, held)


def sample(path: Path) -> Series:
    """A rough picture: steps from all over the file, and its last ones."""
    lines: list[bytes] = []
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            # The first piece is the rest of a line, and the last one may lack its end.
            lines += file.read(_SAMPLE_BYTES).split(b"\n")[1:-1][:1]
    series = Series()
    for event in events.events_of([*lines, *last_lines(path)[-RECENT:]]):
        if isinstance(event, events.Step):
            series.add(_bucket(event))
    return series


def last_lines(path: Path, most_bytes: int = TAIL_BYTES) -> list[bytes]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return []
    lines = data.split(b"\n")
    return lines[0 if size <= most_bytes else 1 : -1]
