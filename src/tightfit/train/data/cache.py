"""The tokenised data on disk: built once, mapped by every rank, found again by what it was made from.

    CACHE/
      hashes.json              path, size, time → hash of each data file
      KEY/                     the documents: tokens and their index
        tokens.bin             every token once, uint16 or uint32
        learned.bin            for each, whether it counts (absent where all do)
        starts.bin lengths.bin losses.bin groups.bin
        manifest.json          written last
        views/KEY/             which documents make up which sample: split, packing, limit

KEY is a hash of the files' contents, the tokenizer, the template, the sequence, the recipe and this code's version:
whatever changes a token changes the name of the folder. A folder is built under another name and renamed when it is
whole, so a build that was killed leaves nothing that could be taken for finished. One builder at a time holds the
lock; others wait for it and then find the work done.

Tokens are made in several processes and little memory. The files are cut into pieces of some megabytes at line ends. A
piece is one process's task: it reads its bytes, encodes example by example and writes a shard (tokens, lengths, which
tokens are learned). Only counts travel between processes. The parent appends the shards in the order of the pieces, so
that the result is the same bytes whatever the number of processes. Nothing ever holds more than a piece, its shard
and, in the parent, a copy buffer. A child that outlives its parent would tokenise for nobody: each watches for that and
ends itself.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from tightfit.inputs.records import read_json
from tightfit.messages import Message, Said, message_of
from tightfit.owned import check_ours, find_strangers, flock, move_file, open_own, remove_folder, replace_file
from tightfit.runs.folder import DATA_BUILDING, DATA_SET
from tightfit.runs.processes import is_alive
from tightfit.train.data.examples import (
    RECIPE,
    TEXT,
    DataSource,
    ExampleError,
    Hashes,
    Layout,
    SourceFile,
    array_items,
    example_of,
    find_source,
    json_fault,
    layout_of,
    not_utf8,
    trees_in,
)
from tightfit.train.data.recipes import Prompter, Resolved, Section, SectionCount, add_sections, resolve
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import Codec, Encoder
from tightfit.types import ConfigError

VERSION = 1
"""Of the code that makes tokens: raised with every change of what a build writes."""

MANIFEST = "manifest.json"
INDEX_BLOCK = 65_536
"""Samples whose places are computed at a time."""


PIECE_BYTES = 4 * 2**20
ALONE_BYTES = 2**20
"""Below this, starting processes takes longer than the work."""
MOST_PROCESSES = 16

PartKind = Literal["text", "lines"]
Progress = Callable[[int, int, Message | None], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A data set that is to be in the cache."""

    spec: DataSpec
    codec: Codec
    source: DataSource | None
    resolved: Resolved | None
    """A recipe with its ablation."""
    key: str
    arms_key: str
    """The same for all ablations of a recipe."""

    def folder(self, cache: Path) -> Path:
        return cache / self.key


