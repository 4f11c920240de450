"""Who holds the memory of this machine's GPUs, and how much of it is free.

The makers' tools are asked as in `machine.py`, and the same rule holds: what a tool does not report stays unknown. A
process of another container or user may be shown by its number alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.hardware.machine import find_visible, look, name_of
from tightfit.hardware.probes.card import Answer, CardProcess
from tightfit.hardware.probes.holders import who_is


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a GPU. None: not told."""

    pid: int
    user: str | None
    command: str | None
    held_bytes: int | None


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
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The GPUs of this machine that a job may see."""

    variable: str
    """The variable that chooses among them."""
    chosen_by_user: bool
    """The user has set that variable already."""
    devices: tuple[Device, ...]
    unplaced: tuple[Holder, ...] = ()
    """Processes that hold memory of some GPU, and the tool does not say of which."""


def occupancy() -> Occupancy:
    """The GPUs, what is free on each, and who holds the rest; none, where there is no GPU."""
    sight, _ = look(whole=True)
    if sight is None:
        return Occupancy(variable="CUDA_VISIBLE_DEVICES", chosen_by_user=False, devices=())
    seen, _ = find_visible(sight, os.environ)
    variable, words = _find_choice(sight, os.environ)
    devices = []
    for position, card in enumerate(seen):
        number = next(place for place, each in enumerate(sight.cards) if each is card)
        word = words[position] if words is not None and position < len(words) else str(position)
        devices.append(
            Device(
                number=number,
                word=word,
                key=card.uuid or f"{card.vendor}-{number}",
                name=name_of(card),
                total_bytes=card.total_bytes,
                free_bytes=card.free_bytes,
                holders=tuple(map(_holder, card.processes or ())),
            )
        )
    unplaced = tuple(map(_holder, sight.unplaced))
    return Occupancy(variable=variable, chosen_by_user=words is not None, devices=tuple(devices), unplaced=unplaced)


def _find_choice(sight: Answer, env: Mapping[str, str]) -> tuple[str, list[str] | None]:
    """The variable that chooses visible GPUs, and its words; None: the user has not set it."""
    variable = "CUDA_VISIBLE_DEVICES"
    if sight.cards[0].vendor != "nvidia" and ("HIP_VISIBLE_DEVICES" in env or variable not in env):
        variable = "HIP_VISIBLE_DEVICES"
    if variable not in env:
        return variable, None
    return variable, list(dict.fromkeys(word.strip() for word in env[variable].split(",") if word.strip()))


def _holder(process: CardProcess) -> Holder:
    user, command = who_is(process.pid)
    return Holder(pid=process.pid, user=user, command=command, held_bytes=process.held_bytes)
