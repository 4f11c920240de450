"""The flags of the levers, among what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.inputs.flags import LEVERS
from tightfit.messages import Message, Said
from tightfit.types import Attention, Mamba1, Mamba2, ModelShape, Traced


def flags_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The lever flags among what was said."""
    return {name: value for name, value in said.items() if name in LEVERS}


def find_idle(named: Mapping[str, str], shape: ModelShape) -> tuple[Said, ...]:
    """What was said about layers that the model does not have. `named`: lever → how the user called it."""
    kinds = [type(block.mixer) for block in shape.blocks]
    if Traced in kinds:  # what is in there is not known
        return ()
    said = []
    if "attention" in named and Attention not in kinds:
        said.append(Message("desk.no-attention", name=named["attention"], model=shape.name))
    if "scan" in named and not {Mamba1, Mamba2} & set(kinds):
        said.append(Message("desk.no-mamba", name=named["scan"], model=shape.name))
    return tuple(said)
