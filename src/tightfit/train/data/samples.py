"""Samples as the training loop meets them: read from mapped files, padded to a batch only when asked for.

Nothing is copied: the token file is mapped, all ranks of a node share its pages, and a sample is a slice. torch is
loaded where a batch is made and nowhere else, so that whatever only looks at data stays quick.

Which documents make up which sample is a view: a list of document numbers after the limit, the part that is held back,
and packing. The tokens stay as they are, so that another seed or packing costs seconds and no new tokenising.

Packing fills rows of the sequence's length with whole documents. Best fit, longest first, within blocks of documents
in their given order: the same rows on every machine, in bounded memory, and nearly full.

What is held back is chosen by the seed. Where speakers are known, people are held back, not samples: nothing that a
held-back person said or answered is trained on, and an answer that another gave to them goes to neither part.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from tightfit.messages import Message
from tightfit.train.data.cache import (
    MANIFEST,
    Store,
    Wanted,
    map_file,
    map_needed_file,
    open_store,
    read_manifest,
    stage,
    write_manifest,
)
from tightfit.train.data.order import permute
from tightfit.types import ConfigError

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
    places = None
    if samples.packed:  # 0, 1, 2 … anew at each document; the padding goes on from the last, and makes no document more
        places = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
        for at, row in enumerate(rows):
            for start in row.starts:
                places[at, start:] = np.arange(width - start)
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


# --- views ---------------------------------------------------------------------------------------

BLOCK = 65_536
"""Documents that are looked at, and packed, together."""

TRAIN, HELD, NEITHER = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Samples as lists of documents."""

    store: Store
    documents: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64] | None
    """Row i holds documents from border i to i + 1; None: one each."""

    def __len__(self) -> int:
        return len(self.documents) if self.borders is None else len(self.borders) - 1

    def row(self, index: int) -> Sample:
        if self.borders is None:
            ids, labels = self._document(int(self.documents[index]))
            return Sample(ids=ids, labels=labels)
        parts = [self._document(int(each)) for each in self.documents[self.borders[index] : self.borders[index + 1]]]
        ends = np.cumsum([len(ids) for ids, _ in parts])
        return Sample(
            ids=np.concatenate([ids for ids, _ in parts]),
            labels=np.concatenate([labels for _, labels in parts]),
            starts=(0, *(int(end) for end in ends[:-1])),
        )

    def _document(self, number: int) -> tuple[npt.NDArray[Any], Ints]:
        start, length = int(self.store.starts[number]), int(self.store.lengths[number])
        ids = self.store.tokens[start : start + length]
        labels = ids.astype(np.int64)
        if self.store.learned is not None:
            labels[self.store.learned[start : start + length] == 0] = IGNORED
        labels[0] = IGNORED  # nothing stands before it, or only another document
        return ids, labels


def view_key(want: Wanted) -> str:
    """The name of a view within its store."""
    spec = want.spec
    limit = want.source.limit if want.source else None
    seed = spec.seed if spec.evaluation_split else None
    values = [spec.packing, spec.max_samples, limit, spec.evaluation_split, seed]
    return sha256(json.dumps(values).encode()).hexdigest()[:16]


def build_view(want: Wanted, cache: Path) -> None:
    """Build the view unless it is there. Documents pass in blocks: their number does not matter to the memory."""
    folder = _folder(want, cache)
    if (folder / MANIFEST).is_file():
        return
    store = open_store(want.folder(cache))
    limits = [each for each in (want.spec.max_samples, want.source.limit if want.source else None) if each]
    count = min([len(store.lengths), *limits])
    side_of = _sides(store, count, want)
    left = 0
    with stage(folder) as staging:
        with _Part(staging, "train", want) as train, _Part(staging, "held", want) as held:
            for first in range(0, count, BLOCK):
                numbers = np.arange(first, min(first + BLOCK, count))
                side = side_of(numbers)
                block = slice(first, first + len(numbers))
                for part, code in ((train, TRAIN), (held, HELD)):
                    part.take(
                        numbers[side == code], store.lengths[block][side == code], store.losses[block][side == code]
                    )
                left += int(np.count_nonzero(side == NEITHER))
        if not train.rows:
            raise ConfigError(Message("data.nothing-left-to-train", split=want.spec.evaluation_split))
        write_manifest(staging, {"train": train.counts(), "held": held.counts(), "left_out": left})


def _folder(want: Wanted, cache: Path) -> Path:
    return want.folder(cache) / "views" / view_key(want)


