"""safetensors files by the byte: a header that says where each tensor lies, and ranges read straight from there.

The library of that name reads whole tensors, or slices along the first dimensions. A shard of an engine is a
range of a flattened parameter that starts and stops anywhere; reading just those bytes is what keeps a rank
from ever holding more than its own share.

The layout: eight bytes with the length of the header (little endian), the header as JSON, the data. The header
names for each tensor its dtype, shape and [begin, end) within the data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tightfit.inputs.records import parse_json
from tightfit.messages import Message, say_why
from tightfit.types import ModelError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What we write and read. Weights are the first four; the others are counters and masks that lie beside them."""

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

LARGEST_HEADER = 100 * 2**20  # the library's own limit
LENGTH_BYTES = 8
READ_BYTES = 2**30  # Linux reads at most 2 GiB at once


@dataclass(frozen=True)
class Stored:
    """One tensor in one file. `begin` and `end` are bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def overlaps(sizes: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Of parts that lie end to end those that [start, stop) meets: the number, and from where to where within it."""
    begin = 0
    for number, size in enumerate(sizes):
        low, high = max(start - begin, 0), min(stop - begin, size)
        if low < high:
            yield number, low, high
        begin += size


def read_header(path: Path, files: Files | None = None) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of one file, and its metadata; whatever is wrong with the file is said here."""
    files = files or Files()
    try:
        size = files.size(path)
        length = struct.unpack("<Q", files.read_bytes(path, 0, min(LENGTH_BYTES, size)).ljust(LENGTH_BYTES, b"\xff"))[0]
        if size < LENGTH_BYTES or length > min(LARGEST_HEADER, size - LENGTH_BYTES):
            raise ModelError(Message("train.not-safetensors", path=path))
        header = json.loads(files.read_bytes(path, LENGTH_BYTES, LENGTH_BYTES + length))
    except OSError as error:
        raise ModelError(Message("train.cannot-read", path=path, why=say_why(error))) from error
    except ValueError as error:
        raise ModelError(Message("train.header-not-json", path=path)) from error
    if not isinstance(header, dict):
        raise ModelError(Message("train.header-no-object", path=path))
    metadata = header.pop("__metadata__", None) or {}
    first = LENGTH_BYTES + length
    stored = {}
    for name, entry in header.items():
        try:
            begin, end = (int(offset) for offset in entry["data_offsets"])
            found = Stored(path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), first + begin, first + end)
        except (KeyError, TypeError, ValueError):
            raise ModelError(Message("train.tensor-nowhere", path=path, name=name)) from None
        if not 0 <= begin <= end or min(found.shape, default=0) < 0:
            raise ModelError(Message("train.tensor-lies-nowhere", path=path, name=name))
        if found.end > size:
            raise ModelError(Message("train.file-cut-off", path=path, name=name, over=found.end - size))
        dtype = DTYPES.get(found.dtype)
        if dtype is not None and found.numel * dtype.itemsize != end - begin:
            raise ModelError(Message("train.tensor-other-size", path=path, name=name, size=end - begin))
        stored[name] = found
    return stored, {str(key): str(value) for key, value in dict(metadata).items()}


def tensors_of(folder: Path, files: Files | None = None) -> dict[str, Stored]:
    """Every tensor of a folder's model, from its index or its single file."""
    opened = files or Files()
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    is_adapter = opened.has(folder / "adapter_config.json")
    if opened.has(index):
        try:
            names = set(parse_json(opened.read_bytes(index, 0, opened.size(index)))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(Message("train.no-index", index=index)) from None
        paths = sorted(folder / str(name) for name in names)
        for file in paths:
            if file.parent != folder or not opened.has(file):
                raise ModelError(Message("train.index-names", index=index, name=file.name))
    elif opened.has(single):
        paths = [single]
    else:
        paths = opened.find(folder, "*.safetensors") if not is_adapter else []
    if not paths:
        if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth")):
            raise ModelError(Message("train.weights-pickled", folder=folder))
        raise ModelError(Message("train.adapter-no-model" if is_adapter else "train.no-safetensors", folder=folder))
    found: dict[str, Stored] = {}
    for file in paths:
        found |= read_header(file, opened)[0]
    return found


class Files:
    """Open files and reads from them. Positions are given with each read, so threads may share it."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def read(self, stored: Stored, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a stored tensor, flat, as stored."""
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise ModelError(Message("train.file-quantised", file=stored.file, dtype=stored.dtype))
        result = torch.empty(stop - start, dtype=dtype)
        if start == stop:
            return result
        self.read_into(stored.file, result.view(torch.uint8).numpy().data, stored.begin + start * dtype.itemsize)
        return result

    def find(self, folder: Path, pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern))

    def has(self, path: Path) -> bool:
        return path.is_file()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def read_bytes(self, path: Path, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.read_into(path, memoryview(data), start)
        return bytes(data)

    def read_into(self, path: Path, view: memoryview, position: int) -> None:
        """The bytes of a file from `position` on, until the view is full."""
        while view:
            if path not in self._open:
                try:
                    self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ModelError(Message("train.cannot-read", path=path, why=say_why(error))) from error
            count = os.preadv(self._open[path], [view[:READ_BYTES]], position)
            if count == 0:
                raise ModelError(Message("train.file-shrank", file=path))
            view = view[count:]
            position += count

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()
