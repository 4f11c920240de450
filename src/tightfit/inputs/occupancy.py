"""Who holds the memory of this machine's GPUs, and how much of it is free.

The makers' tools are asked as in `machine.py`, and the same rule holds: what a tool does not report stays unknown. A
process of another container or user may be shown by its number alone.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.inputs.catalogue import MIB
from tightfit.inputs.machine import Sight, look, positive, run_tool, visible
from tightfit.inputs.probes.amd_smi import parse_metric
from tightfit.inputs.probes.holders import who_is
from tightfit.inputs.probes.nvidia import nvml
from tightfit.inputs.probes.rocm_smi import parse_cards, parse_processes
from tightfit.inputs.probes.tools import Silent

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


@dataclass(slots=True)
class _Told:
    """What a tool says beyond `Sight`, by the number of the device."""

    free_bytes: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[Holder]] = field(default_factory=dict)


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
    return Occupancy(variable=variable, chosen_by_user=words is not None, devices=tuple(devices))


def _chosen(sight: Sight, env: Mapping[str, str]) -> tuple[str, list[str] | None]:
    """The variable that chooses visible GPUs, and its words; None: the user has not set it."""
    variable = "CUDA_VISIBLE_DEVICES"
    if sight.vendor != "nvidia" and ("HIP_VISIBLE_DEVICES" in env or variable not in env):
        variable = "HIP_VISIBLE_DEVICES"
    if variable not in env:
        return variable, None
    return variable, list(dict.fromkeys(word.strip() for word in env[variable].split(",") if word.strip()))


def _asked(sight: Sight) -> _Told:
    asks = {"NVML": _nvml, "nvidia-smi": _nvidia_smi, "hy-smi": _smi, "rocm-smi": _smi, "amd-smi": _smi}
    try:
        return asks[sight.tool](sight)
    except Silent:
        return _Told()


# --- NVIDIA -------------------------------------------------------------------------------------


def _nvml(sight: Sight) -> _Told:
    told = _Told()
    for card in nvml(time.monotonic() + _PATIENCE_S).cards:
        if card.index >= len(sight.devices):
            continue
        if card.free_bytes is not None:
            told.free_bytes[card.index] = card.free_bytes
        told.holders[card.index] = [_holder(each.pid, each.held_bytes) for each in card.processes or ()]
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


# --- AMD and Hygon ------------------------------------------------------------------------------


def _smi(sight: Sight) -> _Told:
    """Used memory by card. Which process sits on which card these tools do not tell in one answer."""
    told = _Told()
    if sight.tool == "amd-smi":
        cards = parse_metric(run_tool(sight.tool, "metric", "--json"))
    else:
        cards = parse_cards(run_tool(sight.tool, "--showmeminfo", "vram", "--json"), sight.vendor)
    for number, (card, device) in enumerate(zip(cards, sight.devices, strict=False)):
        if card.used_bytes is not None and device.memory_bytes is not None:
            told.free_bytes[number] = max(0, device.memory_bytes - card.used_bytes)
    if len(sight.devices) == 1 and sight.tool != "amd-smi":
        told.holders[0] = _smi_holders(sight)
    return told


def _smi_holders(sight: Sight) -> list[Holder]:
    try:
        found = parse_processes(run_tool(sight.tool, "--showpids"))
    except Silent:
        return []
    return [_holder(process.pid, process.held_bytes or None) for process, _ in found]


# --- processes ----------------------------------------------------------------------------------


def _holder(pid: int, held_bytes: int | None) -> Holder:
    user, command = who_is(pid)
    return Holder(pid=pid, user=user, command=command, held_bytes=held_bytes)
