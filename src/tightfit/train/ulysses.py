"""Sequences that several ranks share: Ulysses.

Each rank has a part of the tokens (`row_parts.py`), and everything but attention looks at tokens one by one. Around
attention the ranks of a group exchange what they have: all heads of some tokens become some heads of all tokens, and
its output goes the other way.

The exchange (`exchange.py`) is put around the attention functions of transformers. DeepSpeed has the same
(`UlyssesSPAttentionHF`, `_SeqAllToAll`), which needs its own groups and loader, changes by which number ZeRO divides
gradients, and would have to be there for engines that are torch's alone.

Where the frequencies of a rotary embedding depend on the length of a row, they are computed for the whole of it.

Shapes: B rows, T tokens of a part, L of whole rows, H heads, D a head's width; h of this rank's heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train.build import layers_of
from tightfit.train.exchange import exchange
from tightfit.train.place import GROUP_TIMEOUT, Place
from tightfit.train.row_parts import INSTALLED, RowParts
from tightfit.types import Levers, ModelError

EAGER = "eager_attention_forward"
"""What modules of transformers call the attention that each of them writes out; it stands in no registry."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change with the length of a row."""


class SequenceParts(RowParts):
    """With the group of ranks that share rows."""

    attends_whole = False

    def __init__(self, model: Any, levers: Levers, place: Place) -> None:
        super().__init__(levers, place)
        self.group, _ = dist.new_subgroups(self.size, timeout=GROUP_TIMEOUT)  # type: ignore[no-untyped-call]
        self._model, self._layers, self._checked, self.exchanged = model, len(layers_of(model)), False, 0
        install(model)

    def check(self) -> None:
        """A model may compute its attention in a way of its own: then its losses would be wrong, and look right."""
        if not self._checked and self.exchanged < self._layers:
            raise ModelError(Message("train.attention-unshared", model=type(self._model).__name__, size=self.size))
        self._checked = True


def attend(
    attention: Callable[..., Any],
    parts: SequenceParts,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """What an attention function of transformers returns for this rank's tokens."""
    parts.exchanged += 1
    if (copies := parts.size // key.shape[1]) > 1:  # fewer heads than ranks: several ranks have the same
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    query_BhLD, key_BhLD, value_BhLD = (gather_tokens(each, parts) for each in (query, key, value))
    if hasattr(module, "num_key_value_groups"):
        # Fewer than the model's own after copies.
        module.num_key_value_groups = query_BhLD.shape[1] // key_BhLD.shape[1]
    if named.get("position_ids") is not None:
        named["position_ids"] = parts.position_ids
    output_BLhD, weights = attention(module, query_BhLD, key_BhLD, value_BhLD, *rest, **named)
    return gather_heads(output_BLhD, parts), weights


def gather_tokens(some_BHTD: Tensor, parts: SequenceParts) -> Tensor:
    """(B, H, T, D) → (B, h, L, D). What arrives is laid out so that no copy of it is made."""
    sent: Tensor = some_BHTD.unflatten(1, (parts.size, -1))  # type: ignore[no-untyped-call]
    arrived = exchange(sent.permute(1, 3, 0, 2, 4), parts.group)
    return arrived.flatten(0, 1).permute(1, 2, 0, 3)


def gather_heads(some_BLhD: Tensor, parts: SequenceParts) -> Tensor:
    """(B, L, h, D) → (B, T, H, D)."""
    sent: Tensor = some_BLhD.unflatten(1, (parts.size, -1))  # type: ignore[no-untyped-call]
    arrived = exchange(sent.permute(1, 2, 0, 3, 4), parts.group)
    return arrived.permute(2, 1, 0, 3, 4).flatten(2, 3)


# --- transformers ---------------------------------------------------------------------------------


def install(model: Any) -> None:
    """Put the exchange around attention; what is there already stays. Outside of `SequenceParts` nothing changes."""
    attentions: Any = import_module("transformers.modeling_utils").AttentionInterface
    for name, attention in list(attentions._global_mapping.items()):
        if not name.startswith("paged"):
            attentions.register(name, _around(attention))
    for written in {type(module).__module__ for module in model.modules()}:
        if (eager := getattr(sys.modules[written], EAGER, None)) is not None:
            setattr(sys.modules[written], EAGER, _around(eager))
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        if any(kind in str(kinds) for kind in LENGTH_DEPENDENT):
            module.register_forward_pre_hook(_show_whole_rows, with_kwargs=True)
            module.register_forward_hook(_cut_rotary)


def _around(attention: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(attention, INSTALLED):
        return attention

    @wraps(attention)
    def attend_together(module: Any, *words: Any, **named: Any) -> Any:
        parts = RowParts.now
        here = partial(attend, attention, parts) if isinstance(parts, SequenceParts) else attention
        return here(module, *words, **named)

    setattr(attend_together, INSTALLED, True)
    return attend_together


def _show_whole_rows(_: nn.Module, words: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Of a rotary embedding, which is called with a tensor of some dtype and with the positions."""
    if not isinstance(parts := RowParts.now, SequenceParts):
        return words, named
    if "position_ids" in named:
        return words, {**named, "position_ids": parts.position_ids}
    return (words[0], parts.position_ids, *words[2:]), named


def _cut_rotary(_: nn.Module, __: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    parts = RowParts.now
    return tuple(parts.part(each) for each in tables) if isinstance(parts, SequenceParts) else tables
