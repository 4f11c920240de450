"""What the makers' tools print, read strictly: a number that may be wrong is unknown. Single values, lines, JSON."""

from __future__ import annotations

import json
import re

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?")
_MOST_BYTES = 2**44  # no card has 16 TiB
MOST_CARDS = 1024
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_EMPTY = ("", "n/a", "na", "none", "null", "unknown", "not supported", "unknown error")
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


def number(value: object) -> float | None:
    """`15`, `15.0`, `"15.0"`; not `N/A`, `[Not Supported]`, nothing, or true."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e30 else None
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else None


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
    factor = _UNITS.get(re.sub(r"^([kmgt])i?b$", r"\1", (word or "").strip().lower()))
    if found is None or factor is None:
        return None
    held = found * factor
    return round(held) if 0 <= held < _MOST_BYTES else None


def total(value: object, unit: str | None) -> int | None:
    """Bytes of a whole card: none at all means that nobody knows."""
    return size(value, unit) or None


def percent(value: object) -> float | None:
    return _read_amount(value, "%", 100)


def celsius(value: object) -> float | None:
    """A sensor that is not there is often told as 0 or below; no card is that cold."""
    return _read_amount(value, "C", 200) or None


def watts(value: object) -> float | None:
    return _read_amount(value, "W", 10_000) or None


def _read_amount(value: object, unit: str, most: float) -> float | None:
    amount, word = with_unit(value, unit)
    found = number(amount) if (word or "").replace("°", "").lower() == unit.lower() else None
    return found if found is not None and 0 <= found <= most else None


def card_index(value: object) -> int | None:
    """A card's number in its tool's list."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_CARDS else None


def process_id(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and found.is_integer() and 0 < found < 2**31 else None


def pci_address(value: object) -> str | None:
    """`00000000:09:00.0`, `0000:09:00.0` and `09:00.0` are one card; unknown: None."""
    found = _PCI.fullmatch(value.strip().lower()) if isinstance(value, str) else None
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
    return None if plain.strip("[]()").lower() in _EMPTY else plain


def split_lines(text: str) -> list[tuple[str, bool]]:
    """The lines, each with whether its end is there: half a number is a wrong one."""
    return [(line, line.endswith(("\n", "\r"))) for line in text.splitlines(keepends=True)]


def find_json(text: str) -> object:
    """The JSON in a text, whatever banner stands before it; None: there is none.

    It begins with a bracket that is the first of its line, for a banner may have brackets of its own. One release of
    Hygon's leaves out commas, and they are put back wherever a value is directly followed by the next.
    """
    starts = [match.start(1) for match in re.finditer(r"^\s*([\[{])", text, re.MULTILINE)]
    if (brace := text.find("{")) >= 0:
        starts.append(brace)
    for start in list(dict.fromkeys(starts))[:4]:
        for read in (str, _put_commas):
            try:
                return json.JSONDecoder().raw_decode(read(text[start:]))[0]
            except (ValueError, RecursionError):
                continue
    return None


def _put_commas(text: str) -> str:
    parts: list[str] = []
    ended = False
    for token in _TOKEN.findall(text):
        if ended and token not in ("}", "]", ",", ":"):
            parts.append(",")
        parts.append(token)
        ended = token not in ("{", "[", ",", ":")
    return "".join(parts)
