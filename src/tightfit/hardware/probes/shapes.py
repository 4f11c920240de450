"""The shapes in which hy-smi and rocm-smi answer, all read into the same rows: a card's number, its keys and values.

- JSON: `{"card0": {"HCU use (%)": "0.0", …}, "system": {…}}`, after a banner or not; one release of Hygon's leaves out
  commas, and they are put back where a value is followed by the next.
- lines: `HCU[3]  : HCU use (%): 15.0`
- CSV: `device,HCU use (%),…` and `card0,10,…`, after a banner or not
- the table that they print when asked for nothing, whose last two columns are how full and how busy a card is

What is in none of these shapes gives no rows. A row of another length than its header is not guessed at, and the last
value of a text that breaks off without an end of line is not believed: half a number is a wrong one.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tightfit.hardware.probes.readings import number, words

_MOST_CARDS = 1024
_MOST_BLANKS = 4
"""More cells than columns: by cells of several words, as `0x74a1, 28851` is."""
_NUMBERED = re.compile(r"(?:card|gpu|hcu|dcu)\s*([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"(?:HCU|DCU|GPU)\[([0-9]{1,4})\]\s*:\s*([^:]+?)\s*:\s*(\S.*?)\s*", re.IGNORECASE)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_BUSY = re.compile(r"(?:HCU|DCU|GPU)%", re.IGNORECASE)
_HEADING = re.compile(r"[^()]*(?:\([^()]*\)\s*)*")
"""The unit, in brackets, is the last thing in a heading; what goes on after it was two."""
_OLD = ("gpu", "dcu", "hcu")
"""The first heading of tables whose cells are single words; newer ones begin with `Device`."""
_COLUMNS = {"temp": "temperature (sensor edge) (c)", "avgpwr": "average graphics package power (w)"}


@dataclass(slots=True)
class Row:
    """One card as a tool prints it: keys in lower case, values as they stand there."""

    index: int
    values: dict[str, object] = field(default_factory=dict)


def rows_of(text: str) -> list[Row]:
    """The cards in the first shape that fits, by number."""
    for read in (_json, _lines, _csv, _table):
        found = read(text)
        if found:
            return sorted(found.values(), key=lambda row: row.index)
    return []


def system_of(text: str) -> dict[str, object]:
    """What a JSON answer says beside the cards."""
    tree = tree_of(text)
    system = tree.get("system") if isinstance(tree, dict) else None
    return {str(key): value for key, value in system.items()} if isinstance(system, dict) else {}


def tree_of(text: str) -> object:
    """The JSON in a text, whatever banner stands before it; None: there is none."""
    for start in _starts(text):
        body = text[start:]
        for attempt in (body, None):
            try:
                return json.JSONDecoder().raw_decode(_with_commas(body) if attempt is None else attempt)[0]
            except (ValueError, RecursionError):
                continue
    return None


def _starts(text: str) -> Iterator[int]:
    """Where JSON may begin: with a bracket that is the first of its line. A banner may have brackets of its own."""
    found = [match.start(1) for match in re.finditer(r"^\s*([\[{])", text, re.MULTILINE)]
    brace = text.find("{")
    yield from list(dict.fromkeys([*found, *([brace] if brace >= 0 else [])]))[:4]


def _with_commas(text: str) -> str:
    """The text with a comma wherever one value directly follows another."""
    parts: list[str] = []
    ended = False
    for token in _TOKEN.findall(text):
        begins = token not in ("}", "]", ",", ":")
        if ended and begins:
            parts.append(",")
        parts.append(token)
        ended = token not in ("{", "[", ",", ":")
    return "".join(parts)


def split_lines(text: str) -> list[tuple[str, bool]]:
    """The lines, each with whether its end is there."""
    return [(line, line.endswith(("\n", "\r"))) for line in text.splitlines(keepends=True)]


def _json(text: str) -> dict[int, Row]:
    tree = tree_of(text)
    rows: dict[int, Row] = {}
    if isinstance(tree, dict):
        for name, card in tree.items():
            found = _NUMBERED.fullmatch(str(name))
            if found and isinstance(card, dict) and len(rows) < _MOST_CARDS:
                rows[int(found[1])] = Row(int(found[1]), {_key(key): value for key, value in card.items()})
    return rows


def _lines(text: str) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for line, whole in split_lines(text):
        if (found := _LINE.fullmatch(line.strip())) and len(rows) < _MOST_CARDS:
            values = rows.setdefault(int(found[1]), Row(int(found[1]))).values
            if whole:
                values.setdefault(_key(found[2]), found[3])
    return rows


def _csv(text: str) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    header: list[str] = []
    for line, whole in split_lines(text):
        try:
            cells = [cell.strip() for cell in next(csv.reader([line.strip()], strict=True), [])]
        except csv.Error:
            continue
        if len(cells) > 1 and cells[0].lower() == "device":
            header = [_key(cell) for cell in cells] if all(_HEADING.fullmatch(cell) for cell in cells) else []
        elif header and cells and (found := _NUMBERED.fullmatch(cells[0])) and len(rows) < _MOST_CARDS:
            row = rows.setdefault(int(found[1]), Row(int(found[1])))
            if len(cells) == len(header) and not any(map(_is_shifted, header, cells)):
                row.values |= dict(zip(header[1:], cells[1:] if whole else [*cells[1:-1], None], strict=True))
    return rows


def _is_shifted(heading: str, cell: str) -> bool:
    """Text where an amount belongs: a comma is missing, and cells stand under each other's headings."""
    return heading.endswith(")") and words(cell) is not None and number(cell) is None


def _table(text: str) -> dict[int, Row]:
    """The old table. Headers of two lines, and cells with blanks, leave the last two columns alone readable."""
    rows: dict[int, Row] = {}
    header: list[str] = []
    for line, whole in split_lines(text):
        cells = line.replace("|", " ").split() if whole else []
        if len(cells) > 2 and cells[-2].upper() == "VRAM%" and _BUSY.fullmatch(cells[-1]):
            header = [cell.lower() for cell in cells]
        elif header and len(cells) > 2 and re.fullmatch("[0-9]{1,4}", cells[0]) and len(rows) < _MOST_CARDS:
            kind = header[-1].removesuffix("%")
            row = Row(int(cells[0]))
            if len(header) <= len(cells) <= len(header) + _MOST_BLANKS:
                row.values |= {"vram%": cells[-2], f"{kind} use (%)": cells[-1]}
            if len(cells) == len(header) and header[0] in _OLD:
                row.values |= {
                    _COLUMNS[name]: cell for name, cell in zip(header, cells, strict=True) if name in _COLUMNS
                }
            rows.setdefault(row.index, row)
    return rows


def _key(key: object) -> str:
    return " ".join(str(key).lower().split())
