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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from tightfit.inputs.records import read_json
from tightfit.messages import Message, Said, message_of, say_why
from tightfit.owned import check_ours, find_strangers, flock, move_file, open_own, remove_folder, replace_file
from tightfit.runs.folder import DATA_BUILDING, DATA_SET
from tightfit.runs.processes import is_alive
from tightfit.train.data.examples import (
    RECIPE,
    TEXT,
    DataSource,
    ExampleError,
    Layout,
    array_items,
    example_of,
    find_source,
    first_layout,
    hash_files,
    json_fault,
    not_utf8,
)
from tightfit.train.data.recipes import Prompter, Resolved, SectionCount, add_sections, resolve
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import Codec, Encoded, Encoder
from tightfit.types import ConfigError

VERSION = 1  # of the code that makes tokens: raised with every change of what a build writes
MANIFEST = "manifest.json"
INDEX_BLOCK = 65_536  # samples whose places are computed at a time
PIECE_BYTES = 4 * 2**20
ALONE_BYTES = 2**20  # below this, starting processes takes longer than the work
MOST_PROCESSES = 16

COLUMNS = {
    "learned": "u1", "starts": "<i8", "lengths": "<i4", "losses": "<i8", "groups": "<i4", "documents": "<i8",
    "borders": "<i8",
}  # fmt: skip
"""The numbers that a file of this name holds; those of tokens depend on the vocabulary."""

