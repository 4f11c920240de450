"""NVML and torch, which are libraries: a wedged driver would hold whoever calls them, so each is called by `child.py`.

torch is the last resort, where no maker's tool is at hand. To import it takes seconds, so it is asked only where
nothing else shows a card and its build has a use for one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec

from tightfit.hardware.probes.card import Card, CardProcess, Cards, Driver, read_card
from tightfit.hardware.probes.readings import card_index, find_json, process_id, total, words
from tightfit.hardware.probes.tools import HungTool, Silent, run_child
from tightfit.messages import Message
from tightfit.types import Vendor

_HYGON = ("gfx926", "gfx928", "gfx936")  # architectures that no card of AMD has


def nvml(deadline: float, whole: bool) -> Cards:
    """What NVML says; nothing, where nvidia-ml-py is not installed or finds no driver. It tells all at once."""
    left = deadline - time.monotonic()
    try:
        if left > 0 and find_spec("pynvml") is not None:
            return parse_library(run_child("NVML", "nvml", timeout_s=left))
    except HungTool:
        raise
    except (Silent, ImportError, ValueError):
        pass
    return Cards()


def torch_cards(deadline: float) -> Cards:
    """What torch says, by `deadline` of the monotonic clock."""
    left = deadline - time.monotonic()
    if left <= 0:
        return Cards()
    try:
        return replace(parse_library(run_child("torch", "torch", timeout_s=left)), tools=("torch",))
    except HungTool:
        return Cards(problems=(Message("machine.torch-too-slow"),))
    except Silent as silence:
        return Cards(problems=tuple(filter(None, [silence.said])))


def parse_library(text: str) -> Cards:
    """What either process prints; no cards in garbage."""
    tree = find_json(text)
    if not isinstance(tree, dict) or not isinstance(tree.get("cards"), list):
        return Cards()
    is_hip = isinstance(tree.get("hip"), str)
    cards: dict[int, Card] = {}
    for told in tree["cards"]:
        index = card_index(told.get("index")) if isinstance(told, dict) else None
        if index is None:
            continue
        arch = words(told.get("arch")) or ""
        vendor: Vendor = "nvidia" if not is_hip else "hygon" if arch.startswith(_HYGON) else "amd"
        card = read_card(index, vendor, told)
        if isinstance(told.get("processes"), list):
            pairs = [each for each in told["processes"] if isinstance(each, list) and len(each) == 2]
            known = ((process_id(pid), total(held, "B")) for pid, held in pairs)
            processes = (CardProcess(pid=pid, held_bytes=held) for pid, held in known if pid is not None)
            card = replace(card, processes=tuple(processes))
        cards.setdefault(index, card)
    driver = None
    if cards and "driver" in tree:
        raw = tree.get("cuda")
        runtime = f"{raw // 1000}.{raw % 1000 // 10}" if isinstance(raw, int) and 1000 <= raw < 100_000 else None
        driver = Driver(version=words(tree["driver"]), runtime=runtime)
    return Cards(cards=tuple(cards[index] for index in sorted(cards)), driver=driver)
