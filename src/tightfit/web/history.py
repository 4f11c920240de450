"""A run's `events.jsonl` for the page, however long it is: as a rough picture at once, and exactly a little later.

A run of a million steps has a file of some hundred megabytes. The rough picture takes single lines from all over the
file, which takes no longer for a long file than for a short one. Then the file is read from its beginning in portions,
and the exact curve takes the place of the rough one when the end is reached; from there on only what is new is read.

The curve is of bounded length: steps are gathered in buckets of equal size, with the last value of each, and for the
loss its mean, its least and its greatest, so that no spike is lost. When there are too many buckets, each two become
one. A run that went back to a checkpoint makes some steps again: those that it made before are forgotten, as the
training has forgotten them. A reader keeps the same list of buckets and is told from which on it has changed, and what
stands there.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any

from tightfit.diagnose.masks import masked
from tightfit.inputs.spelling import open_regular
from tightfit.messages import change_texts
from tightfit.runs import events
from tightfit.runs.lines import line_of

MOST = 1600  # buckets; a screen has no more columns
LONG_BYTES = 6 * 2**20  # from here on there is a rough picture first
SAMPLES = 800
LINES = 200
MOST_MARKS, MOST_EVALUATIONS = 200, 400
RECENT = 256  # steps that are kept whole, for the lights
TAIL_BYTES = 64 * 1024
_CHUNK = 512 * 1024
_LONGEST = 1 << 22
_SAMPLE_BYTES = 2048
_RESCUES = ("smaller plan", "make room", "skip data", "precision", "older checkpoint")
"""Actions after which a run goes on otherwise than before."""
_GOOD = (events.Checkpointed, events.Probe, events.Proof, events.Resumed)


Row = list[float | int | tuple[int, ...] | None]


@dataclass(slots=True)
class Bucket:
    """Some steps in a row. None: nobody says."""

    step: int  # the last one
    count: int
    losses: int  # steps that have one
    loss: float  # of those, in all
    loss_low: float | None
    loss_high: float | None
    tokens_per_s: float | None
    now_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None
    at: float | None  # when the last one was made, in seconds since the epoch
    learning_rate: float | None
    grad_norm: float | None  # the largest
    ranks: tuple[int, ...]  # bytes that each rank held at its most

    def take(self, other: Bucket) -> None:
        """Add steps that come later."""
        self.step, self.count = other.step, self.count + other.count
        self.losses, self.loss = self.losses + other.losses, self.loss + other.loss
        self.tokens_per_s = other.tokens_per_s if other.tokens_per_s is not None else self.tokens_per_s
        self.learning_rate = other.learning_rate if other.learning_rate is not None else self.learning_rate
        self.at = other.at if other.at is not None else self.at
        # One by one: a long run does this a hundred thousand times.
        if other.loss_low is not None and (self.loss_low is None or other.loss_low < self.loss_low):
            self.loss_low = other.loss_low
        if other.loss_high is not None and (self.loss_high is None or other.loss_high > self.loss_high):
            self.loss_high = other.loss_high
        if other.grad_norm is not None and (self.grad_norm is None or other.grad_norm > self.grad_norm):
            self.grad_norm = other.grad_norm
        if other.now_bytes is not None and (self.now_bytes is None or other.now_bytes > self.now_bytes):
            self.now_bytes = other.now_bytes
        if other.peak_bytes is not None and (self.peak_bytes is None or other.peak_bytes > self.peak_bytes):
            self.peak_bytes = other.peak_bytes
        if other.host_bytes is not None and (self.host_bytes is None or other.host_bytes > self.host_bytes):
            self.host_bytes = other.host_bytes
        if self.ranks and len(self.ranks) == len(other.ranks):
            self.ranks = tuple(map(max, self.ranks, other.ranks))
        else:
            self.ranks = other.ranks or self.ranks

    def row(self) -> Row:
        """What a reader is told, in this order."""
        loss = self.loss / self.losses if self.losses else None
        row: Row = [self.step, loss, self.loss_low, self.loss_high, self.tokens_per_s]
        row += [self.now_bytes, self.peak_bytes, self.host_bytes]
        return [*row, self.at, self.learning_rate, self.grad_norm, self.ranks[: events.MOST_RANKS] or None]


def single(step: events.Step) -> Bucket:
    """One step."""
    is_number = step.loss is not None and not step.skipped and math.isfinite(step.loss)
    loss = step.loss if is_number else None
    return Bucket(
        step=step.step,
        count=1,
        losses=int(loss is not None),
        loss=loss or 0.0,
        loss_low=loss,
        loss_high=loss,
        tokens_per_s=step.tokens_per_s,
        now_bytes=step.now_bytes,
        peak_bytes=step.peak_bytes,
        host_bytes=step.host_bytes,
        at=step.at,
        learning_rate=step.learning_rate,
        grad_norm=step.grad_norm,
        ranks=step.ranks,
    )


_FLOATS, _COUNTS = (float, NoneType), (int, NoneType)
_PLAIN = frozenset(product((int,), (bool,), *[_FLOATS] * 5, *[_COUNTS] * 3))
"""Types of what a step says, as our own worker writes it."""


def plain_step(tree: Any) -> Bucket | None:
    """What `single` makes of the event in a tree, in a quarter of the time, where all of it is plain; None: read it."""
    if type(tree) is not dict or tree.get("event") != "step" or type(memory := tree.get("memory")) is not dict:
        return None
    get: Callable[[str], Any] = tree.get
    step, skipped, loss, pace, at = map(get, ("step", "skipped", "loss", "tokens_per_s", "at"))
    rate, norm, ranks = tree.get("learning_rate"), tree.get("grad_norm"), memory.get("ranks")
    now, peak, host = memory.get("now_bytes"), memory.get("peak_bytes"), memory.get("host_bytes")
    floats = type(loss), type(pace), type(at), type(rate), type(norm)
    if (type(step), type(skipped), *floats, type(now), type(peak), type(host)) not in _PLAIN or skipped:
        return None
    total = (loss or 0.0) + (pace or 0.0) + (at or 0.0) + (rate or 0.0) + (norm or 0.0)
    if total - total != 0 or step < 0 or (now or 0) < 0 or (peak or 0) < 0 or (host or 0) < 0:
        return None  # one is no number, or less than nothing
    if ranks is not None and (type(ranks) is not list or set(map(type, ranks)) != {int} or min(ranks) < 0):
        return None
    held = now, peak, host
    return Bucket(
        step, 1, int(loss is not None), loss or 0.0, loss, loss, pace, *held, at, rate, norm, tuple(ranks or ())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    start: int  # the buckets from here on are replaced
    each: int  # steps in a bucket
    rows: list[Row]


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
        self._recent: deque[Any] = deque(maxlen=RECENT)  # trees of steps, as far as nobody has asked for them
        self.doing: events.Progress | None = None
        self.ended: events.Ended | None = None
        self.limit_bytes: int | None = None  # what a card has, as the worker saw it
        self.phases: dict[str, int] = {}  # bytes by phase, as they were planned
        self.milestones: dict[str, int] = {}  # bytes by phase, as they were measured when it was first passed
        self.evaluations: dict[int, float] = {}  # loss by step
        self.marks: deque[dict[str, object]] = deque(maxlen=MOST_MARKS)  # where it was begun again, or rescued
        self._last_step = 0
        self._has_failed = False  # and goes on by itself
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
        read = [each if isinstance(each, events.Step) else events.read_event(each) for each in self._recent]
        self._recent = deque(read, maxlen=RECENT)
        return tuple(each for each in read if isinstance(each, events.Step))

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
        for line, tree in zip(lines, events.trees_of(lines), strict=True):
            bucket, event = plain_step(tree), None
            if bucket is None:
                event = events.read_event(tree)
                bucket = single(event) if isinstance(event, events.Step) else None
            if bucket is not None:
                self.doing, self._last_step, self._has_failed = None, bucket.step, False
                self.series.add(bucket)
                if self._sampled is None:
                    self._recent.append(tree)
            elif isinstance(event, events.Progress):
                self.doing = event
            elif event is not None:
                self._add(event, line)

    def _add(self, event: events.Event, line: bytes) -> None:
        said, style = line_of(event)
        told = {"at": events.time_of(line), "text": change_texts(said, masked)}
        match event:
            case events.Started():
                self.limit_bytes = event.limit_bytes or self.limit_bytes
                self.phases = {name: held for name, held in event.phases.items() if type(held) is int}
            case events.MemoryMark(milestone=name, measured_bytes=held) if held is not None:
                self.milestones[name] = held
            case events.Evaluation(step=int(step), loss=float(loss)) if math.isfinite(loss):
                self.evaluations[step] = loss
                if len(self.evaluations) > MOST_EVALUATIONS:
                    self.evaluations = dict(list(self.evaluations.items())[::2])
            case events.AttemptFailed():
                kind = "rescue" if event.action in _RESCUES else "stop" if event.action == "stop" else "restart"
                self.marks.append({"step": event.step or self._last_step, "kind": kind, **told})
                self._has_failed = kind != "stop"
            case events.Resumed(step=step) if step is not None:
                self.evaluations = {made: loss for made, loss in self.evaluations.items() if made <= step}
                if self._last_step and not self._has_failed:
                    self.marks.append({"step": step, "kind": "resumed", **told})
        if isinstance(event, events.Started | events.AttemptBegan | events.Resumed):
            if self._sampled is None:
                self._recent.clear()
            self.doing = self.ended = None
        if isinstance(event, events.Ended):
            self.ended = event
        if said:
            moods = {"bad": "red" in style, "warn": "yellow" in style, "good": isinstance(event, _GOOD)}
            mood = next((name for name, holds in moods.items() if holds), "")
            self.said.append({**told, "mood": mood})


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
            series.add(single(event))
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
