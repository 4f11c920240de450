"""This rank's part of each parameter, as a contiguous range of its elements.

However an engine shards (not at all, ZeRO-3's flat parts, FSDP2's rows, some of the experts and of these FSDP2's rows),
a rank holds elements [start, stop) of the parameter laid out row by row. So weights are read from a file straight into
place, and written the same way, without anybody holding a whole parameter.

Ranks that share layers have some columns of the same rows of some matrices (`Columns`). To read these, a rank reads
whole rows and takes its own columns. To write them, the ranks that have the same rows exchange them, until each has
some of these rows whole.

A part may rest in a file on an NVMe. `outline` speaks of parts without touching them; `shards` brings each into
memory while it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tightfit.train.mesh import ALL, OWNERS, SHARDS, TENSOR
from tightfit.train.nvme import resident

HOME = "tightfit_home"  # the attribute of a parameter that rests on the host: where, in the parameter's shape
OWNED = "tightfit_owns"  # the attribute of a module whose parameters are some rows of the model's: `OwnedRows`
ADAPTED = "base_model.model."  # what PEFT puts before every name, and `base_layer.` before a weight's


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Of parameters that were cut before an engine shards them: each expert is a row."""

    first: int
    total: int  # of the whole parameter


@dataclass(frozen=True, slots=True)
class Columns:
    """Of each row of a matrix the elements [low, high). Ranges of such a part count its own elements alone."""

    low: int
    high: int
    group: Any  # the ranks that have the same rows, in the order of their columns

    @property
    def width(self) -> int:
        return self.high - self.low

    def join(self, part: Tensor, start: int) -> tuple[int, Tensor]:
        """Of the rows in `part`, which is flat and begins at its element `start`, this rank's share with all columns:
        where it begins in the matrix, and its elements, flat. All ranks of the group call it with the same rows."""
        size, rank = self.group.size(), self.group.rank()
        rows, more = divmod(part.numel() // self.width, size)
        takes = [rows + (each < more) for each in range(size)]
        begin, mine = start // self.width + sum(takes[:rank]), takes[rank]
        arrived = part.new_empty(size, mine, self.width)
        counts = [each * self.width for each in takes]
        dist.all_to_all_single(arrived.view(-1), part, [arrived[0].numel()] * size, counts, group=self.group)
        return begin * self.width * size, arrived.transpose(0, 1).reshape(-1)


@dataclass(frozen=True, slots=True)
class Shard:
    path: str  # the name in the model as it stands
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int  # this rank has elements [start, stop) of the whole
    parameter: nn.Parameter
    is_copy: bool = False  # a rank of another group has the same elements, and writes them
    columns: Columns | None = None  # these of its rows alone; None: it has whole rows
    holders: tuple[int, ...] = ()  # the ranks that have the same elements, where these are not all or this one alone

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
        whole: Tensor = getattr(param, HOME, param.data).view(-1)
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
        yield shard if first is None else replace(shard, path=f"{prefix}{first}", is_copy=True, holders=())


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

    held: Any = param
    if hasattr(param, "ds_tensor"):  # ZeRO-3: equal parts, the last one padded
        shape, part = tuple(held.ds_shape), held.ds_tensor
        share = getattr(part, "ds_numel", part.numel())  # what is in a file has a stand-in of one element
        start = min(rank * share, prod(shape))
        return Shard(name, shape, start, min(start + share, prod(shape)), param)
    shape = tuple(param.shape)
    whole = shape if owned is None else (owned.total, *shape[1:])
    first, width, columns = 0 if owned is None else owned.first, prod(shape[1:]), None
    if not isinstance(param, DTensor):
        return Shard(name, whole, first * width, first * width + param.numel(), param)
    mesh = held.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    places = dict(zip(mesh.mesh_dim_names, zip(held.placements, mesh.get_coordinate(), strict=True), strict=True))
    is_copy = any(place for kind, place in places.values() if kind.is_replicate())
    # Ranks that share layers have equal parts.
    rows = shape[0]
    if TENSOR in places:
        kind, place = places[TENSOR]
        if kind.dim == 0:
            rows //= sizes[TENSOR]
            first = place * rows
        else:
            width //= sizes[TENSOR]
            columns = Columns(place * width, (place + 1) * width, mesh.get_group(TENSOR))
    # Of what is left FSDP2 deals out rows, as `torch.chunk` cuts them.
    (dealt,) = [each for each in (SHARDS, ALL, OWNERS) if each in places]
    each_has = -(-rows // sizes[dealt])
    begin, end = (min(number * each_has, rows) for number in (places[dealt][1], places[dealt][1] + 1))
    start, stop = ((first + row) * width for row in (begin, end))
    return Shard(name, whole, start, stop, param, is_copy, columns, _find_holders(held))


def _find_holders(param: Any) -> tuple[int, ...]:
    """The ranks that have this one's elements of a parameter: all along the directions in which it is replicated."""
    mesh = param.device_mesh
    at = tuple(
        slice(None) if kind.is_replicate() else place
        for place, kind in zip(mesh.get_coordinate(), param.placements, strict=True)
    )
    return tuple(sorted(int(rank) for rank in mesh.mesh[at].reshape(-1).tolist()))
