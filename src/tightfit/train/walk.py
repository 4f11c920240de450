"""A window's micro batches go through a model together, layer by layer.

Whatever a layer's weights cost to bring to the device, they cost once for a whole window and direction. Going up, all
micro batches pass a layer one after the other. At the top each has its loss and the gradient of its hidden states at
once. Going down, micro batches take turns in exactly the opposite order.

The forward pass stays the model's own, with its masks and rotary tables, and runs once for each micro batch below the
layers: every layer only notes what it is called with. Later it is called so. At the top it runs once more, and reads
what the last layer made.

A layer that recomputes whole does so here: it keeps its input, on the device or on the host, and no graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.memory.units import AHEAD, LEAVING
from tightfit.messages import Message
from tightfit.train.build import body_of, find_layers
from tightfit.train.host_memory import HostMemory
from tightfit.train.stages import Left, Passed, replace
from tightfit.train.streaming import Streams
from tightfit.types import ModelError


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One on its way."""

    inputs: dict[str, Tensor]
    several: bool  # documents in its rows
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """What each layer is called with, but for the hidden states."""
    start: Tensor | None = None  # the hidden states below the lowest layer, and their graph
    hidden: Tensor | None = None  # those that the next layer reads
    kept: list[Any] = field(default_factory=list)  # by each layer for its backward pass
    gradient: Tensor | None = None  # of what the layer below made


class WalkedLayers(nn.ModuleList):
    """A model's layers; while `now` is set, what the model itself goes through in their place."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self._modules.update(layers._modules)
        self.now: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values() if self.now is None else self.now)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class _Noting(Passed):
    """In the place of a layer, writing down how it is called."""

    def __init__(self, layer: Any, note: Callable[..., None]) -> None:
        super().__init__(layer)
        self._note = note

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(hidden, args, kwargs)
        return self


class _Returning(Passed):
    """In the place of the last layer: what it made before."""

    def __init__(self, layer: Any, made: Any) -> None:
        super().__init__(layer)
        self._made = made

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._made


@dataclass(slots=True)
class _Gradient:
    """Of what a layer made, then of what it read."""

    value: Tensor | None = None

    def take(self) -> Tensor | None:
        value, self.value = self.value, None
        return value


class Passage:
    """One micro batch's way through one layer, up and down. The graph begins and ends here, so that nothing is held but
    what autograd keeps for it."""

    def __init__(self) -> None:
        self._gradient = _Gradient()
        self._exit: Any = None

    def enter(self, hidden: Tensor) -> Tensor:
        token = torch.empty((), requires_grad=True)
        read: Tensor = _Entrance.apply(token, hidden, self._gradient)  # type: ignore[no-untyped-call]
        return read

    def leave(self, made: Tensor) -> Tensor:
        self._exit = _Exit.apply(made, self._gradient)  # type: ignore[no-untyped-call]
        return made.detach()

    def go_back(self, gradient: Tensor | None) -> Tensor | None:
        """By the gradient of what the layer made, that of what it read; None: it did not enter."""
        self._gradient.value = gradient
        self._exit.backward()
        return self._gradient.take()


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, hidden: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradient.value = gradient
        return None, None, None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return made.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient.take(), None


class Walk:
    """How the passes of one model begin and end."""

    def __init__(self, model: Any) -> None:
        body, layers = body_of(model), find_layers(model)
        if getattr(body.config, "output_router_logits", False):
            raise ModelError(Message("train.router-loss", model=type(body).__name__))
        path = next(path for path, module in model.named_modules() if module is layers)
        self._list = WalkedLayers(layers)
        replace(model, path, self._list)
        self.layers: list[Any] = list(self._list)
        self._as_tuple = False  # whether a layer returns its hidden states in one
        self._whole = body.forward
        body.forward = MethodType(self._forward, body)

    def _forward(self, body: Any, **inputs: Any) -> Any:
        """The loss of what the layers made; while they note their calls, the hidden states below them."""
        if self._list.now is None or not isinstance(self._list.now[-1], _Noting):
            return self._whole(**inputs)
        inputs.pop("labels", None)
        try:
            getattr(body, body.base_model_prefix)(**inputs)
        except Left as left:
            return left.args[0]
        raise ModelError(Message("train.layers-not-streamed", model=type(body).__name__))

    @contextmanager
    def _instead(self, now: list[Any]) -> Iterator[None]:
        self._list.now = now
        try:
            yield
        finally:
            self._list.now = None

    def begin(self, run: Callable[..., Any], batch: MicroBatch) -> None:
        """Below the layers. `run`: the model as it is called."""
        first: list[Tensor] = []

        def note(hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not first:
                first.append(hidden)
            batch.calls.append((args, kwargs))
            if len(batch.calls) == len(self.layers):
                raise Left(first[0])

        with self._instead([_Noting(layer, note) for layer in self.layers]):
            batch.start = run(**batch.inputs, use_cache=False)

    def run(self, number: int, batch: MicroBatch, hidden: Tensor) -> Tensor:
        args, kwargs = batch.calls[number]
        made = self.layers[number](hidden, *args, **kwargs)
        self._as_tuple = isinstance(made, tuple)
        output: Tensor = made[0] if self._as_tuple else made
        return output

    def end(self, run: Callable[..., Any], batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Above the layers: the loss."""
        now: list[Any] = [Passed(layer) for layer in self.layers]
        now[-1] = _Returning(self.layers[-1], (hidden,) if self._as_tuple else hidden)
        with self._instead(now):
            loss: Tensor = run(**batch.inputs, use_cache=False).loss
        return loss


