"""Where the documents of a packed row start, from a model's inputs to its mixers.

transformers' attention models keep packed documents apart by `position_ids` that begin anew at each; its Mamba takes
them and looks at none. With our path installed they mean the same to both: neither the convolution nor the scan looks
beyond a position of zero.

A model hands `attention_mask` on to its layers, and these to their mixers, untouched in every version from 4.56 on, and
a layer that is computed a second time for the backward pass gets what it got the first time. So the starts travel in
its place, with the mask beside them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tightfit.mamba.arguments import ScanError
from tightfit.messages import text


@dataclass(frozen=True, slots=True)
class Documents:
    """What layers and mixers get as their `attention_mask`."""

    starts: Tensor
    """(batch, length), true where a document starts."""
    mask: Tensor | None


def reading_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a whole model, of which a document starts at each position of zero."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, position_ids: Tensor | None = None, **more: Any) -> Any:
        if position_ids is None:
            return original(self, *args, **more)
        bound = signature.bind(self, *args, **more)
        given = bound.arguments
        ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
        tokens = embedded if ids is None else ids
        shape = position_ids.shape if tokens is None else tokens.shape[:2]
        if position_ids.dim() != 2 or position_ids.shape[1:] != shape[1:] or position_ids.shape[0] not in (1, shape[0]):
            raise ScanError(text("scan.positions-shape", wanted=list(shape), shape=list(position_ids.shape)))
        starts = (position_ids == 0).expand(shape)
        given["attention_mask"] = Documents(starts, given.get("attention_mask"))
        return original(*bound.args, **bound.kwargs)

    return forward


def unpack(
    mask: Tensor | Documents | None, starts: Tensor | None, *, cached: bool
) -> tuple[Tensor | None, Tensor | None]:
    """A mixer's mask and starts. With a cache, positions that only count on say nothing."""
    if not isinstance(mask, Documents):
        return mask, starts
    if cached and not bool(mask.starts[:, 1:].any()):
        return mask.mask, starts
    return mask.mask, mask.starts
