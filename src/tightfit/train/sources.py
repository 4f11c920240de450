"""Where weights come from: one interface, read in ranges, never a whole copy.

    source = Scratch(model, seed)                                   drawn by us
    source = open_weights(find_weights("org/name"), model, cache)   read from safetensors

`model` is on the meta device: it has names and shapes and no memory. An engine then asks for the ranges of its
own shards.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from tightfit.messages import Message
from tightfit.train.safetensors_files import DTYPES, Files, Stored, tensors_of
from tightfit.train.sources_convert import convert
from tightfit.train.sources_hub import Progress, find_weights, silent
from tightfit.train.sources_names import map_names, wrong_shape
from tightfit.types import ModelError

__all__ = ["Progress", "Safetensors", "WeightSource", "find_weights", "open_weights", "silent"]


class WeightSource(Protocol):
    """Anything that weights can be read from, a range at a time."""

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the row-major tensor `name`: flat, on the CPU, in the stored dtype."""


class Safetensors:
    """The weights of a folder. `parts`: for each name the stored tensors that lie end to end in it.

    Without `parts` the names are those of the files.
    """

    def __init__(self, folder: Path, parts: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.folder = folder
        self.stored: Mapping[str, Stored] = tensors_of(folder)
        self._parts = {name: (name,) for name in self.stored} if parts is None else dict(parts)
        self._files = Files()

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        parts = self._find_parts(name)
        ends = list(accumulate(part.numel for part in parts))
        if not 0 <= start <= stop <= ends[-1] or ends[-1] != math.prod(shape):
            raise ModelError(
                Message(
                    "train.other-size",
                    name=name,
                    found=ends[-1],
                    folder=self.folder,
                    wanted=math.prod(shape),
                    shape=list(shape),
                )
            )
        pieces = []
        index = bisect.bisect_right(ends, start) if start < ends[-1] else len(ends) - 1
        while True:
            begin = ends[index] - parts[index].numel
            low, high = max(start, begin), min(stop, ends[index])
            pieces.append(self._files.read(parts[index], low - begin, high - begin))
            if stop <= ends[index]:
                break
            index += 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def dtype(self, name: str) -> torch.dtype:
        """In which dtype `name` is stored."""
        return DTYPES[self._find_parts(name)[0].dtype]

    def close(self) -> None:
        self._files.close()

    def _find_parts(self, name: str) -> list[Stored]:
        if name not in self._parts:
            raise ModelError(Message("train.no-such-tensor", folder=self.folder, name=name))
        return [self.stored[key] for key in self._parts[name]]


def open_weights(
    folder: Path, model: torch.nn.Module, cache: Path | None = None, *, progress: Progress = silent
) -> Safetensors:
    """The weights of `folder` under the names of `model`; what only transformers can convert goes through `cache`."""
    stored = tensors_of(folder)
    for name, one in stored.items():
        if one.dtype not in DTYPES:
            raise ModelError(Message("train.weights-quantised", folder=folder, name=name, dtype=one.dtype))
    named = map_names(model, stored)
    if named.needs_conversion:
        if cache is None:
            raise ModelError(Message("train.needs-conversion", name=named.needs_conversion[0], folder=folder))
        folder = convert(folder, type(model), cache, progress=progress)
        stored = tensors_of(folder)
        named = map_names(model, stored)
    if named.missing:
        more = Message("train.and-more", count=len(named.missing) - 1) if len(named.missing) > 1 else ""
        raise ModelError(
            Message("train.weights-lack", folder=folder, name=named.missing[0], more=more, model=type(model).__name__)
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if problem := wrong_shape(name, tuple(tensor.shape), named.parts[name], stored):
            raise ModelError(Message("train.weights-of-another-model", problem=problem, folder=folder))
    return Safetensors(folder, named.parts)
