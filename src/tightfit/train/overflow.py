"""fp16 overflows: how many in a row, and which layer began.

A skipped step now and then is how a dynamic loss scale finds its level. A streak is trouble, and its cause is a layer:
so after an overflow the next window is watched, layer by layer, and the first one whose output or whose gradient is
not finite is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.train.build import layers_of
from tightfit.train.events import Events

TELL_AFTER = 2
"""Overflows in a row before they are worth a line."""


@dataclass
class _OverflowSeen:
    forward: str | None = None
    backward: str | None = None


class OverflowWatch:
    def __init__(self, model: nn.Module, events: Events) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._layers = [(names[layer], layer) for layer in layers_of(model)]
        self._events = events
        self._hooks: list[Any] = []
        self._seen = _OverflowSeen()
        self.streak = 0

    def after_step(self, step: int, skipped: bool, loss_scale: float | None) -> None:
        """After each step."""
        if skipped:
            self.streak += 1
            if self.streak >= TELL_AFTER:
                began = self._seen.forward or self._seen.backward
                where = ("forward" if self._seen.forward else "backward") if began else None
                told = {"streak": self.streak, "loss_scale": loss_scale, "layer": began, "where": where}
                self._events.write("overflow", step=step, **told)
        else:
            self.streak = 0
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not skipped:
            return
        self._seen = seen = _OverflowSeen()
        for name, layer in self._layers:

            def look(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if not isinstance(first, Tensor):
                    return
                if seen.forward is None and not _finite(first):
                    seen.forward = name
                if first.requires_grad:
                    first.register_hook(lambda grad: note(grad, name))  # type: ignore[no-untyped-call]

            self._hooks.append(layer.register_forward_hook(look))

        def note(grad: Tensor, name: str) -> None:
            # Backwards runs from the top: the first that is seen is the one that began.
            if seen.backward is None and not _finite(grad):
                seen.backward = name


def _finite(values: Tensor) -> bool:
    """Without a copy of them, as `isfinite` makes: this happens where memory is at its peak."""
    least, most = torch.aminmax(values)  # NaN if one of them is
    return bool(torch.isfinite(least) and torch.isfinite(most))
