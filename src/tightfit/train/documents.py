"""Whether rows hold several documents: the host that packed them tells transformers.

transformers finds out for itself, from `position_ids`, in each forward pass and with flash attention in each layer. It
asks the device, so the host waits there until everything that it launched before has run, and then the GPU waits for
the host: at the start of every micro batch. It does so for rows that were never packed too, whose positions the model
counts itself.

The worker hands over `position_ids` where a row holds more than one document, and nowhere else, so it knows. Its answer
holds inside the passes of its engine (`Told`); elsewhere transformers asks as before. Releases that do not ask are left
alone.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor


class Told:
    """`with told:` inside, `told.several` is the answer."""

    now: ClassVar[Told | None] = None

    def __init__(self) -> None:
        self.several = False
        self.position_ids: Tensor | None = (
            None  # of whole rows, where ranks share them; None: those that are asked about
        )
        install()

    def __enter__(self) -> None:
        Told.now = self

    def __exit__(self, *_: object) -> None:
        Told.now = None


def install() -> None:
    """Once a process."""
    masks: Any = import_module("transformers.masking_utils")
    ask = getattr(masks, "find_packed_sequence_indices", None)
    # Earlier releases give a plain row an answer too, and then a mask: that is priced as it is.
    if ask is not None and not hasattr(ask, "__wrapped__") and ask(torch.arange(4)[None]) is None:

        @wraps(ask)
        def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
            if Told.now is None:
                found: Tensor | None = ask(position_ids)
                return found
            whole = Told.now.position_ids
            return number_documents(position_ids if whole is None else whole) if Told.now.several else None

        masks.find_packed_sequence_indices = find_packed_sequence_indices
    flash: Any = import_module("transformers.modeling_flash_attention_utils")
    look = getattr(flash, "_is_packed_sequence", None)
    if look is not None and not hasattr(look, "__wrapped__"):

        @wraps(look)
        def is_packed(position_ids: Tensor | None, batch_size: int) -> Any:
            if Told.now is None:
                return look(position_ids, batch_size)
            return Told.now.several and position_ids is not None and batch_size == 1

        flash._is_packed_sequence = is_packed


def number_documents(position_ids: Tensor) -> Tensor:
    """For each token the number of its document in its row, from 0."""
    return torch.diff(position_ids, prepend=position_ids[:, :1] - 1).ne(1).cumsum(-1)
