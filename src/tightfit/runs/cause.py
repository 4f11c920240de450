"""Why an attempt failed: everything that is known about it, judged once.

Our own ranks say more than their logs: a rank that hangs was watched, and one that fails leaves its last words, whose
values are believed. What they do not say (exceptions of libraries, exit codes, the kernel's record) is judged as any
other log is, by `diagnose/`. A process that was killed is taken to have run out of memory only where the kernel says
so, or where this user may not read what it says.

The kernel's record has two sources, of which this user may be allowed neither: its log, and the counter of killed
processes that the memory group of this process has. Both are remembered at the start, so that only what comes later
counts.

What `tightfit diagnose RUN` goes by are the logs, last words and exit codes that a run has left in its folder. How a
run ended is not always to be read in its logs. One that was asked to stop has nothing wrong with it, although its ranks
left with a code; one whose own process was killed had nobody left to write down what happened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tightfit.diagnose.judge import judge, known_symptom
from tightfit.diagnose.verdict import Evidence, Fix, Kind, Line, LogSource, OomNumbers, RankExit, Verdict
from tightfit.formats.worker.read import WORKER_FILE, find_worker
from tightfit.inputs.flags import levers_as_written
from tightfit.inputs.records import find_record
from tightfit.job.known import KnownConfig
from tightfit.memory import estimate
from tightfit.messages import Message, Said, say, text
from tightfit.model.load import load_model, shape_from_config
from tightfit.runs import build_lock, records
from tightfit.runs.checkpoints import CHECKPOINTS, step_of, written_first
from tightfit.runs.heartbeat import DISK_FULL, PHASES, Beat
from tightfit.runs.launch import RankStart
from tightfit.runs.records import BUG, USERS, AttemptRecord, Cause, LastWords, RunFolder, RunRecord
from tightfit.runs.run import Outcome
from tightfit.types import STAGES, ConfigError, Footprint, Gpu, Hardware, UserError

KMSG = Path("/dev/kmsg")
GROUPS = Path("/sys/fs/cgroup")
_RECORD_BYTES = 8192
_MOST_KERNEL_LINES = 2000
_KILLED = re.compile(r"[Kk]ill(?:ed)? process (?P<pid>\d+)[ ,]*\(?(?P<name>[\w.:-]*)")
_MEMORY = re.compile(r"out of memory|oom[-_]", re.IGNORECASE)
_DEVICES = re.compile(r"\bXid\b|amdgpu|fallen off the bus|I/O error|EXT4-fs|XFS|Hardware Error", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSaid:
    lines: tuple[str, ...] = ()
    readable: bool = False  # whether a process that was killed for want of memory would be known


class KernelRecord:
    """Listens from its making on; `close` it."""

    def __init__(self, log: Path = KMSG, groups: Path = GROUPS, memberships: Path = Path("/proc/self/cgroup")) -> None:
        self._file: int | None = None
        with suppress(OSError):  # most users may not
            self._file = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
            try:  # opening alone does not tell whether a read is allowed
                os.read(self._file, _RECORD_BYTES)
            except (BlockingIOError, BrokenPipeError):  # there is nothing yet; older lines were overwritten
                pass
            except OSError:
                self.close()
        self._counter = _counter(groups, memberships)
        self._before = _kills(self._counter)

    def said(self, pids: Collection[int]) -> KernelSaid:
        """What has come since. `pids`: our own; of others that were killed nothing is told, unless none is ours and
        their name is Python's, as in a container whose numbers are not the kernel's."""
        lines = [line for line in self._lines() if _MEMORY.search(line) or _DEVICES.search(line)]
        killed = [(line, found) for line in lines if (found := _KILLED.search(line))]
        ours = [line for line, found in killed if int(found["pid"]) in pids]
        if not ours:
            # whether a process of that number lives: then it is not the one that was killed
            ours = [
                line
                for line, found in killed
                if found["name"].startswith(("python", "pt_")) and not Path("/proc", found["pid"]).exists()
            ]
        others = {line for line, _ in killed} - set(ours)
        told = [line for line in lines if line not in others and (ours or not _MEMORY.search(line))]
        after = _kills(self._counter)
        if self._before is not None and after is not None and after > self._before and not ours:
            told.append(f"{self._counter}: detected {after - self._before} oom_kill events in this memory group")
        return KernelSaid(lines=tuple(told), readable=self._file is not None or after is not None)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lines(self) -> list[str]:
        found: list[str] = []
        while self._file is not None and len(found) < _MOST_KERNEL_LINES:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BrokenPipeError:
                continue
            except OSError:
                break
            if not record:
                break
            lines = record.decode("utf-8", errors="replace").splitlines()
            # `6,1234,98765,-;words`, and below it further facts that are indented
            found += [line.partition(";")[2] or line for line in lines if line and not line.startswith(" ")]
        return found


def _counter(groups: Path, memberships: Path) -> Path | None:
    """The file that counts, of the new kind of groups or of the old one."""
    places: list[Path] = []
    with suppress(OSError):
        for line in memberships.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                old, name = groups / "memory", "memory.oom_control"
                places += [old / path.lstrip("/") / name, old / name]
            elif not kinds:
                places += [groups / path.lstrip("/") / "memory.events", groups / "memory.events"]
    return next((place for place in places if _kills(place) is not None), None)


def _kills(counter: Path | None) -> int | None:
    with suppress(OSError):
        said = "" if counter is None else counter.read_text(encoding="ascii")
        if found := re.search(r"^oom_kill (\d+)$", said, re.MULTILINE):
            return int(found[1])
    return None


# --- the judgement -------------------------------------------------------------------------------


NUMBERS: tuple[Kind, ...] = ("not-finite", "loss-scale")
"""Kinds of a training whose loss or gradients were NaN or infinite."""
_SYMPTOMS = {"device-oom": "device-oom", "host-oom": "host-alloc", "pinned-memory": "pinned-memory"}
"""Kinds of last words that need no log, and where the catalogue tells more about them."""
_FINER: dict[str, tuple[Kind, ...]] = {  # what the catalogue may make of such words by the rank's log
    "device-oom": ("device-oom", "fragmentation", "other-process", "pinned-memory"),
    "host-oom": ("host-oom", "pinned-memory"),
    "pinned-memory": ("pinned-memory",),
}
_SILENT = ("silent-exit", "error-line", "child-failed")  # symptoms that say no more than that something ended
_MOST_LINES = 12
_SAME_NAMES = "offload_optimizer offload_param micro_batch precision method attention loss".split()
_VAGUE = ("communication", "unknown")  # kinds of which another rank may know more
LEFT = (0, 4)  # exit codes of ranks that left in order


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    outcome: Outcome
    starts: Sequence[RankStart]
    kernel: KernelSaid
    beats: tuple[Beat, ...]  # where the ranks last stood
    config: KnownConfig


def find_cause(known: FailedAttempt) -> Verdict:
    outcome, failure = known.outcome, known.outcome.failure
    if outcome.hung is not None:
        lines = [
            Line(source="heartbeats", number=None, text=f"rank {beat.rank}: {beat.where}")
            for beat in outcome.hung.beats
        ]
        lines += [
            Line(source=f"stack of rank {stand.rank}", number=None, text=stand.place.words)
            for stand in outcome.hung.stands
            if stand.place is not None
        ]
        # ranks that wait for a part to be compiled do not hang by themselves: whose lock it is, is what helps
        verdict = replace(
            known_symptom("stuck", known.config),
            cause=Message("runs.sentence", said=outcome.hung.sentence),
            confidence="certain" if outcome.hung.place is not None else "likely",
            evidence=tuple(lines),
            rank=outcome.hung.rank,
            phase=PHASES.get(outcome.hung.beat.stage),
            step=outcome.hung.beat.step or None,
        )
        waiting = [stand for stand in outcome.hung.stands if stand.waits_for_a_build]
        if not waiting:
            return verdict
        rank = outcome.hung.rank if any(stand.rank == outcome.hung.rank for stand in waiting) else waiting[0].rank
        environment = next((start.environment for start in known.starts if start.rank == rank), {})
        who = Message("runs.rank", rank=rank)
        return blame_build_lock(replace(verdict, rank=rank), who, build_lock.find_left_locks(environment))
    if outcome.trouble is not None and not outcome.trouble.is_users:
        # what ranks of the other nodes say is about the one that they miss
        return replace(
            known_symptom("stuck", known.config),
            kind="communication",
            cause=_end_sentence(outcome.trouble.sentence),
            confidence="certain",
            evidence=(),
            rank=outcome.trouble.rank,
        )
    diverged = next((each for each in outcome.words if each.kind in NUMBERS), None)
    if diverged is not None:
        # a rank knows that its loss or gradients are NaN; what helps against that is in the catalogue
        return replace(
            known_symptom("not-finite-stop", known.config),
            kind="loss-scale" if diverged.kind == "loss-scale" else "not-finite",
            cause=Message("runs.sentence", said=diverged.text),
            confidence="certain",
            evidence=(_line(diverged),),
            rank=diverged.rank,
            phase="step",
            step=diverged.step,
        )
    full = next((beat for beat in known.beats if beat.last_word == DISK_FULL), None)
    if full is not None:
        # all that a rank could say on a disk that took nothing else. Another's words may name the place
        cause = Message("runs.disk-was-full", rank=full.rank)
        if failure is not None and failure.is_disk_full:
            cause = _end_sentence(failure.sentence)
        return Verdict(
            id="disk-full",
            kind="disk-full",
            cause=cause,
            confidence="certain",
            evidence=(Line(source="heartbeats", number=None, text=f"rank {full.rank}: {DISK_FULL} {full.where}"),),
            fixes=(),
            rank=full.rank,
            phase=PHASES.get(full.stage),
        )
    if failure is not None and (failure.is_users or failure.is_disk_full):
        return Verdict(
            id="disk-full" if failure.is_disk_full else "tightfit-user",
            kind="disk-full" if failure.is_disk_full else "config",
            cause=_end_sentence(failure.sentence),
            confidence="certain",
            evidence=(Line(source=f"rank {failure.rank}", number=None, text=str(failure.sentence)),),
            fixes=(),
            rank=failure.rank,
        )
    words = None if failure is None else next((each for each in outcome.words if each.rank == failure.rank), None)
    found = _judge_logs(known) or Verdict(
        id="silent-exit",
        kind="unknown",
        cause=Message("runs.nothing-says-why") if failure is None else _end_sentence(failure.sentence),
        confidence="possible",
        evidence=(),
        fixes=(),
        rank=None if failure is None else failure.rank,
    )
    if words is not None and words.kind == BUG and found.id in _SILENT:
        # An exception that no symptom knows, and that its rank has named: a bug, until somebody knows better.
        cause = Message("runs.raised", error=words.text)
        evidence = (_line(words), *found.evidence)
        found = replace(found, id="exception", kind="code", cause=cause, evidence=evidence, fixes=(), rank=words.rank)
    if found.rank is None and failure is not None:  # the kernel's record knows no ranks
        found = replace(found, rank=failure.rank)
    found = _place(rule_out_memory(found, known.kernel), known)
    if words is None:
        return found
    # The rank's own record goes before what its log seems to say: kind, phase, step and bytes are its values.
    if words.kind in _FINER:
        if found.kind not in _FINER[words.kind]:
            evidence = (_line(words), *found.evidence)
            found = replace(known_symptom(_SYMPTOMS[words.kind], known.config), evidence=evidence, rank=words.rank)
        said = {name: getattr(words, name) for name in ("asked", "allocated", "free")}
        numbers = {name: value for name, value in said.items() if value is not None}
        found = replace(found, oom=replace(found.oom or OomNumbers(), **numbers) if numbers else found.oom)
    return replace(found, phase=words.phase or found.phase, step=words.step)


def _judge_logs(known: FailedAttempt) -> Verdict | None:
    """Of the rank that failed first, as its own last words tell it; of all, where that one only says what it missed."""
    failure = known.outcome.failure
    logs = tuple(
        LogSource(name=start.log.name, path=start.log, rank=start.rank if start.saves else None)
        for start in known.starts
        if start.log.is_file()
    )
    said = {each.rank: each.at for each in known.outcome.words}  # more exact than when an end was seen
    ended = tuple(
        RankExit(rank=each.start.rank, code=each.code, at=said.get(each.start.rank, each.at))
        for each in known.outcome.exits
        if each.code not in LEFT
    )
    whole = Evidence(logs=logs, exits=ended, kernel=known.kernel.lines, config=known.config)
    own = () if failure is None else tuple(log for log in whole.logs if log.rank == failure.rank)
    if not own or failure is None:
        return judge(whole).verdict
    exits = tuple(gone for gone in whole.exits if gone.rank == failure.rank)
    first = judge(replace(whole, logs=own, exits=exits)).verdict
    if first is not None and first.kind not in _VAGUE:
        return first
    every = judge(whole).verdict
    return every if first is None or (every is not None and every.kind not in _VAGUE) else first


def blame_build_lock(verdict: Verdict, who: Message, locks: Sequence[Path]) -> Verdict:
    """The same hang with its cause: a lock that a killed process has left, or somebody who still compiles."""
    if not locks:
        return replace(verdict, cause=Message("runs.build-goes-on", who=who))
    command = build_lock.command(locks)
    cause = Message("runs.build-lock-left", who=who, lock=locks[0], command=command)
    return replace(verdict, cause=cause, fixes=(Fix(text=Message("runs.remove-lock"), command=command), *verdict.fixes))


def _end_sentence(said: Said) -> Message:
    return Message("runs.ended-sentence", said=said)


def _line(words: LastWords) -> Line:
    return Line(source=f"errors/rank-{words.rank}.json", number=None, text=str(words.text))


def is_suspicion(verdict: Verdict) -> bool:
    """A process was killed, and nobody knows for what."""
    return verdict.id.startswith("killed") and verdict.confidence != "certain"


def rule_out_memory(verdict: Verdict, kernel: KernelSaid) -> Verdict:
    """A process that was killed had the memory, where the kernel's record can be read and says nothing of it."""
    if not is_suspicion(verdict) or not kernel.readable or kernel.lines:
        return verdict
    who = Message("runs.a-process") if verdict.rank is None else Message("runs.rank", rank=verdict.rank)
    return replace(verdict, kind="preempted", cause=Message("runs.killed-by-somebody", who=who))


