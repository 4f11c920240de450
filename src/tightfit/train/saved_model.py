"""Named tensors into safetensors files, every rank writing its own bytes; nothing is gathered.

All ranks know the names, shapes and dtypes of everything that will be in the files, so each computes the same
layout: which file, which byte. Rank 0 makes the files at their full size in a staging folder; every rank then
writes the ranges that it owns, straight to their place; and only when all bytes are there does rank 0 rename the
staging folder to its real name. A reader sees the old folder or the new one, never a half.

Alternatives were to gather on one rank (the largest model no longer fits) or to let each rank write a file of
its own (nobody else can read them). The price of this way is one folder that all ranks can write to.

A failure on one rank must not leave the others waiting: it is noted in the staging folder, all barriers are
still passed, and every rank raises. Which ranges each rank wrote is told through small files too, and a byte
that nobody wrote is an error that names its tensor.

    writer = Writer(folder, rank=…, world=…, barrier=…)
    writer.write(names, pieces)             as often as there are sets of tensors
    writer.commit(beside, seal)             `beside` writes config, tokenizer … on rank 0; `seal` has the last word

`write_model` is these three for one model.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tightfit.inputs.records import read_json
from tightfit.messages import Message, say_why
from tightfit.owned import Listed, NotOurs, check_ours
from tightfit.runs import disk
from tightfit.runs.checkpoints import STAGED, check_removable, digest, remove_orphan, replaced_of, staging_of
from tightfit.runs.checkpoints import Span as Hashed
from tightfit.runs.folder import is_run
from tightfit.train.safetensors_files import LENGTH_BYTES, NAMES
from tightfit.types import TightfitError, UserError

SHARD_BYTES = 5 * 10**9  # Hugging Face's own limit for one file
HOST_BYTES = 64 * 2**20  # how much of a tensor is moved to the host, and cast, at a time

Names = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Every tensor of a set, in order: shape, and the dtype in the file."""

Span = tuple[int, int]


class SaveError(TightfitError):
    """Some rank could not write its part; nothing was put in place."""


@dataclass(frozen=True)
class TensorPiece:
    """Elements [start, start + numel) of the row-major parameter `name`, flat and contiguous, on any device."""

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class FileStyle:
    """How a set of tensors is cut into files and what they are called."""

    stem: str = "model"  # may begin with a folder of its own
    shard_bytes: int | None = SHARD_BYTES  # None: one file, however large
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    """Goes into every file's header; `format` is what from_pretrained looks for."""
    beside: Callable[[Path], None] | None = None
    """Called on rank 0 with the staging folder: config, tokenizer and so on."""


ADAPTER = FileStyle(stem="adapter_model", shard_bytes=None)
"""PEFT's layout; `beside` has to write the adapter_config.json."""


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """Tensors that go into files together."""

    names: Names  # the same on every rank
    pieces: Callable[[], Iterable[TensorPiece]]
    """What this rank writes of them, in order. Each is done with before the next is asked for."""
    style: FileStyle

    @property
    def total_bytes(self) -> int:
        """Of the files."""
        return _lay_out(self.names, self.style).total_bytes


Seal = Callable[[Path, Mapping[str, Sequence[Hashed]]], None]
"""Called on rank 0 when every byte is on the disk, with the staging folder and the hashes of each file's spans."""


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Layout:
    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    places: Mapping[str, _Place]
    index: str | None

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())


def write_model(
    folder: Path,
    pieces: Iterable[TensorPiece],
    names: Names,
    *,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    style: FileStyle = FileStyle(),  # noqa: B008 - frozen
) -> int:
    """Write one set of tensors as `folder`; called by all ranks alike. Returns the bytes of its files."""
    writer = Writer(folder, rank=rank, world=world, barrier=barrier)
    try:
        written = writer.write(names, pieces, style)
        writer.commit(style.beside)
    except KeyboardInterrupt:  # every other failure waits for the commit, which clears up
        writer.abandon()
        raise
    return written