@dataclass(frozen=True, kw_only=True)
class Store:
    """The documents of a data set, mapped."""

    tokens: npt.NDArray[Any]
    learned: npt.NDArray[np.uint8] | None
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    losses: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32] | None
    """For each document the one who answers and the other, where speakers are known."""
    cut: int
    skipped: int
    targets: str
    sections: tuple[SectionCount, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that one process encodes."""

    path: str
    kind: PartKind
    start: int
    end: int
    first: bool
    """The beginning of its file."""
    last: bool
    unit: str
    """What an example is called in a sentence, with `named`: a line of the file itself, or an item of a list."""
    named: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece, and what to do with it."""

    number: int
    piece: FilePart
    folder: str
    layout: Layout
    sequence: int
    overlong: Literal["skip", "cut"]
    sections: tuple[Section, ...]
    """Of a recipe."""


@dataclass(slots=True)
class Counts:
    """What came of a piece."""

    examples: int = 0
    cut: int = 0
    skipped: int = 0
    tokens: int = 0
    targets: str = ""
    """Hash of the answers of a recipe's examples."""
    sections: dict[str, SectionCount] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadExample:
    """An example that cannot be used. Where its piece begins, the parent finds out."""

    line: int
    """Counted from the piece's first, from 0."""
    text: Said
    """Empty: it is no UTF-8."""


def identify(spec: DataSpec, codec: Codec, cache: Path) -> Wanted:
    """What the job asks for, and the name that it has in the cache."""
    hashes = Hashes(cache)
    resolved = resolve(spec) if spec.by_recipe else None
    source = None
    if resolved is None:
        assert spec.path is not None
        source = find_source(spec.path, spec.format)
        files = [[hashes.of(each.path), each.kind] for each in source.files]
        layout = None if source.layout is None else asdict(source.layout)
        what: list[Any] = ["files", files, spec.format, layout, source.limit]
    else:
        what = ["recipe", [hashes.of(path) for path in resolved.talks.files], resolved.shared_json]
    hashes.save()
    ends = [VERSION, codec.digest, spec.sequence, spec.overlong]
    arms = _digest([*what, *ends])
    key = _digest([*what, *ends, resolved.arm_json]) if resolved else arms
    return Wanted(spec=spec, codec=codec, source=source, resolved=resolved, key=key, arms_key=arms)


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:32]


# --- building -------------------------------------------------------------------------------------


def build_store(want: Wanted, cache: Path, progress: Progress) -> None:
    """Build the documents unless they are there."""
    folder = want.folder(cache)
    if (folder / MANIFEST).is_file():
        return
    with stage(folder) as staging:
        want.codec.save(staging / "codec.json")
        tasks: list[Task] = []
        for path, kind, layout, unit, named in _files(want, staging, progress):
            if path.stat().st_size == 0:
                raise ConfigError(Message("data.empty", path=named))
            tasks += [
                Task(
                    number=len(tasks) + at,
                    piece=piece,
                    folder=str(staging),
                    layout=layout,
                    sequence=want.spec.sequence,
                    overlong=want.spec.overlong,
                    sections=want.resolved.sections if want.resolved else (),
                )
                for at, piece in enumerate(_cut_into_pieces(path, kind, unit, named))
            ]
        masked = any(task.piece.kind == "lines" and task.layout.kind != "text" for task in tasks)
        with _Assembly(staging, want.codec.dtype, want.spec.sequence, masked) as made:
            for task, counts in encode_pieces(tasks, progress):
                made.take(task, counts)
        if not made.samples:
            name = want.resolved.talks.name if want.resolved else want.spec.path
            if not made.examples:
                raise ConfigError(Message("data.no-tokens", name=name))
            if want.spec.overlong == "skip":
                raise ConfigError(Message("data.no-sample-fits", name=name, sequence=want.spec.sequence))
            raise ConfigError(Message("data.no-answer-fits", name=name, sequence=want.spec.sequence))
        (staging / "codec.json").unlink()
        for each in staging.glob("list-*.jsonl"):
            each.unlink()
        if want.resolved is not None:
            # All ablations of a recipe must be trained on the same answers: the first sets them for the others.
            path, targets, arm = cache / f"arms-{want.arms_key}.json", made.targets.hexdigest(), want.resolved.arm
            arms = read_json(path) if path.is_file() else {}
            others = ", ".join(name for name, digest in arms.items() if digest != targets)
            if others:
                raise ConfigError(Message("data.other-answers", arm=arm, others=others))
            replace_file(path, json.dumps({**arms, arm: targets}).encode(), sync=True)
        write_manifest(staging, {"version": VERSION, "key": want.key, **made.summary(), "dtype": want.codec.dtype.str})