def _place(verdict: Verdict, known: FailedAttempt) -> Verdict:
    """The rank knows its phase better than its traceback does, save for the loss, which is a part of its forward, and
    for the worst batch that is tried before the first step."""
    beat = next((beat for beat in known.beats if beat.rank == verdict.rank), None)
    own = None if beat is None else PHASES.get(beat.stage)
    passed = {mark.milestone for mark in known.outcome.tally.marks}
    if own == "init" and "init" in passed:  # in the worst batch: what came next, by the marks that it has passed
        own = "step" if "backward" in passed else "backward" if "forward" in passed else "forward"
        if verdict.phase in ("forward", "loss", "backward", "step"):
            own = verdict.phase
    if own is None or (own == "forward" and verdict.phase == "loss"):
        return verdict
    return replace(verdict, phase=own)


def config_of_plan(plan: Path) -> KnownConfig:
    """The settings that a plan's folder tells; what it does not tell stays unknown."""
    try:
        tree = find_worker(plan)
        levers = tree["levers"]
        found = KnownConfig(
            trainer="job",
            file=f"plan/{WORKER_FILE}",
            stage=STAGES.get(levers["engine"]),
            pin_memory=tree["buckets"]["pin_memory"],
            accumulation=levers["accum"],
            sequence=levers["seq"],
            checkpointing=levers["checkpointing"] != "none",
            **{name: levers[name] for name in _SAME_NAMES},
            world=tree["world"]["ranks"],
            vocabulary=(tree["model"]["config"] or {}).get("vocab_size"),
            vendor=tree["world"]["vendor"],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return KnownConfig()
    values = [getattr(found, each.name) for each in fields(found)]
    plain = all(value in (None, ()) or isinstance(value, str | int) for value in values)
    return found if plain else KnownConfig()  # anything else is what a damaged plan says


def to_record(verdict: Verdict) -> Cause:
    lines = [
        f"{line.source}{'' if line.number is None else f':{line.number}'}: {line.text}"
        for line in verdict.evidence[:_MOST_LINES]
    ]
    return Cause(
        id=verdict.id,
        kind=verdict.kind,
        sentence=verdict.cause,
        confidence=verdict.confidence,
        rank=verdict.rank,
        phase=verdict.phase,
        evidence=tuple(lines),
    )


# --- what a run has left ------------------------------------------------------------------------


_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|proc|local_rank)[-_.]?(\d{1,5})(?!\d)", re.IGNORECASE)
PARTS = ("run.json", "events.jsonl", "errors", "model", CHECKPOINTS, "logs", "plan")
"""By one of which a folder may be a run's, for whoever only reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the run's own record says, where the logs alone would mislead."""

    sentence: str
    well: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuestion:
    evidence: Evidence
    plan: Path | None = None  # of a run of ours: what was planned
    ending: Ending | None = None