class Writer:
    """One rank's hand in writing a folder. Every rank makes the same calls in the same order."""

    def __init__(
        self, folder: Path, *, rank: int, world: int, barrier: Callable[[], None], hashes: bool = False
    ) -> None:
        self.folder = folder
        self.staging = staging_of(folder)
        self._rank, self._world, self._barrier = rank, world, barrier
        self._hashes = hashes
        self._hashed: dict[str, list[Hashed]] = defaultdict(list)
        """Of each file the spans that were hashed: this rank's of one set, and on rank 0 in the end everybody's."""
        self._sets = 0
        self._problem: Exception | None = None
        self._made = False  # whether the staging folder is one that we made
        self._beside: set[str] = set()  # what a library wrote there
        if rank == 0:
            self._attempt(self._begin)
        barrier()

    def write(self, names: Names, pieces: Iterable[TensorPiece], style: FileStyle = FileStyle()) -> int:  # noqa: B008 - frozen
        """Write this rank's pieces of one set of tensors. Pieces may overlap between ranks, or be none."""
        layout = _lay_out(names, style)
        if self._rank == 0:
            self._attempt(lambda: self._make_files(layout))
        self._barrier()
        pieces = iter(pieces)
        self._attempt(lambda: self._write_pieces(layout, pieces))
        with suppress(Exception):  # after a failure, which is said: other ranks may need this one to make theirs
            for _ in pieces:
                pass
        self._barrier()
        self._attempt(lambda: self._check(layout))
        self._sets += 1
        return layout.total_bytes

    def commit(self, beside: Callable[[Path], None] | None = None, seal: Seal | None = None) -> None:
        """Put the folder in its place, or raise on every rank."""
        if beside is not None and self._rank == 0:
            self._attempt(lambda: self._write_beside(beside))
        self._attempt(lambda: disk.write_text(self._note(self._rank, "done"), "done"))  # without a problem so far
        self._barrier()
        late = [rank for rank in range(self._world) if not self._note(rank, "done").exists()]
        self._barrier()
        if self._rank == 0 and self._problem is None and not late:
            self._attempt(lambda: self._put_in_place(seal))
        self.abandon()
        self._barrier()
        if self._problem is not None:
            problem = self._problem
            if not isinstance(problem, OSError):
                raise problem
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(Message("train.no-room", folder=self.folder)) from problem
            raise UserError(Message("train.cannot-write", folder=self.folder, why=say_why(problem))) from problem
        if late:
            ranks = ", ".join(map(str, late))
            raise SaveError(Message("train.ranks-did-not-write", count=len(late), ranks=ranks, folder=self.folder))
        if not self.folder.is_dir():
            raise SaveError(Message("train.not-in-place", folder=self.folder))

    def abandon(self) -> None:
        """Remove what is only half written."""
        if self._rank == 0 and self._made and self.staging.exists():
            with suppress(OSError):  # why it failed is what counts; the next attempt, or the next start, removes it
                disk.remove_folder(self.staging, Listed(self._beside))
                if self.staging.exists():
                    disk.remove_folder(self.staging, STAGED)

    # --- steps ---------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], None]) -> None:
        """A failure waits until all ranks can hear of it; after one, nothing more is tried."""
        if self._problem is None:
            try:
                step()
            except Exception as error:
                self._problem = error

    def _begin(self) -> None:
        parent = self.folder.parent
        if not parent.exists():
            disk.make_folder(parent)
            disk.sync_path(parent.parent)
        if os.path.lexists(self.staging):
            # A former attempt was killed, or could not clear up: its first note says that it is ours, or the run does.
            advice, known = Message("train.move-away", name=self.folder.name), self._note(0, "began").is_file()
            if self.staging.is_symlink() or not (known or is_run(parent) or not any(self.staging.iterdir())):
                raise NotOurs(self.staging, Message("train.not-ours", staging=self.staging, advice=advice))
            check_ours(self.staging, STAGED, advice)
            disk.remove_folder(self.staging, STAGED)
        disk.make_new_folder(self.staging)
        self._made = True
        disk.write_text(self._note(0, "began"), "began")

    def _write_beside(self, beside: Callable[[Path], None]) -> None:
        before = set(self.staging.rglob("*"))
        try:
            beside(self.staging)
        finally:
            new = set(self.staging.rglob("*")) - before
            self._beside = {path.relative_to(self.staging).as_posix() for path in new if path.is_file()}

    def _make_files(self, layout: _Layout) -> None:
        for name, header in layout.headers.items():
            path = self.staging / name
            if not path.parent.exists():
                disk.make_folder(path.parent)
            descriptor = disk.create(path, layout.sizes[name])
            try:
                disk.put(descriptor, memoryview(header), 0)
                disk.sync(descriptor)
            finally:
                os.close(descriptor)
            if self._hashes:
                self._hashed[name].append(Hashed(0, len(header), digest(header)))
        if layout.index is not None:
            stem = next(iter(layout.headers)).split("-00001-of-")[0]
            disk.write_text(self.staging / f"{stem}.safetensors.index.json", layout.index)

    def _write_pieces(self, layout: _Layout, pieces: Iterable[TensorPiece]) -> None:
        """Write them, and note which elements of each tensor, and hashed bytes of each file, this rank wrote."""
        spans: dict[str, list[Span]] = defaultdict(list)
        hashed: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        opened: dict[str, int] = {}
        with ExitStack() as closing:
            for piece in pieces:
                place = layout.places.get(piece.name)
                stop = piece.start + piece.tensor.numel()
                if place is None or stop > place.numel or math.prod(piece.shape) != place.numel:
                    raise SaveError(f"{piece.name!r} [{piece.start}, {stop}) is not among what is being saved")
                if piece.tensor.numel() == 0:
                    continue
                if place.file not in opened:
                    opened[place.file] = disk.open_to_write(self.staging / place.file)
                    closing.callback(os.close, opened[place.file])
                flat = piece.tensor.detach().reshape(-1)
                step = max(1, HOST_BYTES // max(flat.dtype.itemsize, place.dtype.itemsize))
                for low in range(0, flat.numel(), step):
                    part = flat[low : low + step].to(device="cpu", dtype=place.dtype).contiguous()
                    data = part.view(torch.uint8).numpy().data
                    offset = place.offset + (piece.start + low) * place.dtype.itemsize
                    disk.put(opened[place.file], data, offset)
                    if self._hashes:
                        hashed[place.file].append((offset, offset + data.nbytes, digest(data)))
                spans[piece.name].append((piece.start, stop))
            for descriptor in opened.values():
                disk.sync(descriptor)
        told = {"elements": {name: _merge(of_one) for name, of_one in spans.items()}, "hashed": hashed}
        disk.write_text(self._note(self._rank, "spans"), json.dumps(told))

    def _check(self, layout: _Layout) -> None:
        """Every rank looks, so that every rank comes to the same end."""
        spans: dict[str, list[Span]] = defaultdict(list)
        for rank in range(self._world):
            note = self._note(rank, "spans")
            if not note.exists():
                return  # that rank has failed and will say why
            told = read_json(note, most_bytes=2**28)
            for name, of_one in told["elements"].items():
                spans[name] += [(start, stop) for start, stop in of_one]
            for file, each in told["hashed"].items():
                self._hashed[file] += [Hashed(start, stop, text) for start, stop, text in each]
        for name, place in layout.places.items():
            covered = _merge(spans.get(name, []))
            if place.numel and covered != [(0, place.numel)]:
                held = sum(stop - start for start, stop in covered)
                raise SaveError(Message("train.elements-missing", held=held, wanted=place.numel, name=name))

    def _put_in_place(self, seal: Seal | None) -> None:
        for note in sorted(self.staging.glob(".rank-*")):
            disk.remove_file(note)
        for path in sorted(self.staging.rglob("*")):
            disk.sync_path(path)
        if seal is not None:
            seal(self.staging, self._hashed)
        disk.sync_path(self.staging)
        old = replaced_of(self.folder)
        if os.path.lexists(self.folder):
            # An empty folder goes; a checkpoint of ours stands aside until the new one is in its place.
            if self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir()):
                disk.remove_folder(self.folder, Listed(()))
            else:
                check_removable(self.folder)
                if old.exists():
                    remove_orphan(old)
                disk.rename(self.folder, old)
        disk.rename(self.staging, self.folder)
        disk.sync_path(self.folder.parent)
        if old.exists():
            remove_orphan(old)

    def _note(self, rank: int, what: str) -> Path:
        number = f"-{self._sets}" if what == "spans" else ""
        return self.staging / f".rank-{rank}-{what}{number}.json"


