"""Dtypes that do not belong: found, named, and set right where that is safe.

A model of one precision with a few parameters or buffers of another fails in the middle of a forward pass ("expected
Half but found Float"), or silently computes in the wrong one. On a skeleton every parameter can be given its dtype
before any value is there, so parameters are always repaired; a buffer of 64 bits becomes one of 32, and the rest of
the buffers are left as the model's authors made them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tightfit.messages import Message
from tightfit.train.build import cast_meta


def audit(model: nn.Module, wanted: Callable[[str, nn.Parameter], torch.dtype]) -> tuple[Message, ...]:
    """Give each floating-point parameter the dtype that it should have; what was not so before."""
    found: list[Message] = []

    def right(name: str, param: nn.Parameter) -> torch.dtype:
        dtype = wanted(name, param)
        if not param.dtype.is_floating_point:
            return param.dtype
        if dtype != param.dtype:
            found.append(_oddity(name, param.dtype, dtype))
        return dtype

    cast_meta(model, right)
    for prefix, module in model.named_modules():
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.dtype == torch.float64:
                module._buffers[leaf] = buffer.float()
                found.append(_oddity(f"{prefix}.{leaf}".lstrip("."), torch.float64, torch.float32))
    return tuple(found)


def _oddity(name: str, was: torch.dtype, now: torch.dtype) -> Message:
    old, new = (str(dtype).removeprefix("torch.") for dtype in (was, now))
    return Message("train.was-and-is", name=name, old=old, new=new)