def _files(want: Wanted, staging: Path, progress: Progress) -> Iterator[tuple[Path, PartKind, Layout, str, str]]:
    """Every file as lines or text. Lists and dialogues are written out as lines first."""
    if want.resolved is not None:
        path = staging / "list-0.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for record in want.resolved.records():
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        yield path, "lines", RECIPE, "example", want.resolved.talks.name
        return
    assert want.source is not None
    for number, each in enumerate(want.source.files):
        if each.kind == "text":
            yield each.path, "text", TEXT, "line", str(each.path)
            continue
        path, unit = each.path, "line"
        if each.kind == "array":
            progress(0, 1, Message("data.reading", name=each.path.name))
            path, unit = staging / f"list-{number}.jsonl", "example"
            with path.open("w", encoding="utf-8") as file:
                for item in array_items(each.path):
                    file.write(json.dumps(item, ensure_ascii=False) + "\n")
        layout = want.source.layout or first_layout(each, want.spec.format)
        yield path, "lines", layout, unit, str(each.path)


def first_layout(file: SourceFile, format_name: str) -> Layout:
    """The layout of a file's first example."""
    for name, tree in trees_in(file):
        try:
            return layout_of(tree, format_name)
        except ExampleError as error:
            problem = message_of(error)
            raise ConfigError(Message("data.bad-example", name=name, path=file.path, problem=problem)) from None
    raise ConfigError(Message("data.empty", path=file.path))


class _Assembly:
    """Shards, appended in order."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], sequence: int, masked: bool) -> None:
        self.folder, self.dtype, self.sequence, self.masked = folder, dtype, sequence, masked
        self.samples = self.tokens = self.cut = self.skipped = self.examples = 0
        self.text_start = 0
        self.grouped = False
        self.targets = hashlib.sha256()
        self.sections: dict[str, SectionCount] = {}
        self.out: dict[str, BinaryIO] = {}

    def __enter__(self) -> _Assembly:
        for name in ("tokens", "learned", "starts", "lengths", "losses", "groups"):
            self.out[name] = (self.folder / f"{name}.bin").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.out.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if not self.masked:
            (self.folder / "learned.bin").unlink()
        if not self.grouped:
            (self.folder / "groups.bin").unlink()

    def take(self, task: Task, counts: Counts) -> None:
        base = self.folder / f"shard-{task.number:07d}"
        append(Path(f"{base}.tokens"), self.out["tokens"])
        if task.piece.kind == "text":
            if task.piece.first:
                self.text_start = self.tokens
            if self.masked:
                for _ in range(0, counts.tokens, 2**20):
                    self.out["learned"].write(b"\1" * min(2**20, counts.tokens))
                self.out["learned"].truncate(self.tokens + counts.tokens)
                self.out["learned"].seek(self.tokens + counts.tokens)
        else:
            if self.masked:
                append(Path(f"{base}.learned"), self.out["learned"])
            else:
                Path(f"{base}.learned").unlink()
            lengths = np.fromfile(f"{base}.lengths", dtype="<i4")
            starts = self.tokens + np.cumsum(lengths, dtype="<i8") - lengths
            self._index(starts, lengths, np.fromfile(f"{base}.losses", dtype="<i8"))
            for name in ("lengths", "losses"):
                Path(f"{base}.{name}").unlink()
            groups = Path(f"{base}.groups")
            if groups.exists():
                self.grouped = True
                append(groups, self.out["groups"])
        self.tokens += counts.tokens
        self.examples += counts.examples
        self.cut += counts.cut
        self.skipped += counts.skipped
        self.targets.update(counts.targets.encode())
        add_sections(self.sections, counts.sections.values())
        if task.piece.kind == "text" and task.piece.last:
            # The samples of a whole text. A last token alone has nothing to be predicted from, and is left.
            for first in range(self.text_start, self.tokens, INDEX_BLOCK * self.sequence):
                last = min(first + INDEX_BLOCK * self.sequence, self.tokens)
                starts = np.arange(first, last, self.sequence, dtype="<i8")
                lengths = np.minimum(self.tokens - starts, self.sequence)
                keep = lengths > 1
                self._index(starts[keep], lengths[keep], lengths[keep] - 1)

    def _index(self, starts: npt.NDArray[Any], lengths: npt.NDArray[Any], losses: npt.NDArray[Any]) -> None:
        self.out["starts"].write(starts.astype("<i8").tobytes())
        self.out["lengths"].write(lengths.astype("<i4").tobytes())
        self.out["losses"].write(losses.astype("<i8").tobytes())
        self.samples += len(starts)

    def summary(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "examples": self.examples,
            "cut": self.cut,
            "skipped": self.skipped,
            "targets": self.targets.hexdigest(),
            "sections": [asdict(each) for each in self.sections.values()],
        }


# --- examples to tokens, in several processes ------------------------------------------------------


def _cut_into_pieces(path: Path, kind: PartKind, unit: str, named: str) -> Iterator[FilePart]:
    """A file in pieces that begin and end with lines. The borders depend on the file alone."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            end = _border(file, min(start + PIECE_BYTES, size), size, kind)
            first, last = start == 0, end >= size
            yield FilePart(str(path), kind, start, end, first=first, last=last, unit=unit, named=named)
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


