"""`rocm-smi`, and all that `hy-smi`, which is Hygon's edition of it, has in common with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tightfit.hardware.probes.card import Answer, Card, CardProcess
from tightfit.hardware.probes.readings import pci_address, process_id, size
from tightfit.hardware.probes.shapes import rows_of, system_of
from tightfit.hardware.probes.smi import cards_of
from tightfit.hardware.probes.tools import HungTool, Silent, ask, ask_by
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
_TABLE_ROW = re.compile(r"^([0-9]{1,9})\s+\S+\s+([0-9,]+|N/A|UNKNOWN)\s+([0-9]+)\s", re.MULTILINE)
_BLOCK = re.compile(r"^\s*PID\s*:\s*([0-9]+)[ \t\r]*\n", re.MULTILINE)
_HELD = re.compile(
    r"^\s*VRAM USED\s*\((B|KB|KiB|MB|MiB|GB|GiB)\)\s*:\s*([0-9.]+)[ \t\r]*\n", re.MULTILINE | re.IGNORECASE
)
_BUS = re.compile(r"^\s*PCI BUS\s*:([^\n]*)\n", re.MULTILINE | re.IGNORECASE)


def rocm_smi(deadline: float, *, whole: bool = True) -> Answer:
    return probe("rocm-smi", "amd", deadline, whole=whole)


def probe(tool: str, vendor: Vendor, deadline: float, *, whole: bool) -> Answer:
    """The cards, and if `whole` who is on them, by `deadline` of the monotonic clock."""
    problem: Message | None = None
    hung = False
    for question in _QUESTIONS:
        try:
            text = ask_by(deadline, tool, *question)
        except Silent as silence:
            problem = problem or silence.said
            hung = isinstance(silence, HungTool)
            if hung or silence.said is None:
                break
            continue
        cards = parse_cards(text, vendor)
        if cards:
            return _with_processes(tool, cards, deadline) if whole else Answer(tool=tool, cards=cards)
        problem = Message("machine.tool-unreadable", tool=tool)
    return Answer(tool=tool, problem=problem, hung=hung)


def parse_cards(text: str, vendor: Vendor) -> tuple[Card, ...]:
    """The cards in an answer of any shape; none in garbage."""
    return cards_of(rows_of(text), vendor)


def parse_processes(text: str) -> tuple[tuple[CardProcess, tuple[str, ...]], ...]:
    """The processes of `--showpids`, each with the addresses of its cards where they are said.

    Three shapes: JSON (`"PID4711": "python, 1, 123, 0, 0"`), a table, and Hygon's blocks of `KEY: value`.
    """
    found: dict[int, tuple[CardProcess, tuple[str, ...]]] = {}
    for key, value in system_of(text).items():
        pid = process_id(key.removeprefix("PID")) if key.startswith("PID") else None
        cells = [cell.strip() for cell in value.split(",")] if isinstance(value, str) else []
        if pid is not None:
            held = size(cells[-3], "B") if len(cells) == 5 else None
            found[pid] = CardProcess(pid=pid, held_bytes=held), ()
    for number, _, held_text in _TABLE_ROW.findall(text):
        if (pid := process_id(number)) is not None:
            found.setdefault(pid, (CardProcess(pid=pid, held_bytes=size(held_text, "B")), ()))
    starts = [*_BLOCK.finditer(text)]
    for begin, end in zip(starts, [*(each.start() for each in starts[1:]), len(text)], strict=False):
        block = text[begin.end() : end]
        held_line, bus = _HELD.search(block), _BUS.search(block)
        if (pid := process_id(begin[1])) is not None:
            held = size(held_line[2], held_line[1]) if held_line else None
            told = re.findall(r"[0-9A-Fa-f:.]+", bus[1]) if bus else []
            buses = tuple(address for word in told if (address := pci_address(word)) is not None)
            found.setdefault(pid, (CardProcess(pid=pid, held_bytes=held), buses))
    return tuple(found.values())


def _with_processes(tool: str, cards: Sequence[Card], deadline: float) -> Answer:
    """A process whose card is not told belongs to the only one, or to nobody knows which."""
    try:
        processes = parse_processes(ask_by(deadline, tool, "--showpids"))
    except Silent:
        return Answer(tool=tool, cards=tuple(cards))
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
    return Answer(tool=tool, cards=tuple(placed), unplaced=loose)


def show_links(tool: str) -> str:
    """The matrix of how the cards reach each other."""
    return ask(tool, "--showtopotype")
