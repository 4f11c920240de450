"""What a rank writes down before it leaves in distress: `errors/rank-N.json`, one record, written and read here alone.

The rank knows for certain what its log only suggests: what kind of exception ended it, in which phase of which step,
and how much memory was asked for. The desk believes the record; a log is diagnosed where there is none, or for what the
record leaves open. Records of earlier releases say only `kind`, `text` and `time`, and other kinds: they are read as
well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tightfit.inputs.records import find_json, json_text
from tightfit.messages import Said, as_json
from tightfit.owned import replace_file
from tightfit.runs.events import clean, read_said
from tightfit.runs.heartbeat import DISK_FULL
from tightfit.types import PhaseName

ERRORS = "errors"
BUG, USER = "bug", "user"
USERS = (USER, DISK_FULL)
"""Kinds that the user has to mend; the sentence says how."""
MEMORY = ("device-oom", "host-oom", "pinned-memory")
"""Kinds of a want of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    rank: int
    kind: str
    """A `Kind` of a verdict, where the exception alone tells it; `user`; `bug`; or the name of an error of ours."""
    text: Said
    """One sentence, for people."""
    at: float
    """Seconds since the epoch."""
    phase: PhaseName | None = None
    """None: it was in none, or the worker cannot tell."""
    step: int | None = None
    """The one that was being made, from 1; None: none was."""
    asked: int | None = None
    """Bytes that were asked for and refused."""
    allocated: int | None = None
    """Bytes that this process's tensors held then, on the device that refused."""
    free: int | None = None
    """Bytes that this process could still have had."""


def write_last_words(run: Path, words: LastWords) -> None:
    record = {
        "kind": words.kind,
        "text": as_json(words.text),
        "rank": words.rank,
        "time": words.at,
        "phase": words.phase,
        "step": words.step,
        "asked": words.asked,
        "allocated": words.allocated,
        "free": words.free,
    }
    try:
        (run / ERRORS).mkdir(parents=True, exist_ok=True)
        replace_file(run / ERRORS / f"rank-{words.rank}.json", json_text(record).encode())
    except OSError:
        return  # the disk may be what has failed; the exit code and the log remain


def read_last_words(errors: Path, since: float) -> tuple[LastWords, ...]:
    """The records of all ranks, of this run alone. Read them before ranks are ended: being ended is no failure."""
    found = map(_read, sorted(errors.glob("rank-*.json")))
    return tuple(words for words in found if words is not None and words.at >= since)


def _read(path: Path) -> LastWords | None:
    """None: a torn file, or none of ours."""
    tree, rank = find_json(path), path.stem.removeprefix("rank-")
    if not isinstance(tree, dict) or not rank.isdecimal():
        return None
    kind, text, at, phase = tree.get("kind"), tree.get("text"), tree.get("time"), tree.get("phase")
    if not isinstance(text, str | dict) or isinstance(at, bool) or not isinstance(at, int | float):
        return None
    counts = {name: tree.get(name) for name in ("step", "asked", "allocated", "free")}
    return LastWords(
        rank=int(rank),
        kind=clean(kind) if isinstance(kind, str) and kind else "crash",
        text=read_said(text) or "no reason was given",
        at=float(at),
        phase=phase if phase in get_args(PhaseName) else None,
        **{name: value for name, value in counts.items() if type(value) is int and value >= 0},
    )
