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
from tightfit.hardware.probes.readings import (
    MOST_CARDS,
    card_index,
    celsius,
    find_json,
    pci_address,
    percent,
    process_id,
    size,
    split_lines,
    total,
    watts,
    words,
)
from tightfit.hardware.probes.tools import Silent, ask_by
from tightfit.messages import Message

_HEAD = re.compile(r"GPU\s*:\s*([0-9]{1,4})\s*")
_PAIR = re.compile(r"(\s*)([A-Za-z0-9_ ]+?)\s*:\s*(.*?)\s*")

Tree = Mapping[str, object]


def amd_smi(deadline: float, whole: bool) -> Answer:
    """What `amd-smi` says; not `whole`: without who is on the cards."""
    cards = parse_metric(ask_by(deadline, "amd-smi", "metric", "--json"))
    if not cards:
        cards = parse_metric(ask_by(deadline, "amd-smi", "metric"))
    if not cards:
        raise Silent(Message("machine.tool-unreadable", tool="amd-smi"))
    with suppress(Silent):
        cards = with_names(cards, ask_by(deadline, "amd-smi", "static", "--asic", "--bus", "--json"))
    if whole:
        with suppress(Silent):
            cards = with_names(cards, ask_by(deadline, "amd-smi", "list", "--json"))
        with suppress(Silent):
            cards = with_processes(cards, ask_by(deadline, "amd-smi", "process", "--json"))
    return Answer(tool="amd-smi", cards=cards)


def parse_metric(text: str) -> tuple[Card, ...]:
    """The cards of `amd-smi metric`, with or without `--json`."""
    found: dict[int, Card] = {}
    for index, tree in _trees(text):
        memory, heat = _branch(tree, "mem_usage"), _branch(tree, "temperature")
        card = Card(
            index=index,
            vendor="amd",
            total_bytes=total(memory.get("total_vram"), "MB"),
            used_bytes=size(memory.get("used_vram"), "MB"),
            free_bytes=size(memory.get("free_vram"), "MB"),
            use_percent=percent(_branch(tree, "usage").get("gfx_activity")),
            temperature_c=celsius(heat.get("edge")) or celsius(heat.get("hotspot")),
            power_w=watts(_branch(tree, "power").get("socket_power")),
        )
        found.setdefault(index, complete_sizes(card))
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
    placed = {}
    for index, tree in _trees(text):
        listed = tree.get("process_list")
        found: dict[int, CardProcess] = {}
        for entry in listed if isinstance(listed, list) else ():
            outer = _lower_keys(entry)
            told = _branch(outer, "process_info") or outer
            pid = process_id(told.get("pid"))
            if pid is not None:
                held = total(_branch(told, "memory_usage").get("vram_mem") or told.get("mem"), "B")
                found.setdefault(pid, CardProcess(pid=pid, held_bytes=held))
        placed[index] = tuple(found.values()) if isinstance(listed, list) else None
    return tuple(replace(card, processes=placed.get(card.index, card.processes)) for card in cards)


# --- shapes -------------------------------------------------------------------------------------


def _trees(text: str) -> list[tuple[int, Tree]]:
    """Card number → what is told of it, keys in lower case."""
    read = find_json(text)
    if isinstance(read, dict):
        wrapped = read.get("gpu_data")
        read = wrapped if isinstance(wrapped, list) else [read]
    entries = read if isinstance(read, list) else _parse_indented(text)
    trees = [_lower_keys(entry) for entry in entries[:MOST_CARDS]]
    return [(index, tree) for tree in trees if (index := card_index(tree.get("gpu"))) is not None]


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
