"""Single values as the makers' tools print them, read strictly: a number that may be wrong is unknown."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?")
_MOST_BYTES = 2**44
"""No card has 16 TiB."""
_MOST_WATTS = 10_000
_MOST_DEGREES = 200
_MOST_PID = 2**31
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


def number(value: object) -> float | None:
    """`15`, `15.0`, `"15.0"`; not `N/A`, `[Not Supported]`, nothing, or true."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if ((abs(value) < 1e30) if isinstance(value, int) else math.isfinite(value)) else None
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def with_unit(value: object, unit: str | None = None) -> tuple[object, str | None]:
    """`"612 W"` and `{"value": 612, "unit": "W"}` → 612 and its unit; a bare number keeps the unit that was given."""
    if isinstance(value, dict):
        told = value.get("unit")
        return value.get("value"), told if isinstance(told, str) else unit
    if isinstance(value, str) and (found := re.fullmatch(r"\s*([+-]?[0-9.]+)\s*([A-Za-z%°]*)\s*", value)):
        return found[1], found[2] or unit
    return value, unit


def size(value: object, unit: str | None) -> int | None:
    """Bytes. The tools write MB and mean MiB, as the cards' sizes show."""
    amount, word = with_unit(value, unit)
    found = number(amount)
    factor = _factor(word)
    if found is None or factor is None:
        return None
    held = found * factor
    return round(held) if 0 <= held < _MOST_BYTES else None


def total(value: object, unit: str | None) -> int | None:
    """Bytes of a whole card: none at all means that nobody knows."""
    return size(value, unit) or None


def _factor(unit: str | None) -> int | None:
    word = (unit or "").strip().lower()
    return _UNITS.get(re.sub(r"^([kmgt])i?b$", r"\1", word))


def percent(value: object) -> float | None:
    return _between(_read_amount(value, "%"), 0, 100)


def celsius(value: object) -> float | None:
    """A sensor that is not there is often told as 0 or below; no card is that cold."""
    found = _read_amount(value, "C")
    return None if found is None or found <= 0 else _between(found, 0, _MOST_DEGREES)


def watts(value: object) -> float | None:
    found = _read_amount(value, "W")
    return None if found is None or found <= 0 else _between(found, 0, _MOST_WATTS)


def _read_amount(value: object, unit: str) -> float | None:
    amount, word = with_unit(value, unit)
    letters = (word or "").replace("°", "").lower()
    return number(amount) if letters == unit.lower() else None


def _between(value: float | None, least: float, most: float) -> float | None:
    return value if value is not None and least <= value <= most else None


def process_id(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and found.is_integer() and 0 < found < _MOST_PID else None


def pci_address(value: object) -> str | None:
    """`00000000:09:00.0`, `0000:09:00.0` and `09:00.0` are one card; unknown: None."""
    if not isinstance(value, str):
        return None
    found = _PCI.fullmatch(value.strip().lower())
    if found is None:
        return None
    domain = (found[1] or "0000").lstrip("0").rjust(4, "0")
    return f"{domain}:{found[2]}:{found[3]}.{found[4]}"


def words(value: object) -> str | None:
    """Text that says something: not empty, not `N/A`, nothing that a terminal would obey."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if not isinstance(value, str):
        return None
    plain = " ".join("".join(letter if letter.isprintable() else " " for letter in value).split())[:120]
    empty = plain.strip("[]()").lower() in (
        "",
        "n/a",
        "na",
        "none",
        "null",
        "unknown",
        "not supported",
        "unknown error",
    )
    return None if empty else plain
