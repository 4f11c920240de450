"""`nvidia-smi` that repeats its answer by itself.

Starting the tool anew costs a tenth of a second of a core, most of it the driver's start; repeating costs next to
nothing. Who is on the cards it tells only when asked anew, so that is done seldom.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tightfit.hardware.probes.card import Card, CardProcess
from tightfit.hardware.probes.nvidia import parse_cards, processes, repeating
from tightfit.hardware.probes.tools import TIMEOUT_S, Silent

PROCESSES_S = 15.0
"""Between two questions for the processes."""
SILENCE_S = 5.0
"""A tool that keeps its lines to itself for longer, beyond what it was asked to wait, is no use."""


class CardStream:
    """From `start` to `close`."""

    def __init__(self, process: subprocess.Popen[bytes], cards: Sequence[Card], interval_s: float) -> None:
        self._process, self._count = process, len(cards)
        self._people = {card.uuid: card.processes for card in cards}
        self._asked = time.monotonic()
        self._silence_s = SILENCE_S + 3 * interval_s

    @classmethod
    def start(cls, cards: Sequence[Card], interval_s: float) -> CardStream | None:
        """None: not all of these cards are NVIDIA's, or its tool is not there."""
        command = repeating(interval_s)
        if command is None or not cards or any(card.vendor != "nvidia" or card.uuid is None for card in cards):
            return None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            return None
        return cls(process, cards, interval_s)

    def rounds(self) -> Iterator[tuple[Card, ...]]:
        """All cards, again and again; it ends when the tool does, falls silent, or no longer shows every card."""
        found: dict[int, Card] = {}
        for line in self._lines():
            for card in parse_cards(line)[0]:
                if card.index in found:
                    return
                found[card.index] = card
            if len(found) == self._count:
                yield tuple(self._with_people(found[index]) for index in sorted(found))
                found = {}

    def _lines(self) -> Iterator[str]:
        output, torn = self._process.stdout, b""
        assert output is not None
        with suppress(OSError, ValueError):  # closed from elsewhere
            while select.select([output], [], [], self._silence_s)[0] and (data := os.read(output.fileno(), 65536)):
                *lines, torn = (torn + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)

    def close(self) -> None:
        """May be called twice, and from any thread."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            with suppress(OSError):
                self._process.stdout.close()

    def _with_people(self, card: Card) -> Card:
        now = time.monotonic()
        if now - self._asked >= PROCESSES_S:
            self._asked = now
            with suppress(Silent):
                self._people = _people(self._people)
        return replace(card, processes=self._people.get(card.uuid))


def _people(
    known: dict[str | None, tuple[CardProcess, ...] | None],
) -> dict[str | None, tuple[CardProcess, ...] | None]:
    apps = processes(time.monotonic() + TIMEOUT_S)
    return {uuid: tuple(process for own, process in apps if own == uuid) for uuid in known}