# --- beside the weights --------------------------------------------------------------------------


def model_files(
    config: Any, model_class: str, dtype: torch.dtype, *, generation_config: Any = None, tokenizer: Any = None
) -> Callable[[Path], None]:
    """A writer of config.json and its neighbours, as save_pretrained would have written them."""

    def write(folder: Path) -> None:
        saved = copy.deepcopy(config)
        saved.architectures = [model_class]
        saved.dtype = dtype
        if getattr(saved, "use_cache", None) is False:  # off while training, and slow when it generates
            saved.use_cache = True
        if getattr(saved, "rescale_prenorm_residual", False):
            # It speaks of a new model only, but transformers 5 rescales what it has loaded as well.
            saved.rescale_prenorm_residual = False
        _save_all(folder, saved, generation_config, tokenizer)

    return write


def adapter_files(adapter_config: Any, base: str, *, tokenizer: Any = None) -> Callable[[Path], None]:
    """A writer of adapter_config.json, which names the model that the adapter is for."""

    def write(folder: Path) -> None:
        saved = copy.deepcopy(adapter_config)
        saved.base_model_name_or_path = base
        saved.inference_mode = True
        _save_all(folder, saved, tokenizer)

    return write


def _save_all(folder: Path, *things: Any) -> None:
    for each in things:
        if each is not None:
            disk.by_library(each.save_pretrained, folder)


# --- layout --------------------------------------------------------------------------------------


def _lay_out(names: Names, style: FileStyle) -> _Layout:
    """The same on every rank: it depends on the names alone."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in names.items():
        numbytes = math.prod(shape) * dtype.itemsize
        if style.shard_bytes is not None and size and size + numbytes > style.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += numbytes
    headers, sizes, places = {}, {}, {}
    for number, shard in enumerate(shards, start=1):
        many = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{style.stem}{many}.safetensors"
        entries: dict[str, object] = {"__metadata__": dict(style.metadata)} if style.metadata else {}
        begins: dict[str, int] = {}
        end = 0
        for name in sorted(shard, key=lambda one: -names[one][1].itemsize):  # wide numbers first: all stay aligned
            shape, dtype = names[name]
            if dtype not in NAMES:
                raise SaveError(Message("train.unknown-dtype", name=name, dtype=dtype))
            begins[name] = end
            end += math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        headers[file] = len(text).to_bytes(LENGTH_BYTES, "little") + text
        sizes[file] = len(headers[file]) + end
        for name in shard:
            shape, dtype = names[name]
            places[name] = _Place(file, len(headers[file]) + begins[name], math.prod(shape), dtype)
    index = None
    if len(shards) > 1:
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in names.values())
        weight_map = {name: places[name].file for name in names}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    return _Layout(headers, sizes, places, index)


def _merge(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
