"""Who holds the memory of this machine's GPUs, and how much of it is free.

The makers' tools are asked as in `machine.py`, and the same rule holds: what a tool does not report stays unknown. A
process of another container or user may be shown by its number alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tightfit.hardware.machine import find_visible, look, name_of, visibility_variables
from tightfit.hardware.probes import name_process
from tightfit.hardware.probes.card import CardProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU that a job started here may see."""

    number: int
    """As the maker's tool counts."""
    word: str
    """As the variable that chooses visible GPUs calls it."""
    key: str
    """A name that stays the same whoever looks."""
    name: str
    total_bytes: int | None
    free_bytes: int | None
    holders: tuple[CardProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The GPUs of this machine that a job may see."""

    variable: str
    """The variable that chooses among them."""
    chosen_by_user: bool
    """The user has set that variable already."""
    devices: tuple[Device, ...]
    unplaced: tuple[CardProcess, ...] = ()
    """Processes that hold memory of some GPU, and the tool does not say of which."""


def occupancy() -> Occupancy:
    """The GPUs, what is free on each, and who holds the rest; none, where there is no GPU."""
    sight, _ = look(whole=True)
    if sight is None:
        return Occupancy(variable="CUDA_VISIBLE_DEVICES", chosen_by_user=False, devices=())
    variable = visibility_variables(sight, os.environ)[-1]
    if variable not in os.environ and sight.cards[0].vendor != "nvidia":
        variable = "HIP_VISIBLE_DEVICES"
    words = list(dict.fromkeys(word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()))
    devices = []
    for position, card in enumerate(find_visible(sight, os.environ)[0]):
        number = next(place for place, each in enumerate(sight.cards) if each is card)
        devices.append(
            Device(
                number=number,
                word=words[position] if position < len(words) else str(position),
                key=card.uuid or f"{card.vendor}-{number}",
                name=name_of(card),
                total_bytes=card.total_bytes,
                free_bytes=card.free_bytes,
                holders=tuple(map(name_process, card.processes or ())),
            )
        )
    return Occupancy(
        variable=variable,
        chosen_by_user=variable in os.environ,
        devices=tuple(devices),
        unplaced=tuple(map(name_process, sight.unplaced)),
    )
