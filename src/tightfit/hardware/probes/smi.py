"""What rocm-smi's and hy-smi's keys mean, in the spellings of all the releases that we know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tightfit.hardware.probes.card import Card, complete_sizes
from tightfit.hardware.probes.readings import celsius, pci_address, percent, size, total, watts, words
from tightfit.hardware.probes.shapes import Row
from tightfit.hardware.words import recognise
from tightfit.types import Vendor

_UNIT = r"\((b|kb|kib|mb|mib|gb|gib)\)"
_TOTAL = re.compile(rf"vram total memory {_UNIT}")
_USED = re.compile(rf"vram total used memory {_UNIT}")
_FREE = re.compile(rf"available memory size {_UNIT}")
_BUSY = re.compile(r"(?:gpu|hcu|dcu) use \(%\)")
_FULL = re.compile(r"vram%|(?:gpu|hcu|dcu) memory (?:use \(%\)|allocated \(vram%\))")
_POWER = re.compile(r"(?:average|current) (?:socket )?graphics package power \(w\)")
_SENSORS = ("edge", "core", "junction")
_NAMES = ("card series", "card model", "device name", "marketing name", "market name")
_HYGON = re.compile(r"\b[hd]cu\b", re.IGNORECASE)


def cards_of(rows: Sequence[Row], vendor: Vendor) -> tuple[Card, ...]:
    """The cards of a listing; Hygon's own words tell its cards, whatever the tool is called."""
    if any(_HYGON.search(key) for row in rows for key in row.values):
        vendor = "hygon"
    return tuple(_card(row, vendor) for row in rows)


def _card(row: Row, vendor: Vendor) -> Card:
    values = row.values
    whole = _read_size(values, _TOTAL, is_total=True)
    arch = re.match("gfx[0-9a-f]+", words(values.get("gfx version")) or "")
    unique = words(values.get("unique id"))
    # a name that the catalogue knows before one that it does not; numbers such as 0x6210 are no names
    names = [name for key in _NAMES if (name := words(values.get(key))) and not name.lower().startswith("0x")]
    known = [name for name in names if recognise(name, whole)[0] is not None]
    return complete_sizes(
        Card(
            index=row.index,
            vendor=vendor,
            name=next(iter((*known, *names)), None),
            pci=pci_address(values.get("pci bus")),
            uuid=re.sub("^0x", "GPU-", unique) if unique else None,
            arch=arch[0] if arch else None,
            total_bytes=whole,
            used_bytes=_read_size(values, _USED),
            free_bytes=_read_size(values, _FREE),
            memory_percent=percent(_first(values, _FULL)),
            use_percent=percent(_first(values, _BUSY)),
            temperature_c=_temperature(values),
            power_w=watts(_first(values, _POWER)),
        )
    )


def _first(values: Mapping[str, object], pattern: re.Pattern[str]) -> object:
    return next((value for key, value in values.items() if pattern.fullmatch(key)), None)


def _read_size(values: Mapping[str, object], pattern: re.Pattern[str], *, is_total: bool = False) -> int | None:
    for key, value in values.items():
        if found := pattern.fullmatch(key):
            return total(value, found[1]) if is_total else size(value, found[1])
    return None


def _temperature(values: Mapping[str, object]) -> float | None:
    for sensor in _SENSORS:
        found = celsius(values.get(f"temperature (sensor {sensor}) (c)"))
        if found is not None:
            return found
    return None
