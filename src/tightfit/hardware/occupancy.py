"""Who holds the memory of this machine's GPUs, and how much of it is free.

The makers' tools are asked as in `machine.py`, and the same rule holds: what a tool does not report stays unknown. A
process of another container or user may be shown by its number alone.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tightfit.hardware.catalogue import MIB
from tightfit.hardware.machine import Sight, look, positive, run_tool, visible
from tightfit.hardware.probes import TOOLS
from tightfit.hardware.probes.holders import who_is
from tightfit.hardware.probes.tools import Silent

_CSV = "--format=csv,noheader,nounits"
_PATIENCE_S = 15.0


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


@dataclass(slots=True)
class _Told:
    """What a tool says beyond `Sight`, by the number of the device."""

    free_bytes: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[Holder]] = field(default_factory=dict)
    unplaced: list[Holder] = field(default_factory=list)


def occupancy() -> Occupancy:
    """The GPUs, what is free on each, and who holds the rest; none, where there is no GPU."""
    sight, _ = look()
    if sight is None:
        return Occupancy(variable="CUDA_VISIBLE_DEVICES", chosen_by_user=False, devices=())
    seen, _ = visible(sight, os.environ)
    variable, words = _chosen(sight, os.environ)
    told = _asked(sight)
    devices = []
    for position, device in enumerate(seen):
        number = next(place for place, each in enumerate(sight.devices) if each is device)
        word = words[position] if words is not None and position < len(words) else str(position)
        devices.append(
            Device(
                number=number,
                word=word,
                key=device.uuid or f"{sight.vendor}-{number}",
                name=device.name,
                total_bytes=device.memory_bytes,
                free_bytes=told.free_bytes.get(number),
                holders=tuple(told.holders.get(number, ())),
            )
        )
    return Occupancy(
        variable=variable, chosen_by_user=words is not None, devices=tuple(devices), unplaced=tuple(told.unplaced)
    )


def _chosen(sight: Sight, env: Mapping[str, str]) -> tuple[str, list[str] | None]:
    """The variable that chooses visible GPUs, and its words; None: the user has not set it."""
    variable = "CUDA_VISIBLE_DEVICES"
    if sight.vendor != "nvidia" and ("HIP_VISIBLE_DEVICES" in env or variable not in env):
        variable = "HIP_VISIBLE_DEVICES"
    if variable not in env:
        return variable, None
    return variable, list(dict.fromkeys(word.strip() for word in env[variable].split(",") if word.strip()))


def _asked(sight: Sight) -> _Told:
    if sight.tool == "nvidia-smi":
        with suppress(Silent):
            return _nvidia_smi(sight)
        return _Told()
    answer = TOOLS[sight.tool](time.monotonic() + _PATIENCE_S)
    told = _Told(unplaced=[_holder(each.pid, each.held_bytes) for each in answer.unplaced])
    by_uuid = {device.uuid: number for number, device in enumerate(sight.devices) if device.uuid is not None}
    for position, card in enumerate(answer.cards):  # without a name of its own a card is known by the tool's order
        number = by_uuid.get(card.uuid, position) if card.uuid is not None else position
        if card.free_bytes is not None:
            told.free_bytes[number] = card.free_bytes
        told.holders[number] = [_holder(each.pid, each.held_bytes) for each in card.processes or ()]
    return told


def _nvidia_smi(sight: Sight) -> _Told:
    told = _Told()
    for row in _rows(run_tool("nvidia-smi", "--query-gpu=index,memory.free", _CSV)):
        free = positive(row[1], MIB) if len(row) > 1 else None
        if row[0].isdigit() and free is not None:
            told.free_bytes[int(row[0])] = free
    number_of = {device.uuid: number for number, device in enumerate(sight.devices) if device.uuid}
    for row in _rows(run_tool("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", _CSV)):
        if len(row) > 2 and row[0] in number_of and row[1].isdigit():
            held = _holder(int(row[1]), positive(row[2], MIB))
            told.holders.setdefault(number_of[row[0]], []).append(held)
    return told


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


# --- processes ----------------------------------------------------------------------------------


def _holder(pid: int, held_bytes: int | None) -> Holder:
    user, command = who_is(pid)
    return Holder(pid=pid, user=user, command=command, held_bytes=held_bytes)