def rank_of(path: Path) -> int | None:
    """The rank in a log's name, or of torchrun's folders (`attempt_0/3/stderr.log`)."""
    found = _RANK.search(path.name)
    if found is not None:
        return int(found[1])
    if path.name in ("stderr.log", "stdout.log") and path.parent.name.isdigit():
        return int(path.parent.name)
    return None


def of_run(path: Path) -> RunQuestion:
    """Logs, last words and exit code of a run of ours."""
    if not any((path / name).exists() for name in PARTS):
        inside = sorted(each.name for each in path.iterdir() if each.suffix in (".log", ".txt", ".out", ".err"))
        hint = text("cli.name-logs", inside=inside[0]) if inside else text("cli.name-log-file")
        raise ConfigError(Message("cli.run-s-folder", path=path, hint=hint))
    folder, record = RunFolder(path), records.read_run(path)
    numbered = [each for each in (path / records.ATTEMPTS).glob("*") if each.is_dir() and each.name.isdigit()]
    newest = max(numbered, key=lambda each: int(each.name), default=None)
    # Another trainer's logs lie with its attempts, also when it ended well; ours are moved there after a failure.
    in_attempts = record is None or record.state != "done" or record.kind != "train"
    failed = newest if in_attempts and newest is not None and not any((path / "logs").glob("*.log")) else None
    logs = sorted(log for log in (failed or path / "logs").rglob("*.log") if log.is_file())
    sources = [LogSource(name=str(log.relative_to(path)), path=log, rank=rank_of(log)) for log in logs]
    errors = failed / "errors" if failed else folder.errors
    for words in records.read_last_words(errors, 0.0):
        name = str((errors / f"rank-{words.rank}.json").relative_to(path))
        said = f"{'tightfit: ' if words.kind in USERS else ''}{say(words.text, 'en')}"  # as the catalogue knows it
        sources.append(LogSource(name=name, text=said, rank=words.rank))
    # How the ranks of the last attempt ended. Nobody kept the time; those that a signal ended had not been told to.
    paths = records.attempt_paths(path)
    attempt = find_record(paths[-1], AttemptRecord) if paths else None
    codes = () if attempt is None else attempt.exit_codes
    exits = tuple(RankExit(rank=rank, code=code, at=float(code >= 0)) for rank, code in enumerate(codes))
    if not exits and record is not None and record.exit_code is not None:
        exits = (RankExit(rank=None, code=record.exit_code, at=0.0),)
    ending = _read_ending(path, record)
    if ending is not None:  # the codes of ranks that were told to end, or of an attempt before, prove nothing
        exits = (RankExit(rank=None, code=0, at=0.0),) if ending.well else ()
    if not sources and not exits and read_planned_footprint(folder.plan) is None:
        raise ConfigError(Message("cli.holds-logs-run", path=path))
    evidence = Evidence(logs=tuple(sources), exits=exits, config=config_of_plan(folder.plan))
    return RunQuestion(evidence=evidence, plan=folder.plan, ending=ending)