class Kept:
    """What layers keep of a window, on the device or on the host.

    On the way out the computation waits for the copies of the tensor before the last, so that at most two stand on the
    device beside those that it works on; on the way back the next few come while one is used."""

    def __init__(self, streams: Streams, memory: HostMemory | None) -> None:
        """`memory`: of the host, where they wait there; None: they stay."""
        self._streams, self._memory = streams, memory
        self._buffers: dict[int, Tensor] = {}
        self._rows: list[tuple[torch.Size, torch.dtype]] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._back: dict[int, tuple[Tensor, Any]] = {}

    def put(self, hidden: Tensor) -> Any:
        """Whatever `take` gives it back for."""
        if self._memory is None:
            return hidden
        number = len(self._rows)
        size = hidden.numel() * hidden.element_size()
        if number in self._buffers and self._buffers[number].numel() < size:  # a longer row than the last window's
            self._memory.give_back(self._buffers.pop(number))
        if number not in self._buffers:
            self._buffers[number] = self._memory.take(size)
        self._rows.append((hidden.shape, hidden.dtype))
        streams = self._streams
        with streams.on(streams.out, after=streams.mark()):
            self._host(number).copy_(hidden, non_blocking=True)
        self._leaving.append((hidden, streams.mark(streams.out)))
        self._drop(keep=LEAVING)
        return number

    def _drop(self, keep: int) -> None:
        while len(self._leaving) > keep:
            tensor, event = self._leaving.popleft()
            self._streams.wait(event)
            del tensor

    def _host(self, number: int) -> Tensor:
        shape, dtype = self._rows[number]
        return self._buffers[number][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def take(self, kept: Any) -> Tensor:
        """In the opposite order of `put`."""
        if self._memory is None:
            tensor: Tensor = kept
            return tensor
        self._drop(keep=0)
        for number in range(kept, max(-1, kept - AHEAD - 1), -1):
            if number not in self._back:
                self._fetch(number)
        tensor, event = self._back.pop(kept)
        self._streams.wait(event)
        del self._rows[kept:]
        return tensor

    def _fetch(self, number: int) -> None:
        host, streams = self._host(number), self._streams
        back = torch.empty_like(host, device=streams.device)
        with streams.on(streams.back, after=streams.mark()):
            back.copy_(host, non_blocking=True)
        self._back[number] = back, streams.mark(streams.back)

    def clear(self) -> None:
        """Of a window that was left in the middle."""
        self._rows.clear()
        self._back.clear()
        self._drop(keep=0)
