"""A run as the page shows it: everything but its curve, in sections that are sent when they change.

The same readers as those of `tightfit watch` are used where they are quick on a run of any length. What a section holds
is plain values, ready to be written as JSON: bytes, seconds, and words of the run's own. The page's own words for a
state come from the language that a reader has chosen.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tightfit.diagnose.masks import masked
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.messages import Message
from tightfit.runs import records
from tightfit.runs.checkpoints import CHECKPOINTS, Torn, checked, newest_first, step_of
from tightfit.runs.health import OOM_KINDS, Held, Seen, judge_health
from tightfit.runs.lines import action_words, duration
from tightfit.runs.machine_eye import Host, MachineEye
from tightfit.runs.processes import this_host
from tightfit.runs.rank_memory import Rank, name_rank
from tightfit.runs.watching import RankEye, hold
from tightfit.web.history import History
from tightfit.web.places import file_at

MOST_CHECKPOINTS, MOST_ATTEMPTS, MOST_LOGS = 40, 100, 64
QUIET_S = 60.0
Section = dict[str, Any]
Attempts = tuple[records.AttemptRecord, ...]


def state_of(record: records.RunRecord | None, history_ended: bool, attempts: Attempts) -> str:
    """A key of `states` in the words."""
    if record is None:
        if history_ended:
            return "done"
        last = attempts[-1] if attempts else None
        return last.state if last is not None and last.ended is not None else "unknown"
    if record.state == "running":
        return {True: "running", False: "gone", None: "elsewhere"}[record.lives]
    return record.state if record.state in ("done", "stopped", "failed", "interrupted") else "ended"


class RunSight:
    """Looks at one run's folder again and again. Nothing is written there, and nothing held."""

    def __init__(self, run: Path) -> None:
        self.run, self._folder = run, records.RunFolder(run)
        self.history = History(self._folder.events)
        self._ranks = RankEye(run)
        self._peaks: dict[int, int] = {}
        self._kept: dict[str, tuple[object, Any]] = {}  # what was read before, and the mark by which it is so still

    def look(self, eye: MachineEye | None) -> dict[str, Section | list[Section]]:
        """All sections. OSError: the folder cannot be read at all, now."""
        os.stat(self.run / ".")
        record = records.read_run(self.run)
        attempts: Attempts = self._unless_same(
            "attempts", _marks(self.run / records.ATTEMPTS), lambda: records.read_attempts(self.run)[-MOST_ATTEMPTS:]
        )
        state = state_of(record, self.history.ended is not None, attempts)
        plan = self._folder.plan
        worker: records.WorkerFile | None = self._unless_same(
            "plan", _marks(plan / WORKER_FILE), lambda: records.find_worker_file(plan)
        )
        is_here = state == "running"
        ranks = self._ranks.look() if state in ("running", "elsewhere") else ()
        memory, cards = self._memory(worker, ranks, eye if is_here else None, goes_on=state in ("running", "elsewhere"))
        host = None if eye is None or not is_here else eye.host()
        if host is not None:
            memory["host"] = {"used": host.used_bytes, "total": host.total_bytes}
        logs: list[Section] = []
        found: list[str] = []
        with suppress(OSError):
            found = sorted(path.name for path in (self.run / "logs").glob("*.log"))[:MOST_LOGS]
        for name in (*(f"logs/{name}" for name in found), "command.log"):
            with suppress(OSError):
                if path := file_at(self.run, name):
                    logs.append({"name": name, "bytes": path.stat().st_size})
        return {
            "head": self._head(state, record, worker, attempts),
            "memory": memory,
            "lights": self._lights(state, worker, cards, host, attempts),
            "attempts": [_show_attempt(each) for each in attempts],
            "checkpoints": self._unless_same("checkpoints", _marks(self.run / CHECKPOINTS), self._checkpoints),
            "events": list(self.history.said),
            "marks": list(self.history.marks),
            "evaluations": [{"step": step, "loss": loss} for step, loss in self.history.evaluations.items()],
            "logs": logs,
        }

    def _unless_same(self, name: str, mark: object, read: Any) -> Any:
        if name not in self._kept or self._kept[name][0] != mark:
            self._kept[name] = mark, read()
        return self._kept[name][1]

    def _head(
        self, state: str, record: records.RunRecord | None, worker: records.WorkerFile | None, attempts: Attempts
    ) -> Section:
        history = self.history
        steps = history.steps()
        last = steps[-1] if steps else None
        goes_on = state in ("running", "elsewhere")
        doing = quiet = None
        if goes_on and history.doing is not None:
            done, total = history.doing.done, history.doing.total
            share = min(1.0, done / total) if total and total > 1 and done is not None else None
            doing = {"what": history.doing.what, "share": share}
        if goes_on:
            with suppress(OSError):
                quiet_s = time.time() - self._folder.events.stat().st_mtime
                quiet = duration(quiet_s // 30 * 30) if quiet_s >= QUIET_S else None
        return {
            "state": state,
            "step": None if last is None else last.step,
            "steps": None if last is None else last.steps,
            "loss": None if last is None or last.loss is None or not math.isfinite(last.loss) else last.loss,
            "has_step": last is not None,
            "tokens_per_s": None if last is None else last.tokens_per_s,
            "planned_tokens_per_s": None if worker is None else worker.tokens_per_s,
            "left": None if last is None or last.seconds_left is None or not goes_on else duration(last.seconds_left),
            "doing": doing,
            "quiet": quiet,
            "model": None if worker is None else worker.model,
            "how": None if worker is None else f"{worker.method}, {worker.engine}",
            "ranks": None if worker is None else worker.ranks,
            "attempt": attempts[-1].number if attempts else None,
            "host": None if record is None or record.host == this_host() else record.host,
            "started": None if record is None or record.started is None else record.started.timestamp(),
            "ended": None if record is None or record.ended is None else record.ended.timestamp(),
            "exit_code": None if record is None else record.exit_code,
            "command": None if record is None else masked(" ".join(record.command))[:2000],
        }

    def _memory(
        self, worker: records.WorkerFile | None, ranks: tuple[Rank, ...], eye: MachineEye | None, *, goes_on: bool
    ) -> tuple[Section, tuple[Held, ...]]:
        """And the cards that the run is on."""
        on_gpu = worker is not None and worker.vendor != "cpu"
        card_bytes = None if worker is None else worker.gpu_memory_bytes
        total = card_bytes or self.history.limit_bytes
        planned = None
        if worker is not None:
            planned = worker.peak_bytes if on_gpu else worker.ram_bytes_per_rank
        rows: list[Section] = []
        cards: list[Held] = []
        if worker is not None and on_gpu and eye is not None:
            # The cards that the run's processes sit on; the most of each is what was seen since somebody looks.
            pids, peaks = {rank.pid for rank in ranks}, self._peaks
            for card in eye.cards().cards.cards:
                if any(process.pid in pids for process in card.processes or ()):
                    if card.used_bytes is not None:
                        peaks[card.index] = max(card.used_bytes, peaks.get(card.index, 0))
                    name, now, peak = f"GPU {card.index}", card.used_bytes, peaks.get(card.index)
                    rows.append(_draw_held(name, now, peak, worker.required_bytes, card.total_bytes))
                    cards.append(hold(card, pids))
        elif worker is not None and not on_gpu:
            held = [(name_rank(rank), rank.now_bytes, rank.peak_bytes) for rank in ranks]
            rows = [_draw_held(*each, planned, total) for each in held]
        steps = self.history.steps()
        if not rows and steps:  # what the run itself has said
            last = steps[-1]
            if last.peak_bytes is not None:
                now, peak = last.now_bytes, max(step.peak_bytes or 0 for step in steps)
            else:
                now, peak = last.host_bytes, max(step.host_bytes or 0 for step in steps)
            rows = [_draw_held("rank 0", now, peak or None, planned, total)]
            held_bytes = now if goes_on else peak or now  # of what is over the most counts
            cards = [Held(name="rank 0", used_bytes=held_bytes, total_bytes=total)] if on_gpu else []
        phases = [
            {"name": name, "planned": held, "measured": self.history.milestones.get(name)}
            for name, held in self.history.phases.items()
            if on_gpu  # of the CPU a plan knows the tensors alone, and a process holds more
        ]
        drawn = {"rows": rows, "planned": planned, "card": total, "host": None, "phases": phases}
        return {**drawn, "on_gpu": on_gpu}, tuple(cards)

    def _lights(
        self,
        state: str,
        worker: records.WorkerFile | None,
        cards: tuple[Held, ...],
        host: Host | None,
        attempts: Attempts,
    ) -> Section:
        """As `tightfit watch` judges."""
        used, total = (None, None) if host is None else (host.used_bytes, host.total_bytes)
        ram = Held(name=Message("runs.host-ram"), used_bytes=used, total_bytes=total)
        causes = [each.cause for each in attempts if each.cause is not None and each.cause.kind in OOM_KINDS]
        found = judge_health(
            Seen(
                memories=cards or (ram,),
                host=ram,
                has_run=True,
                steps=self.history.steps(),
                worker=worker,
                own=cards,
                oom=causes[-1].sentence if causes else None,
                is_unexplained=state in ("failed", "gone") and (not attempts or attempts[-1].cause is None),
                oom_is_last=bool(causes) and attempts[-1].cause is causes[-1],
                load_per_core=None if host is None else host.load_per_core,
            )
        )
        pace = found.pace
        warnings = list(found.warnings)
        if state not in ("running", "elsewhere"):  # of what is over nothing is to be feared any more
            warnings = [] if pace is None or not pace.is_slow else [pace.said]
        return {
            "lights": [{"title": light.title, "colour": light.colour, "text": light.text} for light in found.lights],
            "warnings": warnings,
            "pace": None if pace is None else {"share": pace.share, "is_slow": pace.is_slow},
        }

    def _checkpoints(self) -> list[Section]:
        rows = []
        for folder in newest_first(self.run)[:MOST_CHECKPOINTS]:
            row: Section = {"step": step_of(folder), "written": None, "bytes": None, "torn": None}
            try:
                manifest = checked(folder)
                row |= {"written": manifest.written, "bytes": manifest.bytes}
            except Torn as torn:
                row["torn"] = torn.said
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                row["torn"] = Message("web.cannot-be-read")
            rows.append(row)
        return rows


def _draw_held(name: str, now: int | None, peak: int | None, planned: int | None, total: int | None) -> Section:
    return {"name": name, "now": now, "peak": peak, "planned": planned, "total": total}


def _show_attempt(record: records.AttemptRecord) -> Section:
    cause, following = record.cause, record.next
    return {
        "number": record.number,
        "state": record.state,
        "plan": record.plan,
        "started": record.started,
        "ended": record.ended,
        "first_step": record.first_step,
        "last_step": record.last_step,
        "kept_step": record.kept_step,
        "cause": None if cause is None else {"id": cause.id, "sentence": cause.sentence, "rank": cause.rank},
        "evidence": [] if cause is None else [masked(line)[:400] for line in cause.evidence[:6]],
        "next": None if following is None else {"action": action_words(following.action), "because": following.because},
        "changed": [] if following is None else list(following.changed),
    }


def _marks(path: Path) -> object:
    """Changes with a file, or with what lies in a folder."""
    try:
        if not path.is_dir():
            found = path.stat()
            return found.st_mtime_ns, found.st_size
        return tuple(sorted((each.name, each.stat().st_mtime_ns) for each in path.iterdir()))
    except OSError:
        return None
