"""This machine, looked at again and again: its cards, and its RAM.

The makers' tools may take a second to answer, and each answer costs a process or a driver's start. So they are asked
from a thread of their own, and so seldom that asking takes no more than a small share of a core; what is shown
meanwhile is the last answer, with its age.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from tightfit.inputs.machine import free_ram, this_machine
from tightfit.inputs.probes import PATIENCE_S, probe_cards
from tightfit.inputs.probes.amd_smi import amd_smi
from tightfit.inputs.probes.card import Answer, Card, Cards, together
from tightfit.inputs.probes.holders import who_is
from tightfit.inputs.probes.hy_smi import hy_smi
from tightfit.inputs.probes.nvidia import nvidia_smi, nvml
from tightfit.inputs.probes.rocm_smi import rocm_smi
from tightfit.runs.card_stream import CardStream
from tightfit.types import HardwareError

SHARE = 0.012
"""Of one core, that asking for the cards may take."""
SELDOM_S = 30.0
"""However dear it is, it is asked so often."""
NO_CARDS_S = 60.0
"""Where there was none, one may still turn up: a driver that is loaded late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """RAM; None: the system does not say."""

    total_bytes: int | None
    free_bytes: int | None

    @property
    def used_bytes(self) -> int | None:
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsSeen:
    """The cards, and when they looked like that."""

    cards: Cards
    at: float
    """Of the monotonic clock."""


_TOOLS: Mapping[str, Callable[[float], Answer]] = {
    "NVML": nvml,
    "nvidia-smi": nvidia_smi,
    "hy-smi": hy_smi,
    "amd-smi": amd_smi,
    "rocm-smi": rocm_smi,
}


def cards_again(tools: Sequence[str]) -> Cards:
    """What the tools say that showed a card before; the others need not be asked again."""
    deadline = time.monotonic() + PATIENCE_S
    found = together([_TOOLS[tool](deadline) for tool in tools if tool in _TOOLS])
    return replace(found, cards=tuple(_with_people(card) for card in found.cards))


def _with_people(card: Card) -> Card:
    named = []
    for process in card.processes or ():
        user, command = who_is(process.pid)
        named.append(replace(process, user=user, command=command))
    return card if card.processes is None else replace(card, processes=tuple(named))


class MachineEye:
    """Sees the machine. Within the `with` block the cards are looked at from a thread; without, once."""

    def __init__(self, interval_s: float) -> None:
        self._interval = self._wait = interval_s
        self._ram = _ram_bytes()
        self._leave = threading.Event()
        self._stream: CardStream | None = None
        self._seen = self._look(probe_cards)

    def __enter__(self) -> MachineEye:
        threading.Thread(target=self._keep_looking, name="tightfit-cards", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not joined: it may be within a tool that does not answer, and ends with this process.
        self._leave.set()
        if self._stream is not None:
            self._stream.close()

    def cards(self) -> CardsSeen:
        return self._seen

    def host(self) -> Host:
        return Host(total_bytes=self._ram, free_bytes=free_ram())

    def _keep_looking(self) -> None:
        self._keep_reading()
        while not self._leave.wait(self._wait):
            tools = self._seen.cards.tools
            self._seen = self._look(probe_cards if not tools else partial(cards_again, tools))

    def _keep_reading(self) -> None:
        """NVIDIA's tool can repeat its answer by itself, for next to nothing, until it is ended or breaks off."""
        known = self._seen.cards
        self._stream = CardStream.start(known.cards, self._interval)
        if self._stream is None:
            return
        for cards in self._stream.rounds():
            if self._leave.is_set():
                break
            named = tuple(map(_with_people, cards))
            self._seen = CardsSeen(cards=replace(known, cards=named), at=time.monotonic())
        self._stream.close()

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