@lru_cache(maxsize=1)
def _encoder(folder: str, sequence: int, overlong: Literal["skip", "cut"]) -> Encoder:
    return Encoder(Codec.load(Path(folder) / "codec.json"), sequence, overlong)


def encode_piece(task: Task) -> Counts | BadExample:
    """Write the shard of one piece."""
    piece, encoder = task.piece, _encoder(task.folder, task.sequence, task.overlong)
    base = Path(task.folder) / f"shard-{task.number:07d}"
    counts = Counts()
    if piece.kind == "text":
        # Tokens alone: the samples of a text reach over the borders of pieces, and the parent cuts them.
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            raw = file.read(piece.end - piece.start)
        try:
            text = (raw.removeprefix(codecs.BOM_UTF8) if piece.first else raw).decode("utf-8")
        except UnicodeDecodeError:
            return BadExample(0, "")
        with open(f"{base}.tokens", "wb") as out:
            for ids in encoder.document(text, begins=piece.first, ends=piece.last):
                out.write(ids.data)
                counts.tokens += len(ids)
        return counts
    prompter, targets = Prompter(task.sections, encoder), hashlib.sha256()
    lengths: list[int] = []
    losses: list[int] = []
    groups: list[list[int]] = []
    line = -1
    with ExitStack() as stack:
        file = stack.enter_context(open(piece.path, "rb"))
        tokens = stack.enter_context(open(f"{base}.tokens", "wb"))
        learned = stack.enter_context(open(f"{base}.learned", "wb"))
        file.seek(piece.start)
        while file.tell() < piece.end:
            line += 1
            raw = file.readline()
            try:
                text = (raw.removeprefix(codecs.BOM_UTF8) if piece.first and line == 0 else raw).decode("utf-8")
            except UnicodeDecodeError:
                return BadExample(line, "")
            if not text.strip():
                continue
            try:
                tree = json.loads(text)
            except ValueError as error:
                return BadExample(line, Message("data.not-json", why=json_fault(error)))
            except RecursionError:
                return BadExample(line, Message("data.nested-too-deeply"))
            counts.examples += 1
            try:
                if task.layout.kind == "recipe":
                    made = prompter.prompt(tree)
                    samples = [made.encoded] if made.encoded is not None else []
                    add_sections(counts.sections, made.sections)
                    if samples:
                        groups.append(tree["groups"])
                        targets.update(json.dumps([tree["name"], made.target], ensure_ascii=False).encode())
                else:
                    samples = encoder.samples(example_of(tree, task.layout))
            except (ExampleError, ConfigError) as error:
                return BadExample(line, message_of(error))
            counts.skipped += not samples
            for sample in samples:
                counts.cut += sample.cut
                counts.tokens += len(sample.ids)
                tokens.write(sample.ids.astype(encoder.codec.dtype, copy=False).tobytes())
                learned.write(sample.learned.tobytes())
                lengths.append(len(sample.ids))
                losses.append(sample.loss_tokens)
    counts.targets = targets.hexdigest()
    Path(f"{base}.lengths").write_bytes(np.asarray(lengths, dtype="<i4").tobytes())
    Path(f"{base}.losses").write_bytes(np.asarray(losses, dtype="<i8").tobytes())
    if groups:
        Path(f"{base}.groups").write_bytes(np.asarray(groups, dtype="<i4").tobytes())
    return counts


