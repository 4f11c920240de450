"""`nvidia-smi`. It refuses a whole question for one field that it does not know: that field is left out, and the
question asked again."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tightfit.hardware.probes.card import Card, CardProcess, Cards, Driver, read_card
from tightfit.hardware.probes.readings import process_id, split_lines, total, words
from tightfit.hardware.probes.tools import Silent, ask_by, place_of
from tightfit.messages import Message

_AMOUNT = r"-?[0-9]+(?:\.[0-9]+)?"
_KINDS = {
    "index": ("index", _AMOUNT),
    "pci.bus_id": ("pci", r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"),
    "uuid": ("uuid", r"(?:GPU|MIG)-[0-9A-Za-z/-]+"),
    "memory.total": ("total_bytes", _AMOUNT),
    "memory.used": ("used_bytes", _AMOUNT),
    "memory.free": ("free_bytes", _AMOUNT),
    "utilization.gpu": ("use_percent", _AMOUNT),
    "temperature.gpu": ("temperature_c", _AMOUNT),
    "power.draw": ("power_w", _AMOUNT),
    "driver_version": ("driver", r"[0-9]+(?:\.[0-9]+)+"),
    "compute_cap": ("capability", r"[0-9]{1,2}\.[0-9]"),
}
"""Field → its name in a `Card`, and what belongs there."""
FIELDS = (*_KINDS, "name")  # the name comes last, for it may hold commas, quoted or not
_NAMES = ("index", "uuid", "memory.total", "compute_cap", "name")
_CSV = "--format=csv,noheader,nounits"
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
_MOST_REFUSALS = 4
_RUNTIME = re.compile(r"CUDA(?: UMD)? Version\s*:\s*([0-9]{1,2}\.[0-9]{1,2})")
TOPOLOGY = ("topo", "-m")
Link = tuple[str, str, str]  # two cards, and the tool's word for the way between them


def nvidia_smi(deadline: float, whole: bool) -> Cards:
    """What `nvidia-smi` says; not `whole`: which cards there are, in one question."""
    asked = FIELDS if whole else _NAMES
    for _ in range(_MOST_REFUSALS):
        try:
            text = ask_by(deadline, "nvidia-smi", f"--query-gpu={','.join(asked)}", _CSV)
            break
        except Silent as silence:
            refused = _REFUSED.search(silence.complaint)
            if refused is None or refused[1] not in asked:
                raise
            asked = tuple(name for name in asked if name != refused[1])
    else:
        raise Silent(Message("machine.tool-refuses"))
    cards, version = parse_cards(text, asked)
    if not cards:
        raise Silent(Message("machine.tool-without-cards", tool="nvidia-smi"))
    if not whole:
        return Cards(cards=cards)
    runtime = None
    with suppress(Silent):
        apps = processes(deadline)
        cards = tuple(
            replace(card, processes=tuple(each for uuid, each in apps if uuid == card.uuid)) for card in cards
        )
        runtime = parse_runtime(ask_by(deadline, "nvidia-smi"))
    return Cards(cards=cards, driver=Driver(version=version, runtime=runtime))


def processes(deadline: float) -> tuple[tuple[str, CardProcess], ...]:
    """Who computes on the cards, each with the name of its card."""
    return parse_apps(ask_by(deadline, "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", _CSV))


def repeating(interval_s: float) -> list[str] | None:
    """The command that prints all `FIELDS` again and again; None: the tool is not there."""
    place = place_of("nvidia-smi")
    often = str(max(100, round(interval_s * 1000)))
    return None if place is None else [place, f"--query-gpu={','.join(FIELDS)}", _CSV, "-lms", often]


def parse_cards(text: str, asked: Sequence[str] = FIELDS) -> tuple[tuple[Card, ...], str | None]:
    """The rows of a query, and the driver's version. A row that is too short, or without a number, is no card."""
    cards: dict[int, Card] = {}
    version: str | None = None
    for line in text.splitlines():
        row = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        if len(row) < len(asked) or not re.fullmatch("[0-9]{1,4}", row[0]):
            continue
        told = {name: cell for name, cell in zip(asked[:-1], row, strict=False) if words(cell)}
        known = {name: cell for name, cell in told.items() if not re.fullmatch(r"\[.*\]|ERR!", cell)}
        card = Card(index=int(row[0]), vendor="nvidia")
        # In a torn row cells stand in each other's places, and nothing of it is believed.
        if all(re.fullmatch(_KINDS[name][1], cell) for name, cell in known.items()):
            fields = {_KINDS[name][0]: cell for name, cell in known.items()}
            fields |= {"name": ", ".join(row[len(asked) - 1 :])}
            fields |= {"arch": f"sm_{fields.get('capability', '').replace('.', '')}"}
            card = read_card(card.index, "nvidia", fields, "MiB")
            version = version or fields.get("driver")
        cards.setdefault(card.index, card)
    return tuple(cards.values()), version


def parse_apps(text: str) -> tuple[tuple[str, CardProcess], ...]:
    """The processes, each with the name of its card. `No running processes found` has none."""
    found = []
    for line in text.splitlines(keepends=True):
        row = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        pid = process_id(row[1]) if len(row) == 3 and row[0].startswith(("GPU-", "MIG-")) else None
        if pid is not None:
            held = total(row[2], "MiB") if line.endswith("\n") else None
            found.append((row[0], CardProcess(pid=pid, held_bytes=held)))
    return tuple(found)


def parse_runtime(text: str) -> str | None:
    """The newest CUDA that the driver runs, from the head of the plain table."""
    found = _RUNTIME.search(text)
    return found[1] if found else None


def parse_links(text: str) -> tuple[Link, ...]:
    """The matrix of `TOPOLOGY`, here or of `rocm_smi.py`, above its diagonal."""
    header: list[str] = []
    found = []
    for line, whole in split_lines(re.sub(r"\x1b\[[0-9;]*m", "", text)):
        cells = line.split() if whole else []
        cards = [cell for cell in cells if re.fullmatch(r"(?:GPU|HCU|DCU)[0-9]{1,3}", cell)]
        if len(cards) > 1:
            header = cards
        elif header and cards and cells[0] == cards[0] and cells[0] in header and len(cells) > len(header):
            own = header.index(cells[0])
            for place in range(own + 1, len(header)):
                if re.fullmatch(r"NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|XGMI|PCIE", cells[1 + place]):
                    found.append((cells[0], header[place], cells[1 + place]))
    return tuple(found)
