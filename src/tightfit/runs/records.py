"""`run.json`: who ran what, where, and how it ended. Every run has one, also one of somebody else's program.

The attempts of a run, a numbered record each: what was tried, what went wrong, and what was changed.

    attempts/001.json    the record, written when the attempt begins and again when it ends
    attempts/001/        logs and last words of its ranks, and its plan where the next one has another

A record is replaced whole: who reads one never sees half of it. A disk that takes nothing costs the record and never
the run.

What a rank writes down before it leaves in distress: `errors/rank-N.json`, one record, written and read here alone.

The rank knows for certain what its log only suggests: what kind of exception ended it, in which phase of which step,
and how much memory was asked for. The desk believes the record; a log is diagnosed where there is none, or for what the
record leaves open. Records of earlier releases say only `kind`, `text` and `time`, and other kinds: they are read as
well.

What the desk needs to know of a plan's `worker.json` to start it: how many ranks, where, and what they will hold.

It is read the same way whether it was rendered a moment ago or lies in a folder that `tightfit plan --write` made.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, ClassVar, Literal, TypeVar

from tightfit.formats.worker.read import AGAIN, WORKER_FILE, parse_worker
from tightfit.inputs.records import as_record, find_json, find_record, json_text, record_text
from tightfit.inputs.spelling import read_text
from tightfit.messages import Message, Said
from tightfit.owned import NotOurs, open_own, replace_file
from tightfit.runs.events import AttemptBegan, AttemptFailed, Event, attempt_line, read_fields
from tightfit.runs.heartbeat import DISK_FULL
from tightfit.runs.processes import began_at, is_alive, this_host
from tightfit.types import STREAM, ConfigError, PhaseName, Vendor

RECORD, EVENTS, ERRORS = "run.json", "events.jsonl", "errors"
OLD_KEYS = frozenset({"command", "pid", "host", "started", "ended", "state", "exit_code"})
"""Of a record that was written before records had a schema."""
BEGAN_S = 5.0  # what the clock of a record and that of a process may differ by
_BLOCK_BYTES = 4096  # what a small file takes of a disk: up to here it grows without more


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.plan, self.model, self.errors = path, path / "plan", path / "model", path / ERRORS
        self.events, self.record = path / EVENTS, path / RECORD

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"


R = TypeVar("R", bound="RunRecord")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    SCHEMA: ClassVar[int] = 1

    kind: str = "train"
    command: tuple[str, ...]
    pid: int
    host: str
    started: datetime | None = None
    ended: datetime | None = None  # None: it runs, or its process was killed
    state: str  # `running`, `done`, `stopped`, `interrupted`, `failed`
    exit_code: int | None = None
    cwd: str | None = None  # the folder that the command was given in; None: an earlier version wrote it

    @classmethod
    def begin(cls: type[R], command: tuple[str, ...]) -> R:
        place = os.getcwd()
        return cls(command=command, pid=os.getpid(), host=this_host(), started=now(), state="running", cwd=place)

    @property
    def lives(self) -> bool | None:
        """Whether its process runs; None: that cannot be seen from here."""
        if self.state != "running":
            return False
        if self.host != this_host():
            return None
        if not is_alive(self.pid, None):
            return False
        began = began_at(self.pid)
        return began is None or self.started is None or began <= self.started.timestamp() + BEGAN_S

    def write(self, run: Path, *, state: str = "running", exit_code: int | None = None) -> None:
        """Whole or not at all: others may read it at any moment."""
        ended = None if state == "running" else now()
        said, path = replace(self, state=state, exit_code=exit_code, ended=ended), run / RECORD
        try:
            replace_file(path, record_text(said).encode())
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or not _write_over(path, record_text(said).encode()):
                raise

    def close(self, run: Path, *, state: str, exit_code: int) -> None:
        """The last word. A full disk may be why it ended, and must not hide what is to be said about that."""
        with suppress(OSError):
            self.write(run, state=state, exit_code=exit_code)


def read_run(run: Path) -> RunRecord | None:
    """The record in a run's folder; None: there is none, or it is not ours."""
    tree = find_json(run / RECORD)
    if isinstance(tree, dict) and frozenset(tree) == OLD_KEYS:
        tree["schema"] = RunRecord.SCHEMA
    with suppress(ValueError):
        return as_record(tree, RunRecord)
    return None


def now() -> datetime:
    return datetime.now().astimezone()


def _write_over(path: Path, text: bytes) -> bool:
    """Write into the block that the file has already, where a full disk has no other; whether that went well."""
    if path.is_symlink() or not path.is_file() or len(text) > _BLOCK_BYTES:
        return False
    with suppress(OSError), path.open("r+b", buffering=0) as file:
        if file.write(text) == len(text):
            file.truncate()
            return True
    return False


# --- attempts ------------------------------------------------------------------------------------


ATTEMPTS = "attempts"