def encode_pieces(tasks: list[Task], progress: Progress) -> Iterator[tuple[Task, Counts]]:
    """Every piece with its counts, in order. The first wrong example in that order is the error."""
    total = sum(task.piece.end - task.piece.start for task in tasks)
    done = 0
    progress(0, total, Message("data.tokenising"))
    for task, outcome in _run(tasks, total):
        piece = task.piece
        if isinstance(outcome, BadExample):
            if not outcome.text:
                raise not_utf8(Path(piece.path))
            number = outcome.line + 1
            with open(piece.path, "rb") as file:
                for start in range(0, piece.start, PIECE_BYTES):
                    number += file.read(min(PIECE_BYTES, piece.start - start)).count(b"\n")
            of_list = piece.unit == "example"
            name = Message("data.example", number=number) if of_list else Message("data.line", number=number)
            raise ConfigError(Message("data.bad-example", name=name, path=piece.named, problem=outcome.text))
        done += piece.end - piece.start
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


def append(source: Path, target: BinaryIO) -> None:
    """Move a shard's file to the end of another."""
    with source.open("rb") as file:
        shutil.copyfileobj(file, target, 2**20)
    source.unlink()


# --- folders --------------------------------------------------------------------------------------


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """One builder at a time. The lock goes with its process, however that ends."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = open_own(cache / f"{key}.lock", "ab")
    except OSError as error:
        raise ConfigError(
            Message("data.cache-unwritable", cache=cache, why=(error.strerror or str(error)).lower())
        ) from None
    with file:
        flock(file.fileno())
        yield


@contextmanager
def stage(folder: Path) -> Iterator[Path]:
    """A folder to build in, which takes its real name once everything is in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".building-{folder.name}-*"):  # of a build that was killed
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not is_alive(int(pid), None) and not find_strangers(left, DATA_BUILDING):
            remove_folder(left, DATA_BUILDING)
    staging = folder.parent / f".building-{folder.name}-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        if os.path.lexists(folder):  # without a manifest, and so not whole
            check_ours(folder, DATA_SET, Message("data.move-away"))
            remove_folder(folder, DATA_SET)
        move_file(staging, folder)
        handle = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConfigError(Message("data.disk-full", folder=folder.parent)) from None
    finally:
        if staging.exists():
            remove_folder(staging, DATA_BUILDING)


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    replace_file(folder / MANIFEST, json.dumps(values, indent=1).encode(), sync=True)


# --- reading --------------------------------------------------------------------------------------


def open_store(folder: Path) -> Store:
    """The documents of a finished folder."""
    values = read_manifest(folder)
    groups = map_file(folder / "groups.bin", "<i4")
    return Store(
        tokens=map_needed_file(folder / "tokens.bin", values["dtype"]),
        learned=map_file(folder / "learned.bin", "u1"),
        starts=map_needed_file(folder / "starts.bin", "<i8"),
        lengths=map_needed_file(folder / "lengths.bin", "<i4"),
        losses=map_needed_file(folder / "losses.bin", "<i8"),
        groups=None if groups is None else groups.reshape(-1, 2),
        cut=values["cut"],
        skipped=values["skipped"],
        targets=values["targets"],
        sections=tuple(SectionCount(**each) for each in values["sections"]),
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        values = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        raise ConfigError(Message("data.cache-incomplete", folder=folder)) from None
    assert isinstance(values, dict)
    return values


def map_file(path: Path, dtype: str) -> npt.NDArray[Any] | None:
    """The numbers of a file, read only where they are looked at; None: there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def map_needed_file(path: Path, dtype: str) -> npt.NDArray[Any]:
    found = map_file(path, dtype)
    if found is None:
        raise ConfigError(Message("data.cache-lost", folder=path.parent, name=path.name))
    return found
