"""A run as somebody sees it who did not start it: its folder is read, and nothing is written or held.

Whether the run lives is told by its record and the process in it, never by trying its lock, which a run that starts at
that moment would find taken. A number that was given out again is told by when its process began. Of a run on another
machine only the files are known, and they are believed.

One look at everything that `tightfit watch` shows: cards, RAM, the run, and whether all is well.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.probes.card import Card
from tightfit.inputs.records import find_record
from tightfit.messages import Message, Said
from tightfit.runs import events, records
from tightfit.runs.events import Event, Failed, Follower, Progress, Step, Tally
from tightfit.runs.health import OOM_KINDS, Health, Held, Seen, judge_health
from tightfit.runs.lines import duration, line_of
from tightfit.runs.machine_eye import Host, MachineEye, oom_kills
from tightfit.runs.processes import PROC, every_pid, stat_of, this_host
from tightfit.runs.rank_memory import Rank, find_ranks, read_rank
from tightfit.runs.records import AttemptRecord, RunFolder, RunRecord, WorkerFile, find_worker_file, read_run
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.types import ConfigError

LOSSES = 4096
STEPS = 512
LINES = 200  # what is kept of a run's past
AGAIN_S = 10.0  # between two searches for the processes of the ranks
_LOG = re.compile(r"(rank-\d+|launcher)\.log")


def find_damaged(run: Path) -> tuple[Path, ...]:
    """The records of a run that are there and cannot be read: whoever passes them over names them."""
    folder = RunFolder(run)
    found = [folder.record] if folder.record.exists() and read_run(run) is None else []
    plan = folder.plan / WORKER_FILE
    if plan.exists() and find_worker_file(folder.plan) is None:
        found.append(plan)
    return (*found, *(path for path in records.attempt_paths(run) if find_record(path, AttemptRecord) is None))


class RankProcess(NamedTuple):
    """A process whose output goes to a rank's log: the rank, or something that it has started."""

    pid: int
    name: str  # `rank-3`, as its log is called
    leads: bool  # whether it is the rank itself


def processes_of(run: Path) -> tuple[RankProcess, ...]:
    """Of this user and this machine. Only `tightfit train` sends what a process prints to a run's logs, which make way
    within the run's folder for those of a later attempt."""
    inside = os.path.realpath(run) + os.sep
    found = []
    for pid in every_pid():
        with suppress(OSError):  # another user's, or gone
            output = os.readlink(PROC / str(pid) / "fd/1").removesuffix(" (deleted)")
            if output.startswith(inside) and _LOG.fullmatch(os.path.basename(output)):
                stat = stat_of(pid)
                if stat is not None and not stat.has_ended:
                    found.append(RankProcess(pid=pid, name=Path(output).stem, leads=stat.group == pid))
    return tuple(sorted(found, key=lambda each: (each.name, not each.leads, each.pid)))


class RankEye:
    """Knows the ranks of a run, on all its nodes. Searching all processes is dear, so it is done seldom."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: tuple[RankProcess, ...] = ()
        self._searched = -AGAIN_S

    def look(self) -> tuple[Rank, ...]:
        ranks = self._read()
        now = time.monotonic()
        if now - self._searched >= (1.0 if not ranks else AGAIN_S) or len(ranks) < len(self._known):
            self._searched = now
            self._known = tuple(each for each in processes_of(self._run) if each.leads)
            ranks = self._read()
        here = {rank.name for rank in ranks}
        others = (replace(rank, host=rank.host if rank.host != this_host() else None) for rank in find_ranks(self._run))
        found = (*ranks, *(rank for rank in others if rank.name not in here))
        return tuple(
            sorted(found, key=lambda rank: int(rank.name.rpartition("-")[2] if rank.name[-1].isdigit() else 0))
        )

    def forget(self) -> None:
        """Others are about to be started."""
        self._searched = -AGAIN_S

    def _read(self) -> tuple[Rank, ...]:
        found = (read_rank(known.name, known.pid) for known in self._known)
        return tuple(rank for rank in found if rank is not None)


def check_run(path: Path) -> Path:
    """The run's folder that is meant, or why it is none."""
    place = path.expanduser().absolute()
    if not place.exists():
        raise ConfigError(Message("runs.nothing-at", path=path))
    if not place.is_dir():
        raise ConfigError(Message("runs.is-a-file", path=path))
    if not os.access(place, os.R_OK | os.X_OK):
        raise ConfigError(Message("runs.may-not-be-read", path=path))
    here = RunFolder(place)
    parts = (here.record, here.events, here.plan / WORKER_FILE, place / records.ATTEMPTS)
    if not any(part.exists() for part in parts):
        raise ConfigError(Message("runs.no-runs-folder", path=path))
    return place


