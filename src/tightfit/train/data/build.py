"""Many examples to tokens on disk, in several processes and little memory.

The files are cut into pieces of some megabytes at line ends. A piece is one process's task: it reads its bytes,
encodes example by example and writes a shard (tokens, lengths, which tokens are learned). Only counts travel between
processes. The parent appends the shards in the order of the pieces, so that the result is the same bytes whatever
the number of processes. Nothing ever holds more than a piece, its shard and, in the parent, a copy buffer.

A child that outlives its parent would tokenise for nobody: each watches for that and ends itself.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from tightfit.messages import Message, Said, message_of
from tightfit.train.data.encode import Encoded, Encoder, encoder_of
from tightfit.train.data.layouts import ExampleError, Layout, example_of
from tightfit.train.data.prompt import Prompter, SectionCount, prompter_of
from tightfit.train.data.sources import json_fault, not_utf8
from tightfit.train.data.tokens import Codec
from tightfit.types import ConfigError

PIECE_BYTES = 4 * 2**20
ALONE_BYTES = 2**20
"""Below this, starting processes takes longer than the work."""
MOST_PROCESSES = 16

Progress = Callable[[int, int, Message | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of a file that one process encodes."""

    path: str
    kind: Literal["text", "lines"]
    start: int
    end: int
    first: bool
    """The beginning of its file."""
    last: bool
    unit: str = "line"
    """What an example is called in a sentence, with `named`: a line of the file itself, or an item of a list."""
    named: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece, and what to do with it."""

    number: int
    piece: FilePart
    folder: str
    layout: Layout
    sequence: int
    overlong: Literal["skip", "cut"]
    recipe: str | None
    """A resolved recipe, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What came of a piece, or of all."""

    examples: int = 0
    cut: int = 0
    skipped: int = 0
    tokens: int = 0
    targets: str = ""
    """Hash of the answers of a recipe's examples."""
    sections: tuple[SectionCount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadExample:
    """An example that cannot be used. Where its piece begins, the parent finds out."""

    line: int
    """Counted from the piece's first, from 0."""
    text: Said


@dataclass(slots=True)
class _Tally:
    """Counts while they grow."""

    examples: int = 0
    cut: int = 0
    skipped: int = 0
    tokens: int = 0
    targets: Any = field(default_factory=hashlib.sha256)
    sections: dict[str, SectionCount] = field(default_factory=dict)

    def counts(self) -> Counts:
        return Counts(
            examples=self.examples,
            cut=self.cut,
            skipped=self.skipped,
            tokens=self.tokens,
            targets=self.targets.hexdigest(),
            sections=tuple(self.sections.values()),
        )


# --- pieces ---------------------------------------------------------------------------------------


def pieces_of(path: Path, kind: Literal["text", "lines"], *, unit: str = "line", named: str = "") -> Iterator[FilePart]:
    """A file in pieces that begin and end with lines. The borders depend on the file alone."""
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        while start < size:
            end = _border(file, min(start + PIECE_BYTES, size), size, kind)
            yield FilePart(
                path=str(path),
                kind=kind,
                start=start,
                end=end,
                first=start == 0,
                last=end >= size,
                unit=unit,
                named=named or str(path),
            )
            start = end


def _border(file: BinaryIO, at: int, size: int, kind: str) -> int:
    """The next line end. A text without lines is cut between two letters instead."""
    file.seek(at)
    while at < size:
        part = file.readline(ALONE_BYTES)
        if part.endswith(b"\n") or not part:
            return at + len(part)
        if kind == "text" and len(part) == ALONE_BYTES:
            return at + next(i for i in range(len(part)) if part[i] & 0xC0 != 0x80)
        at += len(part)
    return size


# --- one piece ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _encoder(folder: str, sequence: int, overlong: Literal["skip", "cut"]) -> Encoder:
    return encoder_of(Codec.load(Path(folder) / "codec.json"), sequence, overlong)


@lru_cache(maxsize=1)
def _prompter(recipe: str, folder: str, sequence: int, overlong: Literal["skip", "cut"]) -> Prompter:
    return prompter_of(recipe, _encoder(folder, sequence, overlong))


def encode_piece(task: Task) -> Counts | BadExample:
    """Write the shard of one piece."""
    encoder = _encoder(task.folder, task.sequence, task.overlong)
    base = Path(task.folder) / f"shard-{task.number:07d}"
    if task.piece.kind == "text":
        return _encode_text(task.piece, encoder, base)
    tally = _Tally()
    line = 0
    with _Shard(base, encoder) as shard:
        try:
            for line, raw in _lines(task.piece):
                try:
                    _encode_line(raw, task, encoder, shard, tally)
                except (ExampleError, ConfigError) as error:
                    return BadExample(line=line, text=message_of(error))
        except UnicodeDecodeError:
            return BadExample(line=line, text="")
    return tally.counts()


def _encode_line(raw: str, task: Task, encoder: Encoder, shard: _Shard, tally: _Tally) -> None:
    try:
        tree = json.loads(raw)
    except ValueError as error:
        raise ExampleError(Message("data.not-json", why=json_fault(error))) from None
    except RecursionError:
        raise ExampleError(Message("data.nested-too-deeply")) from None
    tally.examples += 1
    groups: tuple[int, int] | None = None
    if task.layout.kind == "recipe":
        assert task.recipe is not None
        made = _prompter(task.recipe, task.folder, task.sequence, task.overlong).prompt(tree)
        samples = [made.encoded] if made.encoded is not None else []
        groups = made.groups
        for each in made.sections:
            tally.sections[each.field] = tally.sections.get(each.field, SectionCount(field=each.field)).plus(each)
        if samples:
            tally.targets.update(json.dumps([made.name, made.target], ensure_ascii=False).encode())
    else:
        samples = encoder.samples(example_of(tree, task.layout))
    tally.skipped += not samples
    for sample in samples:
        tally.cut += sample.cut
        tally.tokens += len(sample.ids)
        shard.add(sample, groups)


def _lines(piece: FilePart) -> Iterator[tuple[int, str]]:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        number, at = 0, piece.start
        while at < piece.end:
            raw = file.readline()
            at += len(raw)
            if number == 0 and piece.first:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            text = raw.decode("utf-8")
            if text.strip():
                yield number, text
            number += 1


def _encode_text(piece: FilePart, encoder: Encoder, base: Path) -> Counts | BadExample:
    """Tokens alone: the samples of a text reach over the borders of pieces, and the parent cuts them."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        raw = file.read(piece.end - piece.start)
    try:
        text = (raw.removeprefix(b"\xef\xbb\xbf") if piece.first else raw).decode("utf-8")
    except UnicodeDecodeError:
        return BadExample(line=0, text="")
    tokens = 0
    with open(f"{base}.tokens", "wb") as file:
        for ids in encoder.document(text, begins=piece.first, ends=piece.last):
            file.write(ids.data)
            tokens += len(ids)
    return Counts(tokens=tokens)


class _Shard:
    """The files of one piece."""

    def __init__(self, base: Path, encoder: Encoder) -> None:
        self.base, self.dtype = base, encoder.codec.dtype
        self.lengths: list[int] = []
        self.losses: list[int] = []
        self.groups: list[tuple[int, int]] = []

    def __enter__(self) -> _Shard:
        self.tokens = open(f"{self.base}.tokens", "wb")
        self.learned = open(f"{self.base}.learned", "wb")
        return self

    def add(self, sample: Encoded, groups: tuple[int, int] | None) -> None:
        self.tokens.write(sample.ids.astype(self.dtype, copy=False).tobytes())
        self.learned.write(sample.learned.tobytes())
        self.lengths.append(len(sample.ids))
        self.losses.append(sample.loss_tokens)
        if groups is not None:
            self.groups.append(groups)

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        self.learned.close()
        write_numbers(Path(f"{self.base}.lengths"), np.asarray(self.lengths, dtype="<i4"))
        write_numbers(Path(f"{self.base}.losses"), np.asarray(self.losses, dtype="<i8"))
        if self.groups:
            write_numbers(Path(f"{self.base}.groups"), np.asarray(self.groups, dtype="<i4"))


def write_numbers(path: Path, numbers: npt.NDArray[Any]) -> None:
    """An array as a file. numpy's own `tofile` does not say why a write failed."""
    with path.open("wb") as file:
        file.write(np.ascontiguousarray(numbers).data)


# --- all pieces -----------------------------------------------------------------------------------


def encode_pieces(tasks: list[Task], progress: Progress) -> Iterator[tuple[Task, Counts]]:
    """Every piece with its counts, in order. The first wrong example in that order is the error."""
    total = sum(task.piece.end - task.piece.start for task in tasks)
    done = 0
    progress(0, total, Message("data.tokenising"))
    for task, outcome in _run(tasks, total):
        if isinstance(outcome, BadExample):
            raise _sentence(task.piece, outcome)
        done += task.piece.end - task.piece.start
        progress(done, total, Message("data.tokenising"))
        yield task, outcome


def _run(tasks: list[Task], total_bytes: int) -> Iterator[tuple[Task, Counts | BadExample]]:
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(tasks))
    if workers < 2 or total_bytes < ALONE_BYTES:
        for task in tasks:
            yield task, encode_piece(task)
        return
    context = multiprocessing.get_context("spawn")  # the parent may hold threads and a GPU: no fork
    workers = min(workers, MOST_PROCESSES)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_the_parent) as pool:
        waiting: list[tuple[Task, Any]] = []
        try:
            for task in tasks:
                waiting.append((task, pool.submit(encode_piece, task)))
                if len(waiting) > 2 * workers:  # no further ahead: shards of pieces not yet appended fill the disk
                    first, future = waiting.pop(0)
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            raise ConfigError(Message("data.tokeniser-killed")) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _sentence(piece: FilePart, fault: BadExample) -> ConfigError:
    if not fault.text:
        return not_utf8(Path(piece.path))
    before = 0
    with open(piece.path, "rb") as file:
        left = piece.start
        while left:
            block = file.read(min(left, PIECE_BYTES))
            before += block.count(b"\n")
            left -= len(block)
    number = before + fault.line + 1
    name = Message("data.example", number=number) if piece.unit == "example" else Message("data.line", number=number)
    return ConfigError(Message("data.bad-example", name=name, path=piece.named, problem=fault.text))


def append(source: Path, target: BinaryIO) -> None:
    """Move a shard's file to the end of another."""
    with source.open("rb") as file:
        shutil.copyfileobj(file, target, 2**20)
    source.unlink()
