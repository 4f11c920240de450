"""The flags of the levers, among what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.inputs.flags import LEVERS
from tightfit.types import Attention, Mamba1, Mamba2, ModelShape, Traced


def flags_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The lever flags among what was said."""
    return {name: value for name, value in said.items() if name in LEVERS}


def without_effect(named: Mapping[str, str], shape: ModelShape) -> tuple[str, ...]:
    """What was said about layers that the model does not have. `named`: lever → how the user called it."""
    kinds = [type(block.mixer) for block in shape.blocks]
    if Traced in kinds:  # what is in there is not known
        return ()
    said = []
    if "attention" in named and Attention not in kinds:
        said.append(f"{named['attention']} is without effect: {shape.name} has no attention layers.")
    if "scan" in named and not {Mamba1, Mamba2} & set(kinds):
        said.append(f"{named['scan']} is without effect: {shape.name} has no Mamba layers.")
    return tuple(said)