class RunEye:
    """Follows one run from its first event on: the run as it was at the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._follower = Follower(RunFolder(folder).events, start=0)
        self._rank_eye = RankEye(folder)
        self._tally = Tally()
        self._damaged: tuple[Path, ...] | None = None  # None: nobody has looked yet
        self._marks: dict[Path, int] = {}
        self._lines: deque[tuple[Said, str]] = deque(maxlen=LINES)
        self.worker: WorkerFile | None = None  # None: its plan cannot be read
        self.record: RunRecord | None = None
        self.attempts: tuple[AttemptRecord, ...] = ()
        self.doing: Progress | None = None  # long work before the first step; None: it is not about that
        self.losses: deque[float] = deque(maxlen=LOSSES)
        self.steps: deque[Step] = deque(maxlen=STEPS)  # of this start
        self.ranks: tuple[Rank, ...] = ()
        self.lines: tuple[tuple[Said, str], ...] = ()  # what has happened, and how it looks; the newest last
        self.oom: Said | None = None
        self.oom_is_last = False
        self.ended: Message | None = None  # how, in a few words; None: it goes on
        self.well = True  # whether it ended as it should, or goes on
        self.quiet_s: float | None = None  # since the last event; None: there was none
        self.fresh: list[Event] = []  # what came with the last look

    @property
    def step(self) -> Step | None:
        return self._tally.last

    @property
    def peak_bytes(self) -> int | None:
        return self._tally.peak_bytes

    def _has_changed(self, path: Path) -> bool:
        """Since the last look, or it is the first one."""
        mark = 0
        with suppress(OSError):  # it is not there
            mark = path.stat().st_mtime_ns
        before, self._marks[path] = self._marks.get(path), mark
        return mark != before

    def look(self) -> RunEye:
        run = RunFolder(self.folder)
        if self._has_changed(run.record):
            self.record = read_run(self.folder)
        lives = None if self.record is None else self.record.lives
        self.fresh = self._follower.poll() if lives is not False else self._follower.rest()
        for event in self.fresh:
            self._add(event)
        if self._has_changed(self.folder / records.ATTEMPTS):
            self.attempts = records.read_attempts(self.folder)
            # a rank that ran out of memory may have had no last words; whoever judged its end knows
            causes = [each.cause for each in self.attempts if each.cause is not None and each.cause.kind in OOM_KINDS]
            if causes:
                self.oom, self.oom_is_last = causes[-1].sentence, self.attempts[-1].cause is causes[-1]
        self.ended, self.well = self._ending(self.record, lives)
        if self._has_changed(run.plan / WORKER_FILE):  # another attempt may have another plan
            self.worker = find_worker_file(run.plan)
        self.quiet_s = None
        with suppress(OSError):
            self.quiet_s = max(0.0, time.time() - run.events.stat().st_mtime)
        if self.record is None or self.worker is None or self._damaged != ():
            self._damaged = find_damaged(self.folder)
        self.ranks = () if self.ended is not None else self._rank_eye.look()
        self.lines = (*((Message("runs.damaged", path=path), "yellow") for path in self._damaged or ()), *self._lines)
        return self

    def _add(self, event: Event) -> None:
        self._tally.add(event)
        if isinstance(event, Step):
            self.doing, self.oom_is_last = None, False
            self.steps.append(event)
            if event.loss is not None and not event.skipped and event.loss - event.loss == 0:  # a finite number
                self.losses.append(event.loss)
        elif isinstance(event, Progress):
            self.doing = event
        elif isinstance(event, events.Started | events.AttemptBegan | events.Resumed):
            # Other processes, which hold what they hold from the beginning.
            self.steps.clear()
            self._rank_eye.forget()
            self.doing = self._tally.ended = None
        elif isinstance(event, Failed | events.AttemptFailed) and event.kind in OOM_KINDS:
            self.oom, self.oom_is_last = event.text, True
        if not isinstance(event, Step | Progress) and (line := line_of(event))[0]:
            self._lines.append(line)

    def _ending(self, record: RunRecord | None, lives: bool | None) -> tuple[Message | None, bool]:
        """How it ended, and whether that is well."""
        if record is None:  # a worker that another launcher started, or another trainer, whose record comes at its end
            if self._tally.ended is not None:
                return Message("runs.it-ended", how=self._tally.ended.reason), True
            last = self.attempts[-1] if self.attempts else None
            if last is not None and last.ended is not None and (last.next is None or last.next.action == "stop"):
                return Message("runs.last-attempt-ended", how=last.state), last.state in ("done", "stopped")
            return None, True
        if lives is not False:
            return None, True
        at = Message("runs.before-its-first-step")
        if self._tally.last is not None:
            at = Message("runs.after-step", step=self._tally.last.step)
        if record.state == "running":
            return Message("runs.gone-silently", pid=record.pid, at=at), False
        how = {
            "done": Message("runs.is-done"),
            "stopped": Message("runs.was-stopped"),
            "failed": Message("runs.it-failed"),
        }.get(record.state, Message("runs.it-ended", how=record.state))
        code = "" if record.exit_code in (None, 0) else Message("runs.with-exit-code", code=record.exit_code)
        return Message("runs.ended", how=how, at=at, code=code), record.state in ("done", "stopped")


HOST_LOOKS = 240  # looks at the RAM that are kept for its trend
OTHERS_S = 10.0  # between two looks at which runs there are
QUIET_S = 300.0
QUIET_STEPS = 20  # a run is expected to say something within so many steps' time


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSeen:
    card: Card
    peak_bytes: int | None  # the most that was held since we look
    planned_bytes: int | None  # what the run's plan wants of it; None: it is not the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    at: float  # seconds since the epoch
    cards: tuple[CardSeen, ...]
    cards_age_s: float
    host: Host
    run: RunEye | None
    others: tuple[Reservation, ...]  # live runs of this user on this machine
    health: Health
    problems: tuple[Said, ...] = ()  # why tools that are there show no card


def hold(card: Card, pids: Collection[int]) -> Held:
    """`pids`: the processes of the run that is looked at."""
    return Held(
        name=f"GPU {card.index}",
        used_bytes=card.used_bytes,
        total_bytes=card.total_bytes,
        use_percent=card.use_percent,
        others=sum(process.pid not in pids for process in card.processes or ()),
    )


class Watcher:
    """Looks again and again; a run is followed from its first event on."""

    def __init__(self, eye: MachineEye, run: Path | None, reservations: Reservations) -> None:
        self._eye, self._reservations = eye, reservations
        self._others, self._asked = tuple[Reservation, ...](), -OTHERS_S
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
        own = frozenset[int]()  # the cards that the run is on: as it has reserved them, else as its processes sit there
        if run is not None and run.worker is not None and run.worker.vendor != "cpu" and run.ended is None:
            keys = {key for entry in self._others if entry.folder == str(run.folder) for key in entry.gpus}
            pids = {rank.pid for rank in run.ranks}
            own = frozenset(
                card.index
                for card in seen.cards.cards
                if keys & {card.uuid, f"{card.vendor}-{card.index}"}
                or any(process.pid in pids for process in card.processes or ())
            )
        cards = []
        for card in seen.cards.cards:
            if card.used_bytes is not None:
                self._peaks[card.index] = max(card.used_bytes, self._peaks.get(card.index, 0))
            worker = run.worker if run is not None and card.index in own else None
            planned = None if worker is None else worker.required_bytes
            cards.append(CardSeen(card=card, peak_bytes=self._peaks.get(card.index), planned_bytes=planned))
        return Look(
            at=time.time(),
            cards=tuple(cards),
            cards_age_s=now - seen.at,
            host=host,
            run=run,
            others=self._others,
            health=self._health(cards, own, host, run),
            problems=seen.cards.problems,
        )

    def _health(self, cards: Sequence[CardSeen], own: frozenset[int], host: Host, run: RunEye | None) -> Health:
        ram = Held(name=Message("runs.host-ram"), used_bytes=host.used_bytes, total_bytes=host.total_bytes)
        pids = set() if run is None else {rank.pid for rank in run.ranks}
        held = {card.index: hold(card, pids) for card in (each.card for each in cards)}
        worker = None if run is None else run.worker
        on_cpu = not held or (worker is not None and worker.vendor == "cpu")
        oom, is_last, kills = None, False, oom_kills()
        if run is not None and run.oom is not None:
            oom, is_last = run.oom, run.oom_is_last or (run.ended is not None and not run.well)
        elif kills is not None and self._kills is not None and kills > self._kills:
            oom, is_last = Message("runs.kernel-killed"), True
        found = judge_health(
            Seen(
                memories=(ram,) if on_cpu else tuple(held.values()),
                host=ram,
                host_free=tuple(self._host_free),
                has_run=run is not None,
                steps=() if run is None else tuple(run.steps),
                worker=worker,
                own=tuple(held[index] for index in sorted(own)),
                oom=oom,
                oom_is_last=is_last,
                is_unexplained=run is not None and not run.well and not any(each.cause for each in run.attempts[-1:]),
                load_per_core=host.load_per_core,
            )
        )
        if run is not None and run.ended is not None:
            return replace(found, warnings=())  # of what is over nothing is to be feared any more
        if run is None or run.step is None or run.quiet_s is None:
            return found
        step_s = run.step.step_s or 0.0
        if run.quiet_s < max(QUIET_S, QUIET_STEPS * step_s):
            return found
        quiet = Message("runs.nothing-heard", time=duration(run.quiet_s), step=duration(step_s))
        return replace(found, warnings=(*found.warnings, quiet))