Action = Literal["same plan", "smaller plan", "wait", "make room", "skip data", "precision", "older checkpoint", "stop"]
"""What follows from a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    id: str  # of the symptom: `tightfit explain` knows it
    kind: str
    sentence: Said
    confidence: str
    rank: int | None
    phase: str | None
    evidence: tuple[str, ...]  # `rank-1.log:17: torch.OutOfMemoryError: …`


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    action: Action
    because: Said
    changed: tuple[Said, ...] = ()  # `micro batch 4 × 1 → 2 × 2`, lever by lever
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    SCHEMA: ClassVar[int] = 1

    number: int
    started: str
    plan: Said  # `ZeRO-2, optimizer on CPU: micro batch 4 × 1 on 2 ranks`
    ranks: int
    effective_batch: int | None
    ended: str | None = None  # None: it runs
    state: str = "running"  # `running`, `done`, `stopped`, `interrupted`, `failed`
    exit_codes: tuple[int, ...] = ()  # by rank; negative: the signal that ended it
    first_step: int | None = None  # the step from which it went on; 0: from the beginning; None: it did not get there
    last_step: int | None = None  # None: it made none
    kept_step: int | None = None  # the newest checkpoint when it ended: from here the next one goes on
    cause: Cause | None = None
    next: Next | None = None

    @property
    def reached(self) -> int:
        """How far it came: its last step, or the one that it went on from."""
        return self.last_step if self.last_step is not None else self.first_step or 0

    @property
    def lost_steps(self) -> int:
        """Steps that the next attempt makes again."""
        return 0 if self.last_step is None else max(0, self.last_step - (self.kept_step or 0))


def timestamp() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def attempt_path(run: Path, number: int) -> Path:
    return run / ATTEMPTS / f"{number:03d}.json"


def attempt_paths(run: Path) -> list[Path]:
    """Where the records of the run's last start are, in order; whatever they say."""
    try:
        found = [path for path in (run / ATTEMPTS).glob("*.json") if path.stem.isdecimal()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.stem))


def write_attempt(run: Path, record: AttemptRecord) -> bool:
    """Whole or not at all; False: the disk did not take it."""
    path = attempt_path(run, record.number)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, record_text(record).encode())
    except OSError:
        return False
    return True


def read_attempts(run: Path) -> tuple[AttemptRecord, ...]:
    """Those of the run's last start, in order; what is no record of ours is left out."""
    found = (find_record(path, AttemptRecord) for path in attempt_paths(run))
    return tuple(record for record in found if record is not None)


def _place(folder: RunFolder, number: int) -> Path:
    place = attempt_path(folder.path, number).with_suffix("")
    place.mkdir(parents=True, exist_ok=True)
    return place


def put_aside(folder: RunFolder, number: int, logs: Sequence[Path]) -> None:
    """Logs and last words of an attempt make way for the next one's."""
    with suppress(OSError):  # a full disk: the next attempt's words count more than the last one's
        place = _place(folder, number)
        for log in logs:
            if log.exists():
                log.rename(place / log.name)
        if folder.errors.is_dir():
            folder.errors.rename(place / folder.errors.name)


def keep_plan(folder: RunFolder, number: int) -> None:
    """Before another takes its place."""
    with suppress(OSError):
        shutil.copytree(folder.plan, _place(folder, number) / folder.plan.name, dirs_exist_ok=True)


def append_event(folder: RunFolder, event: AttemptBegan | AttemptFailed) -> None:
    """A line of the supervisor's own in the run's events, between two attempts. A torn last line is ended first."""
    with suppress(OSError, NotOurs), open_own(folder.events, "ab+") as file:
        end_last_line(file)
        file.write(attempt_line(event, time.time()).encode())


