"""This rank's part of each parameter, as a contiguous range of its elements.

However an engine shards (not at all, ZeRO-3's flat parts, FSDP2's rows, some of the experts and of these FSDP2's rows),
a rank holds elements [start, stop) of the parameter laid out row by row. So weights are read from a file straight into
place, and written the same way, without anybody holding a whole parameter.

A part may rest in a file on an NVMe. `outline` speaks of parts without touching them; `shards` brings each into
memory while it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from tightfit.train.nvme import resident

OWNED = "tightfit_owns"  # the attribute of a module whose parameters are some rows of the model's: `OwnedRows`
ADAPTED = "base_model.model."  # what PEFT puts before every name, and `base_layer.` before a weight's


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Of parameters that were cut before an engine shards them: each expert is a row."""

    first: int
    total: int  # of the whole parameter


@dataclass(frozen=True, slots=True)
class Shard:
    path: str  # the name in the model as it stands
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int  # this rank has elements [start, stop) of the whole
    parameter: nn.Parameter
    is_copy: bool = False  # a rank of another group has the same elements, and writes them

    @property
    def name(self) -> str:
        """Hugging Face's, without what adapters put around it."""
        return plain_name(self.path)

    @property
    def size(self) -> int:
        """Elements that this rank has."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def cut(self) -> bool:
        """Each element is on one rank of a group alone, though one may have them all: a single row cannot be shared
        out."""
        from torch.distributed.tensor import DTensor

        return hasattr(self.parameter, "ds_tensor") or isinstance(self.parameter, DTensor)

    @property
    def tensor(self) -> Tensor:
        """The elements, flat, where they are; of a part on NVMe only while it is in memory."""
        from torch.distributed.tensor import DTensor

        param: Any = self.parameter
        if hasattr(param, "ds_tensor"):
            part: Tensor = param.ds_tensor.data.view(-1)
            assert part.numel() >= self.size, f"{self.path} is on NVMe: go through shards(), or open it"
            return part[: self.size]
        if isinstance(param, DTensor):
            held = param._local_tensor
            return held.detach().reshape(-1) if self.size else held.new_empty(0)
        whole: Tensor = param.data.view(-1)
        return whole

    @contextmanager
    def access(self, *, write: bool = False) -> Iterator[Tensor]:
        """The elements in memory, wherever they rest; `write`: what is changed stays."""
        with resident(self.parameter, write=write):
            yield self.tensor


def plain_name(name: str) -> str:
    """The name in the model that was adapted, so that a wrapped model draws and loads the same base."""
    return name.removeprefix(ADAPTED).replace(".base_layer.", ".")


TIED = "tied_names"
"""Of a model with some layers of a pipeline: for the further names of tied parameters the first ones, under which
another GPU has them too."""


def outline(model: nn.Module, rank: int) -> Iterator[Shard]:
    """Each parameter's part, a tied one once."""
    tied = getattr(model, TIED, {})
    owned = {
        f"{path}.{leaf}": getattr(module, OWNED)
        for path, module in model.named_modules()
        if hasattr(module, OWNED)
        for leaf in module._parameters
    }
    for name, param in model.named_parameters():
        prefix = ADAPTED if name.startswith(ADAPTED) else ""
        first = tied.get(name.removeprefix(prefix))
        shard = shard_of(name, param, rank, owned.get(name))
        yield shard if first is None else replace(shard, path=f"{prefix}{first}", is_copy=True)


def find_tied_copy(model: nn.Module) -> nn.Parameter | None:
    """The parameter that another GPU of a pipeline has too."""
    tied: dict[str, str] = getattr(model, TIED, {})
    found = {name.removeprefix(ADAPTED): param for name, param in model.named_parameters()}
    return next((found[name] for pair in tied.items() for name in pair if name in found), None)


def shards(model: nn.Module, rank: int, *, write: bool = False) -> Iterator[Shard]:
    """The same, each in memory until the next one is asked for; `write`: what is changed meanwhile stays."""
    for shard in outline(model, rank):
        with shard.access(write=write):
            yield shard


def shard_of(name: str, param: nn.Parameter, rank: int, owned: OwnedRows | None = None) -> Shard:
    """`owned`: which rows of the model's parameter this one has, where not all."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held: Any = param
    if hasattr(param, "ds_tensor"):  # ZeRO-3: equal parts, the last one padded
        shape, part = tuple(held.ds_shape), held.ds_tensor
        share = getattr(part, "ds_numel", part.numel())  # what is in a file has a stand-in of one element
        start = min(rank * share, prod(shape))
        return Shard(name, shape, start, min(start + share, prod(shape)), param)
    shape = tuple(param.shape)
    row, first = prod(shape[1:]), 0 if owned is None else owned.first
    whole = shape if owned is None else (owned.total, *shape[1:])
    if not isinstance(param, DTensor):
        return Shard(name, whole, first * row, first * row + param.numel(), param)
    # FSDP2 deals out rows, as `torch.chunk` cuts them.
    local, offset = compute_local_shape_and_global_offset(shape, held.device_mesh, held.placements)
    start = (first + offset[0]) * row if prod(local) else prod(whole)
    places = zip(held.device_mesh.get_coordinate(), held.placements, strict=True)
    is_copy = any(place for place, kind in places if kind.is_replicate())
    return Shard(name, whole, start, start + prod(local), param, is_copy)
