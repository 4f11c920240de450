"""A rank's stages of a pipeline: the model with these layers alone, and how a pass goes through one of them.

The other layers, and the embedding or the head where another GPU has them, are taken out of the skeleton before
anything has values. Those that stay keep their numbers, so that a parameter is called the same as in the whole model.

The forward pass stays the model's own, with its masks and rotary tables, which every stage makes for itself: all
stages of a pipeline read the same rows, and only hidden states travel. What is not of the stage that runs is passed
over as the model goes through its list of layers. Below the stage nothing is computed; its first layer reads what
arrived, whatever it is handed; behind its last one the pass is left. So whatever a model does with its embedding before
the first layer (a factor, a norm, positions) happens on the first stage, and what comes after the last layer on the
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train.build import body_of, layers_of
from tightfit.train.shards import TIED
from tightfit.types import ModelError


class Stages:
    """Those of one rank, and the pass that runs."""

    def __init__(self, layers: Sequence[range], gpu: int, gpus: int) -> None:
        """`layers`: of every stage of the pipeline; this GPU has each `gpus`-th of them, from `gpu` on."""
        self.layers, self.own = tuple(layers), range(gpu, len(layers), gpus)
        self.now: int | None = None  # the stage that runs
        self.arrived: Tensor | None = None  # what it reads; the lowest reads the batch

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    @property
    def has_embedding(self) -> bool:
        return 0 in self.own

    @property
    def has_head(self) -> bool:
        return self.last in self.own

    def holds(self, layer: int) -> bool:
        return any(layer in self.layers[stage] for stage in self.own)


class StageLayers(nn.ModuleList):
    """The layers of some stages, under their numbers. While a stage runs it is as long as the whole model's."""

    def __init__(self, layers: Sequence[nn.Module], stages: Stages) -> None:
        super().__init__()
        self._stages, self._whole = stages, len(layers)
        for number, layer in enumerate(layers):
            if stages.holds(number):
                self._modules[str(number)] = layer
        self._passed = {number: Passed(layer) for number, layer in enumerate(layers) if not stages.holds(number)}

    @property
    def depths(self) -> list[int]:
        """The number of each layer within its stage."""
        return [depth for stage in self._stages.own for depth in range(len(self._stages.layers[stage]))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values() if self._stages.now is None else self._run())

    def __len__(self) -> int:
        return len(self._modules) if self._stages.now is None else self._whole

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def _run(self) -> list[Any]:
        """What the model goes through."""
        stages = self._stages
        assert stages.now is not None
        inside = stages.layers[stages.now]
        found: list[Any] = [self._modules.get(str(number)) or self._passed[number] for number in range(self._whole)]
        for number in range(self._whole):
            if number not in inside:
                found[number] = self._passed.get(number) or Passed(found[number])
        if inside.start > 0:
            found[inside.start] = _Arriving(found[inside.start], stages)
        if inside.stop < self._whole:
            found[inside.stop] = _Leaving(found[inside.stop])
        return found


class Passed:
    """In the place of a layer that does not run. What it returns is handed on by the model, as it is or as the first
    of a tuple, and read by nobody."""

    def __init__(self, layer: Any) -> None:
        kinds = (str, int, float, bool)  # an attention's kind, say, by which the model chooses a mask
        self.__dict__.update({name: each for name, each in vars(layer).items() if isinstance(each, kinds)})

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: int) -> Any:
        return self


class _Arriving:
    """The first layer of a stage, which reads what arrived."""

    def __init__(self, layer: Any, stages: Stages) -> None:
        self._layer, self._stages = layer, stages

    def __call__(self, _: Any, *words: Any, **named: Any) -> Any:
        return self._layer(self._stages.arrived, *words, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Leaving:
    """In the place of the layer behind a stage."""

    def __init__(self, passed: Any) -> None:
        self.__dict__.update(vars(passed))

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        raise Left(hidden)


class Left(Exception):
    """The pass is through its stage."""


class _Elsewhere(nn.Module):
    """In the place of an embedding that another GPU has. A model may add positions to what it takes for the tokens'
    embedding; nobody reads the sum."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self._stages.arrived is not None
        return self._stages.arrived


def cut(model: Any, stages: Stages) -> None:
    """Leave a skeleton, without adapters, what these stages have."""
    layers = layers_of(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    tied = find_tied(model)
    head = model.get_output_embeddings()
    holders = [
        (prefix, module)
        for prefix, module in model.named_modules()
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False))
    ]
    if not holders or head is None:
        raise ModelError(Message("train.no-layers", model=type(model).__name__))
    for path, module in holders:
        below = is_below_layers(path, module, head)
        if not (stages.has_embedding if below else stages.has_head):
            replace(model, path, _Elsewhere(stages) if below else nn.Identity())
    setattr(model, TIED, tied)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            replace(model, path, StageLayers(layers, stages))
            return


def is_below_layers(path: str, module: nn.Module, head: nn.Module) -> bool:
    """Of what is outside of the layers: it makes what they read. The rest reads what they made."""
    return module is not head and (isinstance(module, nn.Embedding) or "embed" in path)


def find_tied(model: Any) -> Mapping[str, str]:
    """Each further name of a parameter that has several, and its first."""
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            found[name] = first[param]
    return found


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def leave_after_stage(model: Any, stages: Stages) -> None:
    """Have the model return the hidden states of a stage that is not the last, and the last what it returned before."""
    body = body_of(model)
    whole = body.forward

    def forward(self: Any, **inputs: Any) -> Any:
        if stages.now == stages.last:
            return whole(**inputs)
        inputs.pop("labels", None)
        try:
            getattr(self, self.base_model_prefix)(**inputs)
        except Left as left:
            (hidden,) = left.args
            return hidden
        raise ModelError(Message("train.layers-not-passed", model=type(self).__name__))

    body.forward = MethodType(forward, body)


class Handover(torch.autograd.Function):
    """The end of a stage's graph. What is sent need not be kept for the gradient that comes back, which is put into
    `gradient` before the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None
