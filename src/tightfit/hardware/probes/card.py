"""A card as the makers' tools show it, and how several tools' answers become one list.

What a tool does not report stays None. It is never zero: a card whose memory nobody can read is not an empty card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tightfit.hardware.probes.readings import celsius, pci_address, percent, size, watts, words
from tightfit.messages import Message
from tightfit.types import Vendor

_SIZES = ("total_bytes", "used_bytes", "free_bytes")
_READ = {
    "name": words,
    "pci": pci_address,
    "uuid": words,
    "memory_percent": percent,
    "use_percent": percent,
    "temperature_c": celsius,
    "power_w": watts,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process that holds memory of a card. None: not told."""

    pid: int
    held_bytes: int | None = None
    user: str | None = None
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card. None: nobody says."""

    index: int  # as the tool counts
    vendor: Vendor
    name: str | None = None
    pci: str | None = None  # `0000:09:00.0`: the one name that every tool agrees on
    uuid: str | None = None
    arch: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    memory_percent: float | None = None  # how full it is, where a tool says no more than that
    use_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    processes: tuple[CardProcess, ...] | None = None  # None: nobody says; empty: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the cards are driven by."""

    version: str | None = None
    runtime: str | None = None  # the newest CUDA that the driver can run


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What a tool says, or all tools together."""

    cards: tuple[Card, ...] = ()
    unplaced: tuple[CardProcess, ...] = ()  # processes on some card, nobody says which
    driver: Driver | None = None
    tools: tuple[str, ...] = ()  # who was asked; of several, who showed a card
    problems: tuple[Message, ...] = ()  # why a tool that is installed shows no card
    hung: bool = False  # it did not answer in time, and whoever asks the same driver may not either


def read_card(index: int, vendor: Vendor, told: Mapping[str, object], unit: str = "B") -> Card:
    """A card of what a tool says, by the names of its fields; `unit`: of sizes that come without one."""
    known: dict[str, Any] = {name: read(told.get(name)) for name, read in _READ.items()}
    known |= {name: size(told.get(name), unit) for name in _SIZES}
    known["total_bytes"] = known["total_bytes"] or None  # no memory at all: nobody knows
    arch = re.match("sm_[0-9]{2,3}|gfx[0-9a-f]{3,5}", words(told.get("arch")) or "")
    return complete_sizes(Card(index=index, vendor=vendor, arch=arch[0] if arch else None, **known))


def complete_sizes(card: Card) -> Card:
    """A card whose sizes agree: what follows is filled in, and what contradicts itself is unknown.

    NVIDIA's drivers reserve some memory that is neither used nor free, so that nothing follows there.
    """
    total, used, free = card.total_bytes, card.used_bytes, card.free_bytes
    if total is None:
        return card
    used = None if used is not None and used > total else used
    free = None if free is not None and free > total else free
    if card.vendor != "nvidia" and used is None and free is not None:
        used = total - free
    elif card.vendor != "nvidia" and free is None and used is not None:
        free = total - used
    return replace(card, used_bytes=used, free_bytes=free)


def together(answers: Iterable[Cards]) -> Cards:
    """One list of all answers, those given first believed first.

    Tools of one maker list the same cards: a card is known by its PCI address, and what an earlier tool left open is
    taken from a later one. Without an address nobody can tell, and the earlier list stands alone.
    """
    found: list[Card] = []
    answers = list(answers)
    for answer in answers:
        # AMD's and Hygon's tools list each other's cards.
        sides = {card.vendor == "nvidia" for card in answer.cards}
        family = [card for card in found if (card.vendor == "nvidia") in sides]
        if family and any(card.pci is None for card in (*family, *answer.cards)):
            continue
        known = {card.pci: place for place, card in enumerate(found) if card.pci is not None}
        for card in answer.cards:
            place = known.get(card.pci) if card.pci is not None else None
            if place is None:
                found.append(card)
                continue
            # Sizes go together: a used amount of one moment and a free one of another would not add up.
            first = found[place]
            settled = _SIZES if first.total_bytes is not None and first.used_bytes is not None else ()
            open_fields = [each.name for each in fields(Card) if getattr(first, each.name) is None]
            more = {name: getattr(card, name) for name in open_fields if name not in settled}
            found[place] = complete_sizes(replace(first, **more))
    showing = [answer for answer in answers if answer.cards]
    placed = {process.pid for card in found for process in card.processes or ()}
    loose = {process.pid: process for answer in reversed(showing) for process in answer.unplaced}
    return Cards(
        cards=tuple(found),
        unplaced=tuple(process for pid, process in sorted(loose.items()) if pid not in placed),
        driver=next((answer.driver for answer in answers if answer.driver is not None), None),
        tools=tuple(dict.fromkeys(tool for answer in showing for tool in answer.tools)),
        problems=tuple(dict.fromkeys(problem for answer in answers for problem in answer.problems)),
    )