def _sides(store: Store, count: int, want: Wanted) -> Callable[[Ints], npt.NDArray[np.uint8]]:
    """What tells for documents which part each goes to."""
    share, seed = want.spec.evaluation_split, want.spec.seed
    if not share:
        return lambda numbers: np.full(len(numbers), TRAIN, dtype=np.uint8)
    groups = store.groups
    if groups is None:
        number = max(1, round(share * count)) if count > 1 else 0
        # Of a permutation exactly `number` places lie below `number`, and each can be asked for alone.
        return lambda numbers: (permute(numbers, count, seed, 0) < number).astype(np.uint8)
    people = np.unique(groups[:count][groups[:count] >= 0])
    held = min(len(people) - 1, max(1, round(share * len(people))))
    chosen = people[permute(np.arange(held), len(people), seed, 0)]

    def by_people(numbers: Ints) -> npt.NDArray[np.uint8]:
        pairs = np.isin(groups[numbers], chosen)
        return np.where(pairs[:, 0], HELD, np.where(pairs[:, 1], NEITHER, TRAIN)).astype(np.uint8)

    return by_people


class _Part:
    """The files of one part of a view while they grow."""

    def __init__(self, staging: Path, name: str, want: Wanted) -> None:
        self.staging, self.name = staging, name
        self.room = want.spec.sequence if want.spec.packing else None
        self.rows = self.documents = 0
        self.out: dict[str, BinaryIO] = {}

    def __enter__(self) -> _Part:
        for kind in ("documents", "lengths", "losses", *(("borders",) if self.room else ())):
            self.out[kind] = (self.staging / f"{self.name}.{kind}").open("wb")
        return self

    def take(self, documents: Ints, lengths: npt.NDArray[np.int32], losses: Ints) -> None:
        if not len(documents):
            return
        if self.room:
            order, borders = pack(lengths, self.room)
            self.out["borders"].write((self.documents + borders[:-1]).astype("<i8").tobytes())
            documents = documents[order]
            lengths = np.add.reduceat(lengths[order], borders[:-1])
            losses = np.add.reduceat(losses[order], borders[:-1])
        self.out["documents"].write(documents.astype("<i8").tobytes())
        self.out["lengths"].write(lengths.astype("<i4").tobytes())
        self.out["losses"].write(losses.astype("<i8").tobytes())
        self.rows += len(lengths)
        self.documents += len(documents)

    def counts(self) -> dict[str, int]:
        return {"rows": self.rows, "documents": self.documents}

    def __exit__(self, *_: object) -> None:
        if self.room:
            self.out["borders"].write(np.asarray([self.documents], dtype="<i8").tobytes())
        for file in self.out.values():
            file.close()


def pack(lengths: npt.NDArray[Any], room: int) -> tuple[Ints, Ints]:
    """Documents in the order of their rows, and where each row begins (with the end as the last)."""
    # The row of each document: the open row that it fills best. Open rows are kept by the room that they have left.
    rows = np.empty(len(lengths), dtype=np.int64)
    open_rows: dict[int, list[int]] = {}
    left: list[int] = []  # the sizes of room that some open row has, in order
    count = 0
    for document in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[document])
        at = bisect_left(left, length)
        if at < len(left):
            size = left[at]
            row = open_rows[size].pop()
            if not open_rows[size]:
                del left[at]
        else:
            size, row, count = room, count, count + 1
        rows[document] = row
        rest = size - length
        if rest:
            if not open_rows.get(rest):
                insort(left, rest)
            open_rows.setdefault(rest, []).append(row)
    order = np.argsort(rows, kind="stable")
    borders = np.flatnonzero(np.diff(rows[order], prepend=-1))
    return order, np.append(borders, len(order)).astype(np.int64)


def open_view(want: Wanted, cache: Path) -> Split:
    """Both parts, mapped."""
    store, folder = open_store(want.folder(cache)), _folder(want, cache)
    values = read_manifest(folder)
    tally = ReadCounts(cut=store.cut, skipped=store.skipped, left_out=values["left_out"])
    parts = {
        part: Samples(
            rows=StoredRows(
                store=store,
                documents=map_needed_file(folder / f"{part}.documents", "<i8"),
                borders=map_file(folder / f"{part}.borders", "<i8"),
            ),
            lengths=map_needed_file(folder / f"{part}.lengths", "<i4"),
            loss_tokens=map_needed_file(folder / f"{part}.losses", "<i8"),
            fingerprint=sha256(f"{want.key} {view_key(want)} {part}".encode()).hexdigest(),
            sequence=want.spec.sequence,
            packed=want.spec.packing,
            documents=values[part]["documents"],
            tally=tally,
        )
        for part in ("train", "held")
        if values[part]["rows"]
    }
    return Split(train=parts["train"], held=parts.get("held"))