Progress = Callable[[int, int, Message | None], None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A data set that is to be in the cache."""

    spec: DataSpec
    codec: Codec
    source: DataSource | None
    resolved: Resolved | None  # a recipe with its ablation
    key: str
    folder: Path
    arms: Path  # where the answers of all ablations of a recipe are told


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A part of a file that one process encodes."""

    number: int
    folder: str
    path: str
    start: int
    end: int
    first: bool  # the beginning of its file
    last: bool
    is_text: bool  # one long document, and no example a line
    layout: Layout
    unit: Literal["line", "example"]
    """What an example is called in a sentence, with `named`: a line of the file itself, or an item of a list."""
    named: str

    def shard(self, name: str) -> Path:
        return Path(self.folder, f"shard-{self.number:07d}.{name}")


@dataclass(slots=True)
class Counts:
    """What came of examples."""

    examples: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    skipped: int = 0
    sections: dict[str, SectionCount] = field(default_factory=dict)

    def add(self, samples: Sequence[Encoded], sections: Iterable[SectionCount] = ()) -> None:
        """One example more."""
        self.examples += 1
        self.samples += len(samples)
        self.tokens += sum(len(sample.ids) for sample in samples)
        self.loss_tokens += sum(sample.loss_tokens for sample in samples)
        self.cut += sum(sample.cut for sample in samples)
        self.skipped += not samples
        add_sections(self.sections, sections)

    def merge(self, other: Counts) -> None:
        for name in ("examples", "samples", "tokens", "loss_tokens", "cut", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        add_sections(self.sections, other.sections.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sections": [asdict(each) for each in self.sections.values()]}


def identify(spec: DataSpec, codec: Codec, cache: Path) -> Wanted:
    """What the job asks for, and the name that it has in the cache."""
    resolved = resolve(spec) if spec.by_recipe else None
    source = None
    if resolved is None:
        assert spec.path is not None
        source = find_source(spec.path, spec.format)
        hashes = hash_files(cache, [each.path for each in source.files])
        files = [[digest, each.kind] for digest, each in zip(hashes, source.files, strict=True)]
        layout = None if source.layout is None else asdict(source.layout)
        what: list[Any] = ["files", files, spec.format, layout, source.limit]
    else:
        what = ["recipe", hash_files(cache, resolved.talks.files), resolved.shared_json]
    what += [VERSION, codec.digest, spec.sequence, spec.overlong]

    def digest_of(tree: Any) -> str:
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:32]

    shared = digest_of(what)
    key = digest_of([*what, resolved.arm_json]) if resolved else shared
    places = {"folder": cache / key, "arms": cache / f"arms-{shared}.json"}
    return Wanted(spec=spec, codec=codec, source=source, resolved=resolved, key=key, **places)


# --- building -------------------------------------------------------------------------------------


def build_store(want: Wanted, progress: Progress) -> None:
    """Build the documents unless they are there."""
    if (want.folder / MANIFEST).is_file():
        return
    with stage(want.folder) as staging:
        tasks = _cut_into_tasks(want, staging, progress)
        masked = any(not task.is_text and task.layout.kind != "text" for task in tasks)
        names = ["tokens", "starts", "lengths", "losses"]
        names += [*(["learned"] if masked else []), *(["groups"] if want.resolved else [])]
        with open_columns(staging, "{}.bin", names) as out:
            counts, targets = _assemble(want, tasks, out, progress)
        if not counts.samples:
            name = want.resolved.talks.name if want.resolved else want.spec.path
            if not counts.examples:
                raise ConfigError(Message("data.no-tokens", name=name))
            if want.spec.overlong == "skip":
                raise ConfigError(Message("data.no-sample-fits", name=name, sequence=want.spec.sequence))
            raise ConfigError(Message("data.no-answer-fits", name=name, sequence=want.spec.sequence))
        for each in staging.glob("list-*.jsonl"):
            each.unlink()
        if want.resolved is not None:
            # All ablations of a recipe must be trained on the same answers: the first sets them for the others.
            arms, arm = read_json(want.arms) if want.arms.is_file() else {}, want.resolved.arm
            others = ", ".join(name for name, digest in arms.items() if digest != targets)
            if others:
                raise ConfigError(Message("data.other-answers", arm=arm, others=others))
            replace_file(want.arms, json.dumps({**arms, arm: targets}).encode(), sync=True)
        made = {"targets": targets, "dtype": want.codec.dtype.str}
        write_manifest(staging, {"version": VERSION, "key": want.key, **counts.as_json(), **made})


def _cut_into_tasks(want: Wanted, staging: Path, progress: Progress) -> list[Task]:
    """Every file, as lines or text, in pieces that begin and end with lines. The borders depend on the file alone."""
    tasks: list[Task] = []

    def cut(
        path: Path, layout: Layout, unit: Literal["line", "example"], named: object, *, is_text: bool = False
    ) -> None:
        size, start = path.stat().st_size, 0
        if size == 0:
            raise ConfigError(Message("data.empty", path=named))
        with path.open("rb") as file:
            while start < size:
                end = _border(file, min(start + PIECE_BYTES, size), size, is_text=is_text)
                task = Task(
                    number=len(tasks),
                    folder=str(staging),
                    path=str(path),
                    start=start,
                    end=end,
                    first=start == 0,
                    last=end >= size,
                    is_text=is_text,
                    layout=layout,
                    unit=unit,
                    named=str(named),
                )
                tasks.append(task)
                start = end

    def write_lines(number: int, items: Iterable[Any]) -> Path:
        path = staging / f"list-{number}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for item in items:
                file.write(json.dumps(item, ensure_ascii=False) + "\n")
        return path

    if want.resolved is not None:
        cut(write_lines(0, want.resolved.records()), RECIPE, "example", want.resolved.talks.name)
    for number, each in enumerate(want.source.files if want.source else ()):
        if each.kind == "text":
            cut(each.path, TEXT, "line", each.path, is_text=True)
            continue
        if each.kind == "array":
            progress(0, 1, Message("data.reading", name=each.path.name))
        path = write_lines(number, array_items(each.path)) if each.kind == "array" else each.path
        layout = (want.source.layout if want.source else None) or first_layout(each, want.spec.format)
        cut(path, layout, "example" if each.kind == "array" else "line", each.path)
    return tasks


def _border(file: BinaryIO, at: int, size: int, *, is_text: bool) -> int:
    """The next line end. A text without lines is cut between two letters instead."""
    file.seek(at)
    while at < size:
        part = file.readline(ALONE_BYTES)
        if part.endswith(b"\n") or not part:
            return at + len(part)
        if is_text and len(part) == ALONE_BYTES:
            return at + next(i for i in range(len(part)) if part[i] & 0xC0 != 0x80)
        at += len(part)
    return size


def _assemble(want: Wanted, tasks: list[Task], out: dict[str, BinaryIO], progress: Progress) -> tuple[Counts, str]:
    """Append the shards in order; the counts of all, and the hash of the answers of a recipe's examples."""
    made, targets, text_start, done = Counts(), hashlib.sha256(), 0, 0
    sequence, total = want.spec.sequence, sum(task.end - task.start for task in tasks)
    progress(0, total, Message("data.tokenising"))
    for task, counts, answers in _encode_pieces(want, tasks, total):
        if task.is_text:
            text_start = made.tokens if task.first else text_start
            if "learned" in out:
                out["learned"].write(b"\1" * counts.tokens)
        else:
            lengths = np.fromfile(task.shard("lengths"), dtype=COLUMNS["lengths"])
            put(out, starts=made.tokens + np.cumsum(lengths, dtype="<i8") - lengths)
        for name in ("tokens", "learned", "lengths", "losses", "groups"):
            shard = task.shard(name)
            if name in out and shard.exists():
                with shard.open("rb") as file:
                    shutil.copyfileobj(file, out[name], 2**20)
            shard.unlink(missing_ok=True)
        made.merge(counts)
        targets.update(answers.encode())
        if task.is_text and task.last:
            # The samples of a whole text. A last token alone has nothing to be predicted from, and is left.
            for first in range(text_start, made.tokens, INDEX_BLOCK * sequence):
                last = min(first + INDEX_BLOCK * sequence, made.tokens)
                starts = np.arange(first, last, sequence, dtype="<i8")
                lengths = np.minimum(made.tokens - starts, sequence)
                keep = lengths > 1
                put(out, starts=starts[keep], lengths=lengths[keep], losses=lengths[keep] - 1)
                made.samples += int(keep.sum())
                made.loss_tokens += int((lengths[keep] - 1).sum())
        done += task.end - task.start
        progress(done, total, Message("data.tokenising"))
    for column in out.values():
        column.flush()
        os.fsync(column.fileno())
    return made, targets.hexdigest()


# --- examples to tokens, in several processes ------------------------------------------------------


def encode_piece(task: Task, prompter: Prompter) -> tuple[Counts, str]:
    """Write the shard of one piece; its counts, and the hash of the answers of a recipe's examples."""
    encoder, counts, targets = prompter.encoder, Counts(), hashlib.sha256()
    if task.is_text:
        # Tokens alone: the samples of a text reach over the borders of pieces, and the parent cuts them.
        with open(task.path, "rb") as file, task.shard("tokens").open("wb") as out:
            file.seek(task.start)
            text = _decode(file.read(task.end - task.start), task, begins=task.first)
            for ids in encoder.document(text, begins=task.first, ends=task.last):
                out.write(ids.data)
                counts.tokens += len(ids)
        return counts, ""
    by_recipe = task.layout.kind == "recipe"
    names = ["tokens", "learned", "lengths", "losses", *(["groups"] if by_recipe else [])]
    with open(task.path, "rb") as file, open_columns(Path(task.folder), task.shard("{}").name, names) as shard:
        file.seek(task.start)
        line = 0
        while file.tell() < task.end:
            line += 1
            text = _decode(file.readline(), task, begins=task.first and line == 1)
            if not text.strip():
                continue
            try:
                tree = json.loads(text)
            except ValueError as error:
                raise _bad_example(task, line, Message("data.not-json", why=json_fault(error))) from None
            except RecursionError:
                raise _bad_example(task, line, Message("data.nested-too-deeply")) from None
            try:
                made = prompter.prompt(tree) if by_recipe else None
                if made is None:
                    samples = encoder.samples(example_of(tree, task.layout))
                else:
                    samples = [made.encoded] if made.encoded is not None else []
            except (ExampleError, ConfigError) as error:
                raise _bad_example(task, line, message_of(error)) from None
            counts.add(samples, made.sections if made else ())
            if made is not None and samples:
                put(shard, groups=tree["groups"])
                targets.update(json.dumps([tree["name"], made.target], ensure_ascii=False).encode())
            for sample in samples:
                shard["tokens"].write(sample.ids.astype(encoder.codec.dtype, copy=False).tobytes())
                put(shard, learned=sample.learned, lengths=len(sample.ids), losses=sample.loss_tokens)
    return counts, targets.hexdigest()


def _decode(raw: bytes, task: Task, *, begins: bool) -> str:
    try:
        return (raw.removeprefix(codecs.BOM_UTF8) if begins else raw).decode("utf-8")
    except UnicodeDecodeError:
        raise not_utf8(Path(task.path)) from None


def _bad_example(task: Task, number: int, problem: Said) -> ConfigError:
    """`number`: of its line, counted from the piece's first."""
    with open(task.path, "rb") as file:
        for start in range(0, task.start, PIECE_BYTES):
            number += file.read(min(PIECE_BYTES, task.start - start)).count(b"\n")
    name = Message("data.line", number=number) if task.unit == "line" else Message("data.example", number=number)
    return ConfigError(Message("data.bad-example", name=name, path=task.named, problem=problem))


def _encode_pieces(want: Wanted, tasks: list[Task], total_bytes: int) -> Iterator[tuple[Task, Counts, str]]:
    """Every piece with what `encode_piece` says of it, in order. The first wrong example in that order is the error."""
    encoder = Encoder(want.codec, want.spec.sequence, want.spec.overlong)
    prompter = Prompter(want.resolved.sections if want.resolved else (), encoder)
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(tasks))
    if workers < 2 or total_bytes < ALONE_BYTES:
        for task in tasks:
            yield task, *encode_piece(task, prompter)
        return
    context = multiprocessing.get_context("spawn")  # the parent may hold threads and a GPU: no fork
    workers = min(workers, MOST_PROCESSES)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(prompter,)) as pool:
        waiting: list[tuple[Task, Any]] = []
        try:
            for task in tasks:
                waiting.append((task, pool.submit(_encode_in_child, task)))
                if len(waiting) > 2 * workers:  # no further ahead: shards of pieces not yet appended fill the disk
                    first, future = waiting.pop(0)
                    yield first, *future.result()
            for first, future in waiting:
                yield first, *future.result()
        except BrokenProcessPool:
            raise ConfigError(Message("data.tokeniser-killed")) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_in_child: list[Prompter] = []  # what a process of the pool encodes with


