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
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tightfit.messages import Message, Said
from tightfit.train.data import cache as on_disk
from tightfit.train.data.cache import Progress, Store, Wanted
from tightfit.train.data.order import permute
from tightfit.train.data.recipes import resolve
from tightfit.train.data.spec import GENERATED_SAMPLES, DataSpec, check_spec
from tightfit.train.data.tokens import codec_of
from tightfit.types import ConfigError

if TYPE_CHECKING:
    import torch

IGNORED = -100  # the label of a token that does not count, as torch's cross entropy has it
MULTIPLE = 8  # rows are padded to a multiple of this: what tensor cores like

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: tokens, labels (`IGNORED` where no loss is), and where its documents begin."""

    ids: npt.NDArray[Any]
    labels: Ints
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """All samples of one part of the data."""

    row: Callable[[int], Sample]
    lengths: npt.NDArray[np.int32]  # tokens of each sample
    loss_tokens: Ints  # labels of each sample that count once labels are shifted by one
    fingerprint: str  # the same for the same samples in the same order
    sequence: int
    packed: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.row(int(index))


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


def prepare(spec: DataSpec, tokenizer: Any, cache: Path, progress: Progress) -> None:
    """Build what `open_samples` maps, unless it is there. One process of a node calls it."""
    check_spec(spec)
    if spec.is_generated:
        return
    want = on_disk.identify(spec, codec_of(tokenizer, spec.template), cache)
    with on_disk.lock(want.folder):
        on_disk.build_store(want, progress)
        build_view(want)


def open_samples(spec: DataSpec, tokenizer: Any, cache: Path) -> Split:
    """The samples of a prepared data set; every rank maps the same files."""
    check_spec(spec)
    if not spec.is_generated:
        return open_view(on_disk.identify(spec, codec_of(tokenizer, spec.template), cache))
    count = min(spec.samples or GENERATED_SAMPLES, spec.max_samples or 2**62)
    held = 0
    if spec.evaluation_split and count > 1:
        held = min(count - 1, max(1, round(spec.evaluation_split * count)))

    def generate(first: int, count: int) -> Samples:
        length, words = spec.sequence, len(tokenizer)
        rows = GeneratedRows(count=count, sequence=length, vocabulary=words, seed=spec.seed, first=first)
        return Samples(
            row=rows.row,
            lengths=np.full(count, length, dtype=np.int32),
            loss_tokens=np.full(count, length - 1, dtype=np.int64),
            fingerprint=sha256(repr(("generated", rows)).encode()).hexdigest(),
            sequence=length,
        )

    return Split(train=generate(0, count - held), held=generate(count - held, held) if held else None)


def explain(spec: DataSpec, tokenizer: Any) -> tuple[Said, ...]:
    """What was chosen for the user and has to be known, a sentence each: to be shown once."""
    if spec.is_generated:
        return (Message("data.random-samples"),)
    resolved = resolve(spec) if spec.by_recipe else None
    return (*codec_of(tokenizer, spec.template).said, *(resolved.talks.said if resolved else ()))


def batch(
    samples: Samples, indices: Sequence[int] | Ints, pad_id: int, *, pad_to: int | None = None, parts: int = 1
) -> TokenBatch:
    """The rows padded on the right to `pad_to`, or to the longest of them and a multiple of 8; and so that they can be
    cut into as many equal parts."""
    import torch

    rows = [samples[int(index)] for index in indices]
    longest = max(len(row.ids) for row in rows)
    width = pad_to or min(-(-longest // MULTIPLE) * MULTIPLE, max(samples.sequence, longest))
    width = -(-width // parts) * parts
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


@dataclass(frozen=True, kw_only=True)
class GeneratedRows:
    """Random tokens, full length: what a plan can be proved with where no data is at hand."""

    count: int
    sequence: int
    vocabulary: int
    seed: int
    first: int = 0

    def row(self, index: int) -> Sample:
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.first + index]))
        ids = random.integers(0, self.vocabulary, size=self.sequence, dtype=np.int64)
        labels = ids.copy()
        labels[0] = IGNORED
        return Sample(ids=ids, labels=labels)


# --- views ---------------------------------------------------------------------------------------

BLOCK = 65_536  # documents that are looked at, and packed, together
PARTS = ("train", "held")
TRAIN, HELD, NEITHER = 0, 1, 2  # which of PARTS a document goes to


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Samples as lists of documents."""

    store: Store
    documents: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64] | None  # row i holds documents from border i to i + 1; None: one each

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


def build_view(want: Wanted) -> None:
    """Build the view unless it is there. Documents pass in blocks: their number does not matter to the memory."""
    folder, packing = want.folder / "views" / view_key(want), want.spec.packing
    if (folder / on_disk.MANIFEST).is_file():
        return
    store = on_disk.open_store(want.folder)
    limits = [each for each in (want.spec.max_samples, want.source.limit if want.source else None) if each]
    count = min([len(store.lengths), *limits])
    side_of = _sides(store, count, want)
    made = {part: {"rows": 0, "documents": 0} for part in PARTS}
    left = 0
    with on_disk.stage(folder) as staging:
        with ExitStack() as stack:
            names = ("documents", "lengths", "losses", *(("borders",) if packing else ()))
            outs = [stack.enter_context(on_disk.open_columns(staging, f"{part}.{{}}", names)) for part in PARTS]
            for first in range(0, count, BLOCK):
                numbers = np.arange(first, min(first + BLOCK, count))
                side = side_of(numbers)
                left += int(np.count_nonzero(side == NEITHER))
                for code, (out, counts) in enumerate(zip(outs, made.values(), strict=True)):
                    documents = numbers[side == code]
                    if not len(documents):
                        continue
                    lengths, losses = store.lengths[documents], store.losses[documents]
                    if packing:
                        order, borders = pack(lengths, want.spec.sequence)
                        on_disk.put(out, borders=counts["documents"] + borders[:-1])
                        documents = documents[order]
                        lengths, losses = (np.add.reduceat(each[order], borders[:-1]) for each in (lengths, losses))
                    on_disk.put(out, documents=documents, lengths=lengths, losses=losses)
                    counts["rows"] += len(lengths)
                    counts["documents"] += len(documents)
            for out, counts in zip(outs, made.values(), strict=True):
                if packing:
                    on_disk.put(out, borders=[counts["documents"]])
        if not made["train"]["rows"]:
            raise ConfigError(Message("data.nothing-left-to-train", split=want.spec.evaluation_split))
        on_disk.write_manifest(staging, {**made, "left_out": left})


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


def open_view(want: Wanted) -> Split:
    """Both parts, mapped."""
    store, key = on_disk.open_store(want.folder), view_key(want)
    folder = want.folder / "views" / key
    values = on_disk.read_manifest(folder)

    def open_part(part: str) -> Samples:
        found = on_disk.map_columns(folder, f"{part}.{{}}", ("documents", "lengths", "losses"), ("borders",))
        return Samples(
            row=StoredRows(store=store, documents=found["documents"], borders=found["borders"]).row,
            lengths=found["lengths"],
            loss_tokens=found["losses"],
            fingerprint=sha256(f"{want.key} {key} {part}".encode()).hexdigest(),
            sequence=want.spec.sequence,
            packed=want.spec.packing,
        )

    return Split(train=open_part("train"), held=open_part("held") if values["held"]["rows"] else None)
