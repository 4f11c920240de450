"""`amd-smi`, AMD's newer tool: JSON in three wrappings, or indented text.

- a list of cards, `{"gpu_data": [...]}`, or one card alone; a line of WARNING may stand before it
- an amount is `{"value": 196592, "unit": "MB"}`, a bare number, `"612 W"` or `"N/A"`
- it counts cards in another order than HIP does, so a card is known by its PCI address alone
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from tightfit.hardware.probes.card import Answer, Card, CardProcess, complete_sizes
from tightfit.hardware.probes.readings import celsius, pci_address, percent, process_id, size, total, watts, words
from tightfit.hardware.probes.shapes import split_lines, tree_of
from tightfit.hardware.probes.tools import HungTool, Silent, ask_by
from tightfit.messages import Message

_HEAD = re.compile(r"GPU\s*:\s*([0-9]{1,4})\s*")
_PAIR = re.compile(r"(\s*)([A-Za-z0-9_ ]+?)\s*:\s*(.*?)\s*")
_MOST_CARDS = 1024

Tree = Mapping[str, object]


def amd_smi(deadline: float, *, whole: bool = True) -> Answer:
    """What `amd-smi` says, by `deadline` of the monotonic clock; not `whole`: without who is on the cards."""
    try:
        cards = parse_metric(ask_by(deadline, "amd-smi", "metric", "--json"))
        if not cards:
            cards = parse_metric(ask_by(deadline, "amd-smi", "metric"))
    except Silent as silence:
        return Answer(tool="amd-smi", problem=silence.said, hung=isinstance(silence, HungTool))
    if not cards:
        return Answer(tool="amd-smi", problem=Message("machine.tool-unreadable", tool="amd-smi"))
    with suppress(Silent):
        cards = with_names(cards, ask_by(deadline, "amd-smi", "static", "--asic", "--bus", "--json"))
    if not whole:
        return Answer(tool="amd-smi", cards=cards)
    with suppress(Silent):
        cards = with_names(cards, ask_by(deadline, "amd-smi", "list", "--json"))
    with suppress(Silent):
        cards = with_processes(cards, ask_by(deadline, "amd-smi", "process", "--json"))
    return Answer(tool="amd-smi", cards=cards)


def parse_metric(text: str) -> tuple[Card, ...]:
    """The cards of `amd-smi metric`, with or without `--json`."""
    found: dict[int, Card] = {}
    for index, tree in _trees(text):
        memory, use, power = _branch(tree, "mem_usage"), _branch(tree, "usage"), _branch(tree, "power")
        heat = _branch(tree, "temperature")
        card = complete_sizes(
            Card(
                index=index,
                vendor="amd",
                total_bytes=total(memory.get("total_vram"), "MB"),
                used_bytes=size(memory.get("used_vram"), "MB"),
                free_bytes=size(memory.get("free_vram"), "MB"),
                use_percent=percent(use.get("gfx_activity")),
                temperature_c=_first_heat(heat),
                power_w=watts(power.get("socket_power")),
            )
        )
        found.setdefault(index, card)
    return tuple(found[index] for index in sorted(found))


def with_names(cards: tuple[Card, ...], text: str) -> tuple[Card, ...]:
    """The cards with name, address and architecture, as `amd-smi static` and `amd-smi list` know them."""
    told = dict(_trees(text))
    named = []
    for card in cards:
        tree = told.get(card.index, {})
        asic, bus = _branch(tree, "asic"), _branch(tree, "bus")
        arch = words(asic.get("target_graphics_version")) or ""
        named.append(
            replace(
                card,
                name=card.name or words(asic.get("market_name")),
                pci=card.pci or pci_address(bus.get("bdf")) or pci_address(tree.get("bdf")),
                uuid=card.uuid or words(tree.get("uuid")),
                arch=card.arch or (arch if re.fullmatch("gfx[0-9a-f]{3,5}", arch) else None),
            )
        )
    return tuple(named)


def with_processes(cards: tuple[Card, ...], text: str) -> tuple[Card, ...]:
    """The cards with their processes, of `amd-smi process`; a card that it does not list stays unknown."""
    told = dict(_trees(text))
    return tuple(
        replace(card, processes=_processes(told[card.index])) if card.index in told else card for card in cards
    )


def _processes(tree: Tree) -> tuple[CardProcess, ...] | None:
    listed = tree.get("process_list")
    if not isinstance(listed, list):
        return None
    found: dict[int, CardProcess] = {}
    for entry in listed:
        outer = _lower_keys(entry)
        told = _branch(outer, "process_info") or outer
        pid = process_id(told.get("pid"))
        if pid is not None:
            held = total(_branch(told, "memory_usage").get("vram_mem") or told.get("mem"), "B")
            found.setdefault(pid, CardProcess(pid=pid, held_bytes=held))
    return tuple(found.values())


def _first_heat(heat: Tree) -> float | None:
    return next((found for name in ("edge", "hotspot") if (found := celsius(heat.get(name))) is not None), None)


# --- shapes -------------------------------------------------------------------------------------


def _trees(text: str) -> list[tuple[int, Tree]]:
    """Card number → what is told of it, keys in lower case."""
    read = tree_of(text)
    if isinstance(read, dict):
        wrapped = read.get("gpu_data")
        read = wrapped if isinstance(wrapped, list) else [read]
    entries = read if isinstance(read, list) else _parse_indented(text)
    found: list[tuple[int, Tree]] = []
    for entry in entries[:_MOST_CARDS]:
        tree = _lower_keys(entry)
        number = tree.get("gpu")
        if isinstance(number, str) and re.fullmatch("[0-9]{1,4}", number):
            number = int(number)
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MOST_CARDS:
            found.append((number, tree))
    return found


def _parse_indented(text: str) -> list[object]:
    """The text form: a card at the margin, groups below it, values below those."""
    cards: list[object] = []
    card: dict[str, object] = {}
    group: dict[str, object] = {}
    for line, whole in split_lines(text):
        if not whole:
            continue
        if head := _HEAD.fullmatch(line.rstrip()):
            card, group = {"gpu": head[1]}, {}
            cards.append(card)
        elif card and (pair := _PAIR.fullmatch(line.rstrip())) and pair[1]:
            if pair[3]:
                group[pair[2].lower()] = pair[3]
            else:
                group = {}
                card.setdefault(pair[2].lower(), group)
    return cards


def _lower_keys(value: object) -> dict[str, object]:
    return {str(key).lower(): each for key, each in value.items()} if isinstance(value, dict) else {}


def _branch(tree: Tree, name: str) -> Tree:
    return _lower_keys(tree.get(name))
