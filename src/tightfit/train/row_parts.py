"""Rows of which several ranks have a part of the tokens each.

Neighbouring ranks read the same rows, and each has an equal part of their tokens. To all that looks at tokens one by
one these ranks are ranks like others: the gradient of a row is the sum of its parts' gradients, so whatever reduces
gradients over all ranks adds these up too. How attention comes to see whole rows, `ulysses.py` and `tensor.py` say.
Masks are made for whole rows, and so is what tells documents apart (`documents.py`).

Shapes: B rows, T tokens of a part, L of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightfit.train.loss import shift
from tightfit.train.place import Place
from tightfit.types import Levers

INSTALLED = "tightfit_shares"  # the mark on a function of transformers that knows of parts


class RowParts:
    """This rank's part of the rows that it shares. `with parts:` around each pass, forward and backward."""

    now: ClassVar[RowParts | None] = None
    attends_whole: ClassVar[bool] = True
    """Whether layers turn queries and keys of whole rows, and so want the positions of these."""

    def __init__(self, levers: Levers, place: Place) -> None:
        self.size, self._sequence = levers.row_parts, levers.sequence
        self.index = place.rank % self.size
        self.position_ids: Tensor | None = None  # of the whole rows that were cut last
        masks: Any = import_module("transformers.masking_utils").AttentionMaskInterface
        for name, make in list(masks._global_mapping.items()):
            masks.register(name, _of_whole_rows(make))

    def __enter__(self) -> None:
        RowParts.now = self

    def __exit__(self, *_: object) -> None:
        RowParts.now = None

    def cut(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tokens of each row. Their labels are those of the next token, which another rank may have."""
        ids_BL, labels_BL = inputs["input_ids"], inputs["labels"]
        positions_BL = inputs.get("position_ids")
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)
        self.position_ids = positions_BL
        # Rows are padded so that they can be cut, perhaps beyond the last position that a model has learnt.
        positions_BL = positions_BL.clamp(max=self._sequence - 1)
        found = {"input_ids": ids_BL, "labels": shift(labels_BL), "position_ids": positions_BL}
        return {
            name: whole if name == "position_ids" and self.attends_whole else self.part(whole).contiguous()
            for name, whole in found.items()
        }

    def part(self, whole_BL: Tensor) -> Tensor:
        """Of what has a number for each token of a row, those of this rank's tokens."""
        return whole_BL.chunk(self.size, dim=1)[self.index]

    def check(self) -> None:
        """After the first forward pass: that attention has seen whole rows."""


def _of_whole_rows(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`: what makes a mask, of as many queries and keys as it is told."""
    if hasattr(make, INSTALLED):
        return make

    @wraps(make)
    def make_for_whole_rows(*words: Any, **named: Any) -> Any:
        if (parts := RowParts.now) is not None:
            for length in {"q_length", "kv_length"} & named.keys():
                named[length] *= parts.size
            if (places := named.get("cache_position")) is not None:  # in the place of q_length, before transformers 5
                named["cache_position"] = torch.arange(len(places) * parts.size, device=places.device)
        return make(*words, **named)

    setattr(make_for_whole_rows, INSTALLED, True)
    return make_for_whole_rows
