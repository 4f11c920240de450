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
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tightfit.inputs.records import read_json
from tightfit.messages import Message, message_of
from tightfit.owned import check_ours, find_strangers, flock, move_file, open_own, remove_folder, replace_file
from tightfit.runs.folder import DATA_BUILDING, DATA_SET
from tightfit.runs.processes import is_alive
from tightfit.train.data.build import Counts, Progress, Task, append, encode_pieces, pieces_of
from tightfit.train.data.layouts import RECIPE, TEXT, ExampleError, Layout, layout_of
from tightfit.train.data.prompt import SectionCount
from tightfit.train.data.recipe import Resolved, resolve
from tightfit.train.data.sources import DataSource, Hashes, SourceFile, array_items, find_source, trees_in
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import Codec
from tightfit.types import ConfigError

VERSION = 1
"""Of the code that makes tokens: raised with every change of what a build writes."""

MANIFEST = "manifest.json"
INDEX_BLOCK = 65_536
"""Samples whose places are computed at a time."""


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
        what = ["recipe", [hashes.of(path) for path in resolved.files], resolved.shared_json]
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
        tasks = list(_tasks(want, staging, progress))
        masked = any(task.piece.kind == "lines" and task.layout.kind != "text" for task in tasks)
        with _Assembly(staging, want.codec.dtype, want.spec.sequence, masked) as made:
            for task, counts in encode_pieces(tasks, progress):
                made.take(task, counts)
        if not made.samples:
            name = want.resolved.name if want.resolved else want.spec.path
            if not made.examples:
                raise ConfigError(Message("data.no-tokens", name=name))
            if want.spec.overlong == "skip":
                raise ConfigError(Message("data.no-sample-fits", name=name, sequence=want.spec.sequence))
            raise ConfigError(Message("data.no-answer-fits", name=name, sequence=want.spec.sequence))
        (staging / "codec.json").unlink()
        for each in staging.glob("list-*.jsonl"):
            each.unlink()
        _check_arms(want, made.targets.hexdigest(), cache)
        write_manifest(staging, {"version": VERSION, "key": want.key, **made.summary(), "dtype": want.codec.dtype.str})


def _tasks(want: Wanted, staging: Path, progress: Progress) -> Iterator[Task]:
    spec = want.spec
    recipe = want.resolved.json if want.resolved else None
    number = 0
    for path, kind, layout, unit, named in _files(want, staging, progress):
        if path.stat().st_size == 0:
            raise ConfigError(Message("data.empty", path=named))
        for piece in pieces_of(path, kind, unit=unit, named=named):  # type: ignore[arg-type]
            yield Task(
                number=number,
                piece=piece,
                folder=str(staging),
                layout=layout,
                sequence=spec.sequence,
                overlong=spec.overlong,
                recipe=recipe,
            )
            number += 1


def _files(want: Wanted, staging: Path, progress: Progress) -> Iterator[tuple[Path, str, Layout, str, str]]:
    """Every file as lines or text. Lists and dialogues are written out as lines first."""
    if want.resolved is not None:
        path = staging / "list-0.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for record in want.resolved.records():
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        yield path, "lines", RECIPE, "example", want.resolved.name
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
            self._take_lines(base)
        self.tokens += counts.tokens
        self.examples += counts.examples
        self.cut += counts.cut
        self.skipped += counts.skipped
        self.targets.update(counts.targets.encode())
        for each in counts.sections:
            self.sections[each.field] = self.sections.get(each.field, SectionCount(field=each.field)).plus(each)
        if task.piece.kind == "text" and task.piece.last:
            # The samples of a whole text. A last token alone has nothing to be predicted from, and is left.
            for first in range(self.text_start, self.tokens, INDEX_BLOCK * self.sequence):
                last = min(first + INDEX_BLOCK * self.sequence, self.tokens)
                starts = np.arange(first, last, self.sequence, dtype="<i8")
                lengths = np.minimum(self.tokens - starts, self.sequence)
                keep = lengths > 1
                self._index(starts[keep], lengths[keep], lengths[keep] - 1)

    def _take_lines(self, base: Path) -> None:
        learned = Path(f"{base}.learned")
        if self.masked:
            append(learned, self.out["learned"])
        else:
            learned.unlink()
        lengths = np.fromfile(f"{base}.lengths", dtype="<i4")
        losses = np.fromfile(f"{base}.losses", dtype="<i8")
        starts = self.tokens + np.cumsum(lengths, dtype="<i8") - lengths
        self._index(starts, lengths, losses)
        for name in ("lengths", "losses"):
            Path(f"{base}.{name}").unlink()
        groups = Path(f"{base}.groups")
        if groups.exists():
            self.grouped = True
            append(groups, self.out["groups"])

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


def _check_arms(want: Wanted, targets: str, cache: Path) -> None:
    """All ablations of a recipe must be trained on the same answers: the first sets them, the others are held to it."""
    if want.resolved is None:
        return
    path = cache / f"arms-{want.arms_key}.json"
    arms = read_json(path) if path.is_file() else {}
    others = {name: digest for name, digest in arms.items() if digest != targets}
    if others:
        raise ConfigError(Message("data.other-answers", arm=want.resolved.arm, others=", ".join(others)))
    replace_file(path, json.dumps({**arms, want.resolved.arm: targets}).encode(), sync=True)


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
