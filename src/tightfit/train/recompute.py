"""Activation checkpointing: which layers recompute, and where their inputs wait.

Hugging Face's layers checkpoint themselves; the lowest K do so for `layers:K`, since what they keep would wait
longest. With `full+offload` the inputs go to the host: torch saves them through the hooks that are active when the
checkpoint is entered, while everything inside goes through the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightfit.messages import Message
from tightfit.train.build import body_of, layers_of
from tightfit.types import Checkpointing, ConfigError

SMALLEST_MOVED_BYTES = 1 << 20
"""A smaller tensor costs more to move than to keep."""


def recompute(model: Any, how: Checkpointing) -> int:
    """Switch it on; the number of layers that recompute."""
    if how.layers == 0:
        return 0
    body, layers = body_of(model), layers_of(model)
    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wanted = len(layers) if how.layers is None else how.layers
    if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        if wanted != len(layers) or how.offload:
            raise ConfigError(Message("train.cannot-recompute-some", model=type(body).__name__))
        return wanted
    layer: Any
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < wanted
        if how.offload:
            layer._gradient_checkpointing_func = on_the_host
    return wanted


def on_the_host(function: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint whose inputs wait in host memory."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not tensor.is_cuda or tensor.numel() * tensor.element_size() < SMALLEST_MOVED_BYTES:
            return tensor.device, tensor
        # Pinned, and on the stream of the computation: the copy is ordered before whatever reuses the memory.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, use_reentrant=False)


class LayerCalls:
    """Counts how often layers run, which shows whether recomputation is really on."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0

        def count(*_: object) -> None:
            self.calls += 1

        self._hooks = [layer.register_forward_pre_hook(count) for layer in layers_of(model)]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
