"""Which documents make up which sample: the limit, the part that is held back, and packing.

The tokens stay as they are; a view is a list of document numbers, so that another seed or packing costs seconds and
no new tokenising.

Packing fills rows of the sequence's length with whole documents. Best fit, longest first, within blocks of documents
in their given order: the same rows on every machine, in bounded memory, and nearly full.

What is held back is chosen by the seed. Where speakers are known, people are held back, not samples: nothing that a
held-back person said or answered is trained on, and an answer that another gave to them goes to neither part.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

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
from tightfit.train.data.samples import IGNORED, Ints, ReadCounts, Sample, Samples, Split
from tightfit.types import ConfigError

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
    values = [
        spec.packing,
        spec.max_samples,
        limit,
        spec.evaluation_split,
        spec.seed if spec.evaluation_split else None,
    ]
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
    parts = dict(_parts(want, store, folder, values))
    return Split(train=parts["train"], held=parts.get("held"))


def _parts(want: Wanted, store: Store, folder: Path, values: dict[str, Any]) -> Iterator[tuple[str, Samples]]:
    tally = ReadCounts(cut=store.cut, skipped=store.skipped, left_out=values["left_out"])
    for part in ("train", "held"):
        if not values[part]["rows"]:
            continue
        rows = StoredRows(
            store=store,
            documents=map_needed_file(folder / f"{part}.documents", "<i8"),
            borders=map_file(folder / f"{part}.borders", "<i8"),
        )
        yield (
            part,
            Samples(
                rows=rows,
                lengths=map_needed_file(folder / f"{part}.lengths", "<i4"),
                loss_tokens=map_needed_file(folder / f"{part}.losses", "<i8"),
                fingerprint=sha256(f"{want.key} {view_key(want)} {part}".encode()).hexdigest(),
                sequence=want.spec.sequence,
                packed=want.spec.packing,
                documents=values[part]["documents"],
                tally=tally,
            ),
        )
