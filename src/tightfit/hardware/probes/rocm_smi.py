"""`rocm-smi`, and `hy-smi`, which is Hygon's edition of it, with keys and shapes of its own.

All their shapes are read into the same rows, a card's number and its keys and values:

- JSON: `{"card0": {"HCU use (%)": "0.0", …}, "system": {…}}`, after a banner or not
- lines: `HCU[3]  : HCU use (%): 15.0`
- CSV: `device,HCU use (%),…` and `card0,10,…`, after a banner or not
- the table that they print when asked for nothing, whose last two columns are how full and how busy a card is

What is in none of these shapes gives no rows. A row of another length than its header is not guessed at, and the last
value of a text that breaks off without an end of line is not believed: half a number is a wrong one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import replace

from tightfit.hardware.probes import readings
from tightfit.hardware.probes.card import Card, CardProcess, Cards, read_card
from tightfit.hardware.probes.tools import HungTool, Silent, ask_by
from tightfit.hardware.words import recognise
from tightfit.messages import Message
from tightfit.types import Vendor

_ALL = ("--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--showuse", "--showtemp")
_QUESTIONS: tuple[tuple[str, ...], ...] = (
    (*_ALL, "--showpower", "--json"),
    ("--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--json"),
    (*_ALL, "--showpower"),
    (),
)
"""In turn until one shows a card: older releases refuse what they do not know, and some know no JSON."""
TOPOLOGY = ("--showtopotype",)

Rows = dict[int, dict[str, object]]  # number of a card → its keys, in lower case, and their values as they stand there


def probe(tool: str, vendor: Vendor, deadline: float, whole: bool) -> Cards:
    """The cards, and if `whole` who is on them."""
    problem: Message | None = None
    for question in _QUESTIONS:
        try:
            cards = parse_cards(ask_by(deadline, tool, *question), vendor)
        except Silent as silence:
            problem = problem or silence.said
            if isinstance(silence, HungTool) or silence.said is None:
                raise type(silence)(problem) from silence
            continue
        if cards:
            break
        problem = Message("machine.tool-unreadable", tool=tool)
    else:
        raise Silent(problem)
    try:
        processes = parse_processes(ask_by(deadline, tool, "--showpids")) if whole else None
    except Silent:
        processes = None
    if processes is None:
        return Cards(cards=cards)
    # A process whose card is not told belongs to the only one, or to nobody knows which.
    placed = []
    for card in cards:
        own = [
            each if len(buses) < 2 else replace(each, held_bytes=None)  # told for all its cards together
            for each, buses in processes
            if len(cards) == 1 or card.pci in buses
        ]
        placed.append(replace(card, processes=tuple(own) if own or not processes else None))
    held = {process.pid for card in placed for process in card.processes or ()}
    loose = tuple(each for each, _ in processes if each.pid not in held)
    return Cards(cards=tuple(placed), unplaced=loose)


# --- what the keys mean, in the spellings of all the releases that we know ----------------------

_NAMES = ("card series", "card model", "device name", "marketing name", "market name")
_SENSORS = ("edge", "core", "junction")


def parse_cards(text: str, vendor: Vendor) -> tuple[Card, ...]:
    """The cards in an answer of any shape; none in garbage."""
    rows = next(filter(None, (read(text) for read in (_read_json, _read_lines, _read_csv, _read_table))), {})
    # Hygon's own words tell its cards, whatever the tool is called.
    if any(re.search(r"\b[hd]cu\b", key, re.IGNORECASE) for values in rows.values() for key in values):
        vendor = "hygon"
    return tuple(_make_card(index, values, vendor) for index, values in sorted(rows.items()))


_KEYS = {
    "pci": "pci bus",
    "arch": "gfx version",
    "memory_percent": r"vram%|(?:gpu|hcu|dcu) memory (?:use \(%\)|allocated \(vram%\))",
    "use_percent": r"(?:gpu|hcu|dcu) use \(%\)",
    "power_w": r"(?:average|current) (?:socket )?graphics package power \(w\)",
}
_SIZES = {
    "vram total memory": "total_bytes",
    "vram total used memory": "used_bytes",
    "available memory size": "free_bytes",
}
_SIZE = re.compile(rf"({'|'.join(_SIZES)}) \((b|kb|kib|mb|mib|gb|gib)\)")


def _make_card(index: int, values: Mapping[str, object], vendor: Vendor) -> Card:
    told: dict[str, object] = {}
    sizes: dict[str, int | None] = {}
    for key, value in values.items():
        if found := _SIZE.fullmatch(key):
            sizes.setdefault(_SIZES[found[1]], readings.size(value, found[2]))
        elif field := next((field for field, pattern in _KEYS.items() if re.fullmatch(pattern, key)), None):
            told.setdefault(field, value)
    # A name that the catalogue knows before one that it does not; numbers such as 0x6210 are no names.
    names = [name for key in _NAMES if (name := readings.words(values.get(key))) and not name.lower().startswith("0x")]
    known = [name for name in names if recognise(name, sizes.get("total_bytes") or None)[0] is not None]
    heat = (readings.celsius(values.get(f"temperature (sensor {sensor}) (c)")) for sensor in _SENSORS)
    told |= {"name": next(iter((*known, *names)), None), "temperature_c": next(filter(None, heat), None)}
    told["uuid"] = re.sub("^0x", "GPU-", readings.words(values.get("unique id")) or "")
    return read_card(index, vendor, told | sizes)


# --- the four shapes of cards -------------------------------------------------------------------

_NUMBERED = re.compile(r"(?:card|gpu|hcu|dcu)\s*([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"(?:HCU|DCU|GPU)\[([0-9]{1,4})\]\s*:\s*([^:]+?)\s*:\s*(\S.*?)\s*", re.IGNORECASE)
_HEADING = re.compile(r"[^()]*(?:\([^()]*\)\s*)*")
"""The unit, in brackets, is the last thing in a heading; what goes on after it was two."""
_MOST_BLANKS = 4  # more cells than columns: by cells of several words, as `0x74a1, 28851` is
_OLD = ("gpu", "dcu", "hcu")  # the first heading of tables whose cells are single words; newer ones begin with `Device`
_COLUMNS = {"temp": "temperature (sensor edge) (c)", "avgpwr": "average graphics package power (w)"}


def _read_json(text: str) -> Rows:
    tree = readings.find_json(text)
    rows: Rows = {}
    for name, card in tree.items() if isinstance(tree, dict) else ():
        found = _NUMBERED.fullmatch(str(name))
        if found and isinstance(card, dict) and len(rows) < readings.MOST_CARDS:
            rows[int(found[1])] = {_key(key): value for key, value in card.items()}
    return rows


def _read_lines(text: str) -> Rows:
    rows: Rows = {}
    for line, whole in readings.split_lines(text):
        if (found := _LINE.fullmatch(line.strip())) and len(rows) < readings.MOST_CARDS:
            values = rows.setdefault(int(found[1]), {})
            if whole:
                values.setdefault(_key(found[2]), found[3])
    return rows


def _read_csv(text: str) -> Rows:
    rows: Rows = {}
    header: list[str] = []
    for line, whole in readings.split_lines(text):
        try:
            cells = [cell.strip() for cell in next(csv.reader([line.strip()], strict=True), [])]
        except csv.Error:
            continue
        if len(cells) > 1 and cells[0].lower() == "device":
            header = [_key(cell) for cell in cells] if all(_HEADING.fullmatch(cell) for cell in cells) else []
        elif header and cells and (found := _NUMBERED.fullmatch(cells[0])) and len(rows) < readings.MOST_CARDS:
            values = rows.setdefault(int(found[1]), {})
            # Text where an amount belongs: a comma is missing, and cells stand under each other's headings.
            pairs = zip(header, cells, strict=False)
            amounts = [cell for heading, cell in pairs if heading.endswith(")") and readings.words(cell)]
            if len(cells) == len(header) and all(readings.number(cell) is not None for cell in amounts):
                values |= dict(zip(header[1:], cells[1:] if whole else [*cells[1:-1], None], strict=True))
    return rows


def _read_table(text: str) -> Rows:
    """The old table. Headers of two lines, and cells with blanks, leave the last two columns alone readable."""
    rows: Rows = {}
    header: list[str] = []
    for line, whole in readings.split_lines(text):
        cells = line.replace("|", " ").split() if whole else []
        if len(cells) > 2 and cells[-2].upper() == "VRAM%" and re.fullmatch("(?:HCU|DCU|GPU)%", cells[-1].upper()):
            header = [cell.lower() for cell in cells]
        elif header and len(cells) > 2 and re.fullmatch("[0-9]{1,4}", cells[0]) and len(rows) < readings.MOST_CARDS:
            values: dict[str, object] = {}
            if len(header) <= len(cells) <= len(header) + _MOST_BLANKS:
                values |= {"vram%": cells[-2], f"{header[-1].removesuffix('%')} use (%)": cells[-1]}
            if len(cells) == len(header) and header[0] in _OLD:
                pairs = zip(header, cells, strict=True)
                values |= {_COLUMNS[name]: cell for name, cell in pairs if name in _COLUMNS}
            rows.setdefault(int(cells[0]), values)
    return rows


def _key(key: object) -> str:
    return " ".join(str(key).lower().split())


# --- processes ----------------------------------------------------------------------------------

_TABLE_ROW = re.compile(r"^([0-9]{1,9})\s+\S+\s+(?:[0-9,]+|N/A|UNKNOWN)\s+([0-9]+)\s", re.MULTILINE)
_BLOCK = re.compile(r"^\s*PID\s*:\s*([0-9]+)[ \t\r]*\n", re.MULTILINE)
_HELD = re.compile(
    r"^\s*VRAM USED\s*\((B|KB|KiB|MB|MiB|GB|GiB)\)\s*:\s*([0-9.]+)[ \t\r]*\n", re.MULTILINE | re.IGNORECASE
)
_BUS = re.compile(r"^\s*PCI BUS\s*:([^\n]*)\n", re.MULTILINE | re.IGNORECASE)


def parse_processes(text: str) -> tuple[tuple[CardProcess, tuple[str, ...]], ...]:
    """The processes of `--showpids`, each with the addresses of its cards where they are said.

    Three shapes: JSON (`"PID4711": "python, 1, 123, 0, 0"`), a table, and Hygon's blocks of `KEY: value`.
    """
    found: dict[int, tuple[CardProcess, tuple[str, ...]]] = {}

    def add(pid_text: str, held_bytes: int | None, buses: tuple[str, ...] = ()) -> None:
        if (pid := readings.process_id(pid_text)) is not None:
            found.setdefault(pid, (CardProcess(pid=pid, held_bytes=held_bytes), buses))

    tree = readings.find_json(text)
    system = tree.get("system") if isinstance(tree, dict) else None
    for key, value in system.items() if isinstance(system, dict) else ():
        if str(key).startswith("PID"):
            cells = value.split(",") if isinstance(value, str) else []
            add(str(key).removeprefix("PID"), readings.size(cells[-3].strip(), "B") if len(cells) == 5 else None)
    for pid_text, held_text in _TABLE_ROW.findall(text):
        add(pid_text, readings.size(held_text, "B"))
    starts = [*_BLOCK.finditer(text)]
    for begin, end in zip(starts, [*(each.start() for each in starts[1:]), len(text)], strict=False):
        block = text[begin.end() : end]
        held, bus = _HELD.search(block), _BUS.search(block)
        told = re.findall(r"[0-9A-Fa-f:.]+", bus[1]) if bus else []
        buses = tuple(address for word in told if (address := readings.pci_address(word)) is not None)
        add(begin[1], readings.size(held[2], held[1]) if held else None, buses)
    return tuple(found.values())
