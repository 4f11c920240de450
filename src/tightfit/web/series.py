"""The steps of a run as a curve of bounded length, however long the run is.

Steps are gathered in buckets of equal size: the last value of each, and for the loss its least and its greatest, so
that no spike is lost. When there are too many buckets, each two become one. A run that went back to a checkpoint makes
some steps again: those that it made before are forgotten, as the training has forgotten them.

A reader keeps the same list of buckets and is told what has changed: from which bucket on, and what stands there now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

MOST = 1600
"""Buckets; a screen has no more columns."""


@dataclass(slots=True)
class Bucket:
    """Some steps in a row. None: nobody says."""

    step: int
    """The last one."""
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
        self.loss_low = _least(self.loss_low, other.loss_low)
        self.loss_high = _most(self.loss_high, other.loss_high)
        self.tokens_per_s = other.tokens_per_s if other.tokens_per_s is not None else self.tokens_per_s
        self.now_bytes = _most(self.now_bytes, other.now_bytes)
        self.peak_bytes = _most(self.peak_bytes, other.peak_bytes)
        self.host_bytes = _most(self.host_bytes, other.host_bytes)

    def row(self) -> list[float | int | None]:
        """What a reader is told, in this order."""
        return [
            self.step,
            self.loss,
            self.loss_low,
            self.loss_high,
            self.tokens_per_s,
            self.now_bytes,
            self.peak_bytes,
            self.host_bytes,
        ]


def single(step: int, loss: float | None, tokens_per_s: float | None, held: Sequence[int | None]) -> Bucket:
    """One step. `held`: bytes now, at the peak, and of the host."""
    now, peak, host = held
    return Bucket(step, 1, loss, loss, loss, tokens_per_s, now, peak, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    start: int
    """The buckets from here on are replaced."""
    each: int
    """Steps in a bucket."""
    rows: list[list[float | int | None]]


class Series:
    """Grows with every step, and stays short."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._each = most, 1
        self._buckets: list[Bucket] = []
        self._told = 0
        """The buckets before this one are as they were when they were last told."""

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def last(self) -> Bucket | None:
        return self._buckets[-1] if self._buckets else None

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
            halved = []
            for place in range(0, len(self._buckets), 2):
                first = self._buckets[place]
                for second in self._buckets[place + 1 : place + 2]:
                    first.take(second)
                halved.append(first)
            self._buckets, self._each, self._told = halved, 2 * self._each, 0

    def whole(self) -> Change:
        return Change(start=0, each=self._each, rows=[bucket.row() for bucket in self._buckets])

    def changed(self) -> Change | None:
        """What is new since it was last asked; None: nothing."""
        start, self._told = self._told, len(self._buckets)
        rows = [bucket.row() for bucket in self._buckets[start:]]
        return Change(start=start, each=self._each, rows=rows) if rows else None


Number = TypeVar("Number", int, float)


def _least(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else min(one, other)


def _most(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else max(one, other)