def end_last_line(file: IO[bytes]) -> int:
    """The length of the file. A last line that its writer did not finish is ended, or the next would be lost too."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return size


# --- last words ----------------------------------------------------------------------------------


BUG, USER = "bug", "user"
USERS = (USER, DISK_FULL)  # kinds that the user has to mend; the sentence says how
MEMORY = ("device-oom", "host-oom", "pinned-memory")  # kinds of a want of memory


@dataclass(frozen=True, kw_only=True)
class LastWords(Event, without={"kind": "crash", "text": "no reason was given"}, at={"at": "time"}):
    rank: int
    # a `Kind` of a verdict, where the exception alone tells it; `user`; `bug`; or the name of an error of ours
    kind: str
    text: Said  # one sentence, for people
    at: float  # seconds since the epoch
    phase: PhaseName | None = None  # None: it was in none, or the worker cannot tell
    step: int | None = None  # the one that was being made, from 1; None: none was
    asked: int | None = None  # bytes that were asked for and refused
    allocated: int | None = None  # bytes that this process's tensors held then, on the device that refused
    free: int | None = None  # bytes that this process could still have had


def write_last_words(run: Path, words: LastWords) -> None:
    record = asdict(words)
    record["time"] = record.pop("at")
    with suppress(OSError):  # the disk may be what has failed; the exit code and the log remain
        (run / ERRORS).mkdir(parents=True, exist_ok=True)
        replace_file(run / ERRORS / f"rank-{words.rank}.json", json_text(record).encode())


def read_last_words(errors: Path, since: float) -> tuple[LastWords, ...]:
    """The records of all ranks, of this run alone. Read them before ranks are ended: being ended is no failure."""
    found = []
    for path in sorted(errors.glob("rank-*.json")):
        tree, rank = find_json(path), path.stem.removeprefix("rank-")
        if isinstance(tree, dict) and isinstance(tree.get("text"), str | dict) and rank.isdecimal():  # or it is torn
            whole = {key: value for key, value in tree.items() if key == "time" or not isinstance(value, float)}
            found.append(read_fields({**whole, "rank": int(rank)}, LastWords))
    return tuple(words for words in found if words is not None and words.at >= since)


# --- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFile:
    model: str
    method: str
    engine: str
    optimizer: str
    offload_optimizer: str
    nodes: int
    gpus_per_node: int
    vendor: Vendor
    folder: str  # the run's folder, as the file says it
    required_bytes: int  # what a GPU must have free
    peak_bytes: int
    host_bytes_per_node: int
    step_s: float | None  # None: no pace was claimed
    tokens_per_s: float | None
    logging_steps: int | None = None  # steps between two lines of the log; None: time decides
    gpu_memory_bytes: int | None = None
    pipeline_gpus: int = 1  # in each row
    fullest_gpu: int = 0  # of a row: the one that is rehearsed

    @property
    def steps_on_host(self) -> bool:
        """As `Levers` have it."""
        return self.offload_optimizer != "none" or (self.engine == STREAM and self.method == "full")

    @property
    def rehearsed_rank(self) -> int:
        return self.fullest_gpu * (self.ranks // self.pipeline_gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def ram_bytes_per_node(self) -> int:
        """With what stands on the GPUs, where the CPU stands in for them."""
        on_cpu = self.required_bytes * self.gpus_per_node if self.vendor == "cpu" else 0
        return self.host_bytes_per_node + on_cpu

    @property
    def ram_bytes_per_rank(self) -> int:
        return self.ram_bytes_per_node // max(1, self.gpus_per_node)


def read_plan_folder(folder: Path) -> dict[str, str]:
    from tightfit.formats.plan_folder import PLAN_FILES  # with all that plans, which a rank has no use for

    if not (folder / WORKER_FILE).is_file() and (folder / "launch.sh").is_file():
        raise ConfigError(Message("runs.plan-of-other", folder=folder, script=folder / "launch.sh"))
    if not (folder / WORKER_FILE).is_file():
        raise ConfigError(Message("runs.no-worker-file", folder=folder, name=WORKER_FILE))
    ours = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name in PLAN_FILES]
    return {path.name: read_text(path, "the text of a plan") for path in ours}


def worker_file(text: str, where: str) -> WorkerFile:
    """The text of a worker.json; `where`: what to call it in a sentence."""
    tree = parse_worker(text, where)
    try:
        world, levers, predicted, card = tree["world"], tree["levers"], tree["predicted"], None
        if type(world.get("gpu_memory_bytes")) is int:
            card = world["gpu_memory_bytes"]
        said = {
            "model": tree["model"]["name"],
            **{name: levers[name] for name in ("method", "engine", "optimizer", "offload_optimizer")},
            **{name: world[name] for name in ("nodes", "gpus_per_node", "vendor")},
            "folder": tree["saving"]["folder"],
            **{name: predicted["gpu"][name] for name in ("required_bytes", "peak_bytes")},
            "host_bytes_per_node": predicted["host"]["peak_bytes_per_node"],
            **{name: predicted[name] for name in ("step_s", "tokens_per_s")},
            "logging_steps": tree.get("logging_steps"),
            "pipeline_gpus": levers.get("pipeline_parallel", 1),
            "fullest_gpu": (tree.get("pipeline") or {}).get("fullest_gpu", 0),
        }
        found = replace(as_record(said, WorkerFile), gpu_memory_bytes=card)
        logging = 1 if found.logging_steps is None else found.logging_steps
        at_least_one = (found.nodes, found.gpus_per_node, found.pipeline_gpus, logging)
        sizes = (found.required_bytes, found.peak_bytes, found.host_bytes_per_node)
        pace = (found.step_s or 0.0, found.tokens_per_s or 0.0)
        if min(at_least_one) < 1 or min(*sizes, *pace) < 0:
            raise ValueError
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"{where} is not whole: {AGAIN}") from None


def placed(text: str, folder: Path) -> str:
    """The same worker.json with another folder for the run."""
    tree = parse_worker(text, WORKER_FILE)
    tree["saving"]["folder"] = str(folder)
    return json_text(tree)


def find_worker_file(plan: Path) -> WorkerFile | None:
    """That of a plan's folder; None: there is none, or none that can be read."""
    with suppress(ConfigError):
        return worker_file(read_text(plan / WORKER_FILE, "JSON"), str(plan / WORKER_FILE))
    return None
