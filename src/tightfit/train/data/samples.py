"""Samples as the training loop meets them: read from mapped files, padded to a batch only when asked for.

Nothing is copied: the token file is mapped, all ranks of a node share its pages, and a sample is a slice. torch is
loaded where a batch is made and nowhere else, so that whatever only looks at data stays quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of a token that does not count, as torch's cross entropy has it."""

MULTIPLE = 8
"""Rows are padded to a multiple of this: what tensor cores like."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: tokens, labels (`IGNORED` where no loss is), and where its documents begin."""

    ids: npt.NDArray[Any]
    labels: Ints
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Counts of a data set. `cut` and `skipped` are of all that was read, before any was held back."""

    samples: int
    tokens: int
    loss_tokens: int
    longest: int
    documents: int
    cut: int
    skipped: int
    left_out: int
    """Samples in neither part: answers to a speaker who is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCounts:
    """What was read, whichever part a sample went to."""

    cut: int = 0
    skipped: int = 0
    left_out: int = 0


class Rows(Protocol):
    """Where samples come from."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Sample: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """All samples of one part of the data."""

    rows: Rows
    lengths: npt.NDArray[np.int32]
    """Tokens of each sample."""
    loss_tokens: Ints
    """Labels of each sample that count once labels are shifted by one."""
    fingerprint: str
    """The same for the same samples in the same order."""
    sequence: int
    packed: bool = False
    documents: int
    tally: ReadCounts = ReadCounts()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.rows.row(int(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is trained on, and what is held back to judge by."""

    train: Samples
    held: Samples | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Rows of one length. There is no attention mask: padding on the right is never looked at."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    """Set for packed rows: it starts anew at each document, and attention stays within one."""


def batch(samples: Samples, indices: Sequence[int] | Ints, pad_id: int, *, pad_to: int | None = None) -> TokenBatch:
    """The rows padded on the right to `pad_to`, or to the longest of them and a multiple of 8."""
    import torch

    rows = [samples[int(index)] for index in indices]
    longest = max(len(row.ids) for row in rows)
    width = pad_to or min(-(-longest // MULTIPLE) * MULTIPLE, max(samples.sequence, longest))
    if width < longest:
        raise ValueError(f"a row of {longest} tokens does not fit into {width}")
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
        labels[at, : len(row.labels)] = row.labels
    places = np.stack([_places(row, width) for row in rows]) if samples.packed else None
    return TokenBatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        position_ids=None if places is None else torch.from_numpy(places),
    )


def flatten(made: TokenBatch) -> TokenBatch:
    """The same rows one after another as a single row: flash attention keeps documents apart in one row only."""
    import torch

    rows, width = made.input_ids.shape
    places = made.position_ids
    if places is None:
        places = torch.arange(width).expand(rows, width)
    return TokenBatch(
        input_ids=made.input_ids.reshape(1, -1), labels=made.labels.reshape(1, -1), position_ids=places.reshape(1, -1)
    )


def worst(samples: Samples, count: int) -> Ints:
    """The `count` samples that make the largest batch: the longest. Where there are fewer, they repeat."""
    lengths = np.asarray(samples.lengths)
    if count < len(lengths):
        # The longest first, and of equals the first: the same on every machine.
        threshold = np.partition(lengths, len(lengths) - count)[len(lengths) - count]
        above = np.flatnonzero(lengths > threshold)
        level = np.flatnonzero(lengths == threshold)[: count - len(above)]
        chosen = np.concatenate([above, level])
    else:
        chosen = np.arange(len(lengths))
    ordered = chosen[np.argsort(-lengths[chosen].astype(np.int64), kind="stable")]
    return np.resize(ordered, count).astype(np.int64)


def describe(samples: Samples) -> Description:
    """How much there is."""
    return Description(
        samples=len(samples),
        tokens=int(np.sum(samples.lengths, dtype=np.int64)),
        loss_tokens=int(np.sum(samples.loss_tokens)),
        longest=int(np.max(samples.lengths)),
        documents=samples.documents,
        cut=samples.tally.cut,
        skipped=samples.tally.skipped,
        left_out=samples.tally.left_out,
    )


def _places(row: Sample, width: int) -> Ints:
    """0, 1, 2 … anew at each document; the padding goes on from the last, so that it makes no document more."""
    places = np.arange(width, dtype=np.int64)
    for start in row.starts:
        places[start:] = np.arange(width - start)
    return places


@dataclass(frozen=True, kw_only=True)
class GeneratedRows:
    """Random tokens, full length: what a plan can be proved with where no data is at hand."""

    count: int
    sequence: int
    vocabulary: int
    seed: int
    first: int = 0

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> Sample:
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.first + index]))
        ids = random.integers(0, self.vocabulary, size=self.sequence, dtype=np.int64)
        labels = ids.copy()
        labels[0] = IGNORED
        return Sample(ids=ids, labels=labels)