def _read_ending(path: Path, record: RunRecord | None) -> Ending | None:
    """None: it is done or has failed, which the logs and exit codes tell in full, or there is no record."""
    if record is None or record.state not in ("stopped", "running"):
        return None
    kept = written_first(path)
    goes_on = text("cli.same-command-begins")
    if kept is not None:
        goes_on = text("cli.checkpoint-step-kept", kept=step_of(kept))
    if record.state == "stopped":
        return Ending(sentence=text("cli.run-asked-stop", goes_on=goes_on), well=True)
    if record.lives is None:
        return None
    if record.lives:
        return Ending(sentence=text("cli.run-still-going"), well=True)
    return Ending(sentence=text("cli.run-s-own", pid=record.pid, goes_on=goes_on), well=False)


def read_planned_footprint(plan: Path) -> Footprint | None:
    """What the plan of a run of ours takes; None: there is none, or none that can be read."""
    try:
        tree = find_worker(plan)
        model, world = tree["model"], tree["world"]
        found = model["config"]  # None: it lies beside the weights
        shape = load_model(model["weights"]) if found is None else shape_from_config(found, str(model["name"]))
        card = Gpu(name=world["vendor"], vendor=world["vendor"], memory_bytes=world["gpu_memory_bytes"])
        hardware = Hardware(gpu=card, nodes=world["nodes"], gpus_per_node=world["gpus_per_node"])
        return estimate(shape, levers_as_written(tree), world["ranks"], hardware)
    except (ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
