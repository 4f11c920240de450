"""One look at everything that `tightfit watch` shows: cards, RAM, the run, and whether all is well."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.probes.card import Card
from tightfit.messages import Message, Said
from tightfit.runs.health import Health, Held, PlannedMemory, Seen, judge_health
from tightfit.runs.lines import duration
from tightfit.runs.machine_eye import Host, MachineEye, oom_kills
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.runs.watching import RunEye, RunSeen

HOST_LOOKS = 240
"""Looks at the RAM that are kept for its trend."""
OTHERS_S = 10.0
"""Between two looks at which runs there are."""
QUIET_S = 300.0
QUIET_STEPS = 20
"""A run is expected to say something within so many steps' time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSeen:
    """A card, and what is known of it beyond this moment."""

    card: Card
    peak_bytes: int | None
    """The most that was held since we look."""
    planned_bytes: int | None
    """What the run's plan wants of it; None: it is not the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    at: float
    """Seconds since the epoch."""
    cards: tuple[CardSeen, ...]
    cards_age_s: float
    host: Host
    run: RunSeen | None
    others: tuple[Reservation, ...]
    """Live runs of this user on this machine."""
    health: Health
    problems: tuple[Said, ...] = ()
    """Why tools that are there show no card."""


class Watcher:
    """Looks again and again; a run is followed from its first event on."""

    def __init__(self, eye: MachineEye, run: Path | None, reservations: Reservations) -> None:
        self._eye, self._reservations = eye, reservations
        self._others: tuple[Reservation, ...] = ()
        self._asked = -OTHERS_S
        self.run = None if run is None else RunEye(run)
        self._peaks: dict[int, int] = {}
        self._host_free: deque[tuple[float, int]] = deque(maxlen=HOST_LOOKS)
        self._kills = oom_kills()

    def look(self) -> Look:
        seen, host = self._eye.cards(), self._eye.host()
        run = None if self.run is None else self.run.look()
        now = time.monotonic()
        if now - self._asked >= OTHERS_S:
            self._others, self._asked = self._reservations.live(), now
        if host.free_bytes is not None:
            self._host_free.append((now, host.free_bytes))
        own = self._own(run, seen.cards.cards)
        cards = tuple(self._card(card, run if card.index in own else None) for card in seen.cards.cards)
        return Look(
            at=time.time(),
            cards=cards,
            cards_age_s=now - seen.at,
            host=host,
            run=run,
            others=self._others,
            health=self._health(cards, own, host, run),
            problems=seen.cards.problems,
        )

    def _card(self, card: Card, run: RunSeen | None) -> CardSeen:
        if card.used_bytes is not None:
            self._peaks[card.index] = max(card.used_bytes, self._peaks.get(card.index, 0))
        planned = None if run is None or run.worker is None else run.worker.required_bytes
        return CardSeen(card=card, peak_bytes=self._peaks.get(card.index), planned_bytes=planned)

    def _own(self, run: RunSeen | None, cards: tuple[Card, ...]) -> frozenset[int]:
        """The cards that the run is on: as it has reserved them, else as its processes sit there."""
        if run is None or run.worker is None or run.worker.vendor == "cpu" or run.ended is not None:
            return frozenset()
        keys = {key for entry in self._others if entry.folder == str(run.folder) for key in entry.gpus}
        pids = {rank.pid for rank in run.ranks}
        return frozenset(
            card.index
            for card in cards
            if keys & {card.uuid, f"{card.vendor}-{card.index}"}
            or any(process.pid in pids for process in card.processes or ())
        )

    def _health(self, cards: tuple[CardSeen, ...], own: frozenset[int], host: Host, run: RunSeen | None) -> Health:
        ram = Held(name=Message("runs.host-ram"), used_bytes=host.used_bytes, total_bytes=host.total_bytes)
        held = {
            each.card.index: Held(
                name=f"GPU {each.card.index}", used_bytes=each.card.used_bytes, total_bytes=each.card.total_bytes
            )
            for each in cards
        }
        planned = None if run is None else run.planned
        on_cpu = not held or (planned is not None and not planned.on_gpu)
        oom, is_last = self._oom(run)
        found = judge_health(
            Seen(
                memories=(ram,) if on_cpu else tuple(held.values()),
                host=ram,
                host_free=tuple(self._host_free),
                has_run=run is not None,
                steps=() if run is None else run.steps,
                planned=planned,
                own=tuple(held[index] for index in sorted(own)),
                oom=oom,
                oom_is_last=is_last,
            )
        )
        if run is None or run.ended is not None:
            # Of what is over nothing is to be feared any more; of a machine only what its memories hold is said.
            return found if run is None else Health(lights=found.lights, warnings=())
        quiet = _quiet(run)
        return found if quiet is None else Health(lights=found.lights, warnings=(*found.warnings, quiet))

    def _oom(self, run: RunSeen | None) -> tuple[Said | None, bool]:
        if run is not None and run.oom is not None:
            return run.oom, run.oom_is_last or (run.ended is not None and not run.well)
        now = oom_kills()
        if now is not None and self._kills is not None and now > self._kills:
            return Message("runs.kernel-killed"), True
        return None, False


def _quiet(run: RunSeen) -> Message | None:
    if run.quiet_s is None or run.step is None:
        return None
    usual = max(QUIET_S, QUIET_STEPS * (run.step.step_s or 0.0))
    if run.quiet_s < usual:
        return None
    return Message("runs.nothing-heard", time=duration(run.quiet_s), step=duration(run.step.step_s or 0))


def planned_rank_bytes(planned: PlannedMemory | None, run: RunSeen) -> int | None:
    """What a rank on the CPU is planned to hold of host RAM."""
    if planned is None or planned.on_gpu or run.worker is None:
        return None
    return run.worker.ram_bytes_per_node // max(1, run.worker.gpus_per_node)