def _start(prompter: Prompter) -> None:
    """In a process of its own, which ends with its parent."""
    _in_child.append(prompter)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _encode_in_child(task: Task) -> tuple[Counts, str]:
    return encode_piece(task, _in_child[0])


# --- folders --------------------------------------------------------------------------------------


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One builder at a time. The lock goes with its process, however that ends."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open_own(folder.parent / f"{folder.name}.lock", "ab")
    except OSError as error:
        raise ConfigError(Message("data.cache-unwritable", cache=folder.parent, why=say_why(error))) from None
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


# --- columns --------------------------------------------------------------------------------------


@contextmanager
def open_columns(folder: Path, pattern: str, names: Iterable[str]) -> Iterator[dict[str, BinaryIO]]:
    """Files of numbers that grow side by side."""
    with ExitStack() as stack:
        yield {name: stack.enter_context((folder / pattern.format(name)).open("wb")) for name in names}


def put(out: Mapping[str, BinaryIO], **columns: npt.ArrayLike) -> None:
    """Append to columns of these names."""
    for name, values in columns.items():
        out[name].write(np.asarray(values, dtype=COLUMNS[name]).tobytes())


def map_columns(
    folder: Path, pattern: str, needed: Iterable[str], optional: Iterable[str], **dtypes: str
) -> dict[str, Any]:
    """The numbers of these files, read only where they are looked at; None: there is no such file."""
    found: dict[str, Any] = dict.fromkeys(optional)
    for name in (*needed, *optional):
        path, dtype = folder / pattern.format(name), dtypes.get(name) or COLUMNS[name]
        if path.is_file():
            found[name] = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
        elif name not in found:
            raise ConfigError(Message("data.cache-lost", folder=folder, name=path.name))
    return found


def open_store(folder: Path) -> Store:
    """The documents of a finished folder."""
    needed, dtype = ("tokens", "starts", "lengths", "losses"), read_manifest(folder)["dtype"]
    found = map_columns(folder, "{}.bin", needed, ("learned", "groups"), tokens=dtype)
    if found["groups"] is not None:
        found["groups"] = found["groups"].reshape(-1, 2)
    return Store(**found)


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        values = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        raise ConfigError(Message("data.cache-incomplete", folder=folder)) from None
    assert isinstance(values, dict)
    return values
