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

from tightfit.hardware.probes import readings
from tightfit.hardware.probes.card import Card, CardProcess, Cards, read_card
from tightfit.hardware.probes.tools import Silent, ask_by
from tightfit.messages import Message

_HEAD = re.compile(r"GPU\s*:\s*([0-9]{1,4})\s*")
_PAIR = re.compile(r"(\s*)([A-Za-z0-9_ ]+?)\s*:\s*(.*?)\s*")

Tree = Mapping[str, object]


def amd_smi(deadline: float, whole: bool) -> Cards:
    """What `amd-smi` says; not `whole`: without who is on the cards."""
    texts = [ask_by(deadline, "amd-smi", "metric", "--json")]
    if not parse_cards(*texts):
        texts = [ask_by(deadline, "amd-smi", "metric")]
    if not parse_cards(*texts):
        raise Silent(Message("machine.tool-unreadable", tool="amd-smi"))
    for question in (("static", "--asic", "--bus"), ("list",), ("process",))[: 3 if whole else 1]:
        with suppress(Silent):
            texts.append(ask_by(deadline, "amd-smi", *question, "--json"))
    return Cards(cards=parse_cards(*texts))


def parse_cards(*texts: str) -> tuple[Card, ...]:
    """The cards of `amd-smi metric`, with or without `--json`, and what `static`, `list` and `process` say of them."""
    told = [_trees(text) for text in texts]
    cards = []
    for index in sorted(told[0]):
        tree = {key: value for each in reversed(told) for key, value in each.get(index, {}).items()}
        memory, heat, asic = (_branch(tree, name) for name in ("mem_usage", "temperature", "asic"))
        fields = {
            "name": asic.get("market_name"),
            "pci": readings.pci_address(_branch(tree, "bus").get("bdf")) or tree.get("bdf"),
            "uuid": tree.get("uuid"),
            "arch": asic.get("target_graphics_version"),
            "total_bytes": memory.get("total_vram"),
            "used_bytes": memory.get("used_vram"),
            "free_bytes": memory.get("free_vram"),
            "use_percent": _branch(tree, "usage").get("gfx_activity"),
            "temperature_c": readings.celsius(heat.get("edge")) or heat.get("hotspot"),
            "power_w": _branch(tree, "power").get("socket_power"),
        }
        listed = tree.get("process_list")
        processes = _read_processes(listed) if isinstance(listed, list) else None
        cards.append(replace(read_card(index, "amd", fields, "MB"), processes=processes))
    return tuple(cards)


def _read_processes(listed: list[object]) -> tuple[CardProcess, ...]:
    found: dict[int, CardProcess] = {}
    for entry in listed:
        outer = _lower_keys(entry)
        told = _branch(outer, "process_info") or outer
        pid = readings.process_id(told.get("pid"))
        if pid is not None:
            held = readings.total(_branch(told, "memory_usage").get("vram_mem") or told.get("mem"), "B")
            found.setdefault(pid, CardProcess(pid=pid, held_bytes=held))
    return tuple(found.values())


def _trees(text: str) -> dict[int, Tree]:
    """Card number → what is told of it, keys in lower case."""
    read = readings.find_json(text)
    if isinstance(read, dict):
        wrapped = read.get("gpu_data")
        read = wrapped if isinstance(wrapped, list) else [read]
    entries = read if isinstance(read, list) else _parse_indented(text)
    trees = [_lower_keys(entry) for entry in reversed(entries[: readings.MOST_CARDS])]
    return {index: tree for tree in trees if (index := readings.card_index(tree.get("gpu"))) is not None}


def _parse_indented(text: str) -> list[object]:
    """The text form: a card at the margin, groups below it, values below those."""
    cards: list[object] = []
    card: dict[str, object] = {}
    group: dict[str, object] = {}
    for line, whole in readings.split_lines(text):
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
