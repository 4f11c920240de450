"""This machine, looked at again and again: its cards, and its RAM.

The makers' tools may take a second to answer, and each answer costs a process or a driver's start. So they are asked
from a thread of their own, and so seldom that asking takes no more than a small share of a core; what is shown
meanwhile is the last answer, with its age. `nvidia-smi` can repeat its answer by itself for next to nothing, while
starting it anew costs a tenth of a second of a core. Who is on the cards it tells only when asked anew: seldom.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tightfit.hardware.machine import free_ram, this_machine
from tightfit.hardware.probes import PATIENCE_S, TOOLS, ask_tool, probe_cards, with_people
from tightfit.hardware.probes.card import Card, Cards, together
from tightfit.hardware.probes.nvidia import parse_cards, processes, repeating
from tightfit.hardware.probes.tools import TIMEOUT_S, Silent
from tightfit.types import HardwareError

PROCESSES_S = 15.0  # between two questions for the processes
SILENCE_S = 5.0  # a tool that keeps its lines to itself for longer, beyond what it was asked to wait, is no use


class CardStream:
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
                if time.monotonic() - self._asked >= PROCESSES_S:
                    self._asked = time.monotonic()
                    with suppress(Silent):
                        apps = processes(time.monotonic() + TIMEOUT_S)
                        self._people = {uuid: tuple(one for own, one in apps if own == uuid) for uuid in self._people}
                cards = (found[index] for index in sorted(found))
                yield tuple(replace(card, processes=self._people.get(card.uuid)) for card in cards)
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


SHARE = 0.012  # of one core, that asking for the cards may take
LEAST_TICKS = 10  # of the kernel's, over all cores, between two looks at how busy they are: fewer say nothing
SELDOM_S = 30.0  # however dear it is, it is asked so often
NO_CARDS_S = 60.0  # where there was none, one may still turn up: a driver that is loaded late


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """RAM and CPU; None: the system does not say."""

    total_bytes: int | None
    free_bytes: int | None
    cpu_percent: float | None = None  # of all cores, how much was busy since the look before
    load: float | None = None  # processes that run or wait for a core, in the mean of the last minute
    cores: int | None = None

    @property
    def load_per_core(self) -> float | None:
        return None if self.load is None or not self.cores else self.load / self.cores

    @property
    def used_bytes(self) -> int | None:
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsSeen:
    cards: Cards
    at: float  # of the monotonic clock


def cards_again(tools: Sequence[str]) -> Cards:
    """What the tools say that showed a card before; the others need not be asked again."""
    deadline = time.monotonic() + PATIENCE_S
    found = together([ask_tool(tool, deadline) for tool in tools if tool in TOOLS])
    return replace(found, cards=tuple(map(with_people, found.cards)))


class MachineEye:
    """Sees the machine. Within the `with` block the cards are looked at from a thread; without, once."""

    def __init__(self, interval_s: float) -> None:
        self._interval = self._wait = interval_s
        self._ram = _ram_bytes()
        self._leave = threading.Event()
        self._stream: CardStream | None = None
        self._cpu = _cpu_ticks()
        self._cpu_percent: float | None = None
        self._seen = self._look(probe_cards)

    def __enter__(self) -> MachineEye:
        threading.Thread(target=self._keep_looking, name="tightfit-cards", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined: it may be within a tool that does not answer, and ends with this process.
        self._leave.set()
        if self._stream is not None:
            self._stream.close()

    def cards(self) -> CardsSeen:
        return self._seen

    def host(self) -> Host:
        now = _cpu_ticks()
        if now is not None and self._cpu is not None and now[0] - self._cpu[0] >= LEAST_TICKS:
            idle = (now[1] - self._cpu[1]) / (now[0] - self._cpu[0])
            self._cpu, self._cpu_percent = now, 100 * min(1.0, max(0.0, 1 - idle))
        load = None
        with suppress(OSError, AttributeError):
            load = os.getloadavg()[0]
        return Host(
            total_bytes=self._ram,
            free_bytes=free_ram(),
            cpu_percent=self._cpu_percent,
            load=load,
            cores=os.cpu_count(),
        )

    def _keep_looking(self) -> None:
        # NVIDIA's tool can repeat its answer by itself, until it is ended or breaks off.
        known = self._seen.cards
        self._stream = CardStream.start(known.cards, self._interval)
        if self._stream is not None:
            for cards in self._stream.rounds():
                if self._leave.is_set():
                    break
                named = tuple(map(with_people, cards))
                self._seen = CardsSeen(cards=replace(known, cards=named), at=time.monotonic())
            self._stream.close()
        while not self._leave.wait(self._wait):
            tools = self._seen.cards.tools
            self._seen = self._look(probe_cards if not tools else partial(cards_again, tools))

    def _look(self, ask: Callable[[], Cards]) -> CardsSeen:
        before = _spent_s()
        found = ask()
        spent = _spent_s() - before
        self._wait = NO_CARDS_S if not found.cards else max(self._interval, min(SELDOM_S, spent / SHARE))
        return CardsSeen(cards=found, at=time.monotonic())


def _spent_s() -> float:
    """Processor time of this thread, and of the tools that were run."""
    children = os.times()
    return time.thread_time() + children.children_user + children.children_system


def _cpu_ticks() -> tuple[int, int] | None:
    """Since the machine was started, over all cores: in all, and idle."""
    with suppress(OSError, ValueError, IndexError):
        # user nice system idle iowait irq softirq steal; what guests take is counted in user already
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]
    return None


def _ram_bytes() -> int | None:
    with suppress(HardwareError):
        found = this_machine().host_ram_bytes
        if found is not None:
            return found
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def oom_kills() -> int | None:
    """How often the kernel has ended a process for want of memory since it booted; None: it does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
