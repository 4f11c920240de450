"""What `tightfit diagnose RUN` goes by: the logs, last words and exit codes that a run has left in its folder.

How a run ended is not always to be read in its logs. One that was asked to stop has nothing wrong with it, although
its ranks left with a code; one whose own process was killed had nobody left to write down what happened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tightfit.diagnose.verdict import Evidence, LogSource, RankExit
from tightfit.formats.worker.footprint import read_planned_footprint
from tightfit.inputs.records import find_record
from tightfit.messages import Message, say, text
from tightfit.runs.cause import config_of_plan
from tightfit.runs.checkpoints import CHECKPOINTS, step_of, written_first
from tightfit.runs.records import (
    ATTEMPTS,
    USERS,
    AttemptRecord,
    RunFolder,
    RunRecord,
    attempt_paths,
    read_last_words,
    read_run,
)
from tightfit.types import ConfigError

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
    """What is to be diagnosed."""

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
    folder, record = RunFolder(path), read_run(path)
    numbered = [each for each in (path / ATTEMPTS).glob("*") if each.is_dir() and each.name.isdigit()]
    newest = max(numbered, key=lambda each: int(each.name), default=None)
    # Another trainer's logs lie with its attempts, also when it ended well; ours are moved there after a failure.
    in_attempts = record is None or record.state != "done" or record.kind != "train"
    failed = newest if in_attempts and newest is not None and not any((path / "logs").glob("*.log")) else None
    logs = sorted(log for log in (failed or path / "logs").rglob("*.log") if log.is_file())
    sources = [LogSource(name=str(log.relative_to(path)), path=log, rank=rank_of(log)) for log in logs]
    errors = failed / "errors" if failed else folder.errors
    for words in read_last_words(errors, 0.0):
        name = str((errors / f"rank-{words.rank}.json").relative_to(path))
        said = f"{'tightfit: ' if words.kind in USERS else ''}{say(words.text, 'en')}"  # as the catalogue knows it
        sources.append(LogSource(name=name, text=said, rank=words.rank))
    # How the ranks of the last attempt ended. Nobody kept the time; those that a signal ended had not been told to.
    paths = attempt_paths(path)
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
