"""The MLP of a layer in tiles of its tokens, one after another, in both passes.

What an MLP makes between its two ends is several times as wide as the layer, and of a long sequence it is what a layer
holds most of, even where it all runs again. No token needs another's, so a tile of them is computed at a time. The
forward pass keeps nothing but the MLP's input. The backward pass takes tile by tile: forward once more, then back.

Four things need care:
- To an engine the MLP's weights must look as they would without tiles: each has one gradient, which arrives once. So
  the tiles go back to stand-ins for the weights, and the sums over the tiles are what autograd hands on. They are made
  in fp32, so that the number of tiles makes no difference to a training.
- They arrive in the order in which the modules have them, while those of a plain MLP come backwards. Ranks have rows of
  different lengths, and ZeRO-1 and 2 reduce what arrives as it arrives: so a single tile is a tile too.
- In a layer that recomputes, the second forward pass ends when all is there that the backward pass wants, and here that
  is the MLP's input. An autograd function saves what it keeps after it has run, so there are two: one that keeps, which
  is back in no time, and one that computes.
- ZeRO-3 fetches the weights of every module that is called, here in each tile, in both passes. With the MLP as a leaf
  they are fetched once, with those of all modules inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from tightfit.memory.feedforward import tile_tokens
from tightfit.train.build import layers_of

MLP = "mlp"  # what all families call it whose layers we know


def mlps_of(model: Any) -> list[Any]:
    return [getattr(layer, MLP) for layer in layers_of(model)]


def tile_mlps(model: Any) -> None:
    """Have every layer's MLP run in tiles."""
    for mlp in mlps_of(model):
        mlp.forward = TiledMlp(mlp).run


class TiledMlp:
    def __init__(self, mlp: nn.Module) -> None:
        self._mlp, self._plain = mlp, mlp.forward
        self._drops = any(isinstance(module, nn.Dropout) and module.p for module in mlp.modules())

    def run(self, x: Tensor) -> Tensor:
        tile = tile_tokens(x.numel() // x.shape[-1], x.shape[-1])
        trained = [param for param in self._mlp.parameters() if param.requires_grad]
        return _Compute.apply(_Keep.apply(x, self, tile, *trained), self, tile)  # type: ignore[no-any-return, no-untyped-call]

    def compute(self, x: Tensor, tile: int) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for x_tile, out_tile in zip(_cut(x, tile), _cut(out, tile), strict=True):
            out_tile.copy_(self._plain(x_tile))
        return out

    def go_back(
        self, x: Tensor, grad_out: Tensor, tile: int, numbers: _RandomNumbers | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradients of the input and of each parameter that trains."""
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        with _replay(numbers), _stand_in(self._mlp) as sums, torch.enable_grad():
            tiles = (_cut(each, tile) for each in (x, grad_out, grad_x))
            for x_tile, grad_out_tile, grad_x_tile in zip(*tiles, strict=True):
                own = x_tile.detach().requires_grad_()
                torch.autograd.backward(self._plain(own), grad_out_tile)
                assert own.grad is not None
                grad_x_tile.copy_(own.grad)
        return grad_x, sums.take()

    def draw(self, x: Tensor) -> _RandomNumbers | None:
        """Where the random numbers of a dropout begin; None: there is none."""
        if not (self._drops and self._mlp.training):
            return None
        return torch.get_rng_state(), *get_device_states(x)


_RandomNumbers = tuple[Tensor, list[int], list[Tensor]]  # of the CPU, and of each GPU


def _cut(x: Tensor, tile: int) -> tuple[Tensor, ...]:
    return torch.split(x.reshape(-1, x.shape[-1]), tile)


@contextmanager
def _replay(numbers: _RandomNumbers | None) -> Iterator[None]:
    if numbers is None:
        yield
        return
    on_cpu, devices, on_gpus = numbers
    with torch.random.fork_rng(devices):
        torch.set_rng_state(on_cpu)
        set_device_states(devices, on_gpus)
        yield


class _Sums:
    """Over the tiles, for each parameter that trains."""

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []
        self._sums: dict[int, Tensor] = {}

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """A leaf with the same values, whose gradient is added up as it comes."""
        leaf, number = param.detach().requires_grad_(), len(self.params)
        self.params.append(param)

        def add(arrived: Tensor) -> None:
            grad, arrived.grad = arrived.grad, None
            assert grad is not None
            if number in self._sums:
                self._sums[number].add_(grad)
            else:
                self._sums[number] = grad.to(torch.promote_types(grad.dtype, torch.float32))

        leaf.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return leaf

    def take(self) -> list[Tensor]:
        """One after another in the precision of its parameter."""
        return [self._sums.pop(number).to(param.dtype) for number, param in enumerate(self.params)]


@contextmanager
def _stand_in(mlp: nn.Module) -> Iterator[_Sums]:
    """Meanwhile the modules have leaves of their own in the place of the parameters that train."""
    sums, held = _Sums(), list[tuple[dict[str, Any], str, nn.Parameter]]()
    for owner in mlp.modules():
        for name, param in owner._parameters.items():
            if param is not None and param.requires_grad:
                held.append((owner._parameters, name, param))
    try:
        for owned, name, param in held:
            owned[name] = sums.stand_in(param)
        yield sums
    finally:
        for owned, name, param in held:
            owned[name] = param


class _Keep(torch.autograd.Function):
    """Keeps the MLP's input. Its backward gets what `_Compute` has handed on: the gradient of the MLP's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: TiledMlp, tile: int, *_: Tensor) -> Tensor:
        ctx.mlp, ctx.tile, ctx.numbers = mlp, tile, mlp.draw(x)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad_x, grads = ctx.mlp.go_back(x, grad_out, ctx.tile, ctx.numbers)
        return grad_x, None, None, *grads


class _Compute(torch.autograd.Function):
    """Computes, and keeps nothing."""

    @staticmethod
    def forward(_: Any, x: Tensor, mlp: TiledMlp, tile: int) -> Tensor:
        return mlp.compute(x, tile)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:
        return grads[0], None, None
