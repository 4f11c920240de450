"""This rank's part of each parameter, as a contiguous range of its elements.

However an engine shards (not at all, ZeRO-3's flat parts, FSDP2's rows), a rank holds elements [start, stop) of the
parameter laid out row by row. So weights are read from a file straight into place, and written the same way,
without anybody holding a whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from tightfit.types import ConfigError

ADAPTED = "base_model.model."
"""What PEFT puts before every name, and `base_layer.` before a weight's."""


@dataclass(frozen=True, slots=True)
class Shard:
    path: str
    """The name in the model as it stands."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    tensor: Tensor
    """Flat: elements [start, start + its own number) of the whole."""
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """Hugging Face's, without what adapters put around it."""
        return plain_name(self.path)

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def cut(self) -> bool:
        """Each element is on one rank alone, though one rank may have them all: a single row cannot be shared out."""
        from torch.distributed.tensor import DTensor

        return hasattr(self.parameter, "ds_tensor") or isinstance(self.parameter, DTensor)


def plain_name(name: str) -> str:
    """The name in the model that was adapted, so that a wrapped model draws and loads the same base."""
    return name.removeprefix(ADAPTED).replace(".base_layer.", ".")


def shards(model: nn.Module, rank: int) -> Iterator[Shard]:
    """Each parameter's part, a tied one once."""
    for name, param in model.named_parameters():
        yield shard_of(name, param, rank)


def shard_of(name: str, param: nn.Parameter, rank: int) -> Shard:
    from torch.distributed.tensor import DTensor

    if hasattr(param, "ds_tensor"):
        return _zero3(name, param, rank)
    if isinstance(param.data, DTensor) or isinstance(param, DTensor):
        return _rows(name, param)
    return Shard(name, tuple(param.shape), 0, param.data.view(-1), param)


def _zero3(name: str, param: nn.Parameter, rank: int) -> Shard:
    """Equal parts, the last one padded."""
    shape = tuple(param.ds_shape)  # type: ignore[attr-defined]
    part: Tensor = param.ds_tensor  # type: ignore[attr-defined]
    if getattr(part, "ds_numel", part.numel()) != part.numel():  # a stand-in: the part itself is in a file
        raise ConfigError("weights that lie on NVMe can be neither filled nor saved yet: use --offload-param cpu")
    start = min(rank * part.numel(), prod(shape))
    stop = min(start + part.numel(), prod(shape))
    return Shard(name, shape, start, part.data.view(-1)[: stop - start], param)


def _rows(name: str, param: nn.Parameter) -> Shard:
    """FSDP2 deals out rows, as `torch.chunk` cuts them."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    shape = tuple(param.shape)
    local, offset = compute_local_shape_and_global_offset(shape, param.device_mesh, param.placements)
    row = prod(shape[1:])
    held = param._local_tensor
    flat = held.detach().reshape(-1) if prod(local) else torch.empty(0, dtype=held.dtype, device=held.device)
    return Shard(name, shape, offset[0] * row if prod(local) else prod(shape), flat, param)
