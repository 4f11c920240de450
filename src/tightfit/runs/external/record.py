"""The folder of a run of somebody else's program: whose it is, its record, and how a later start takes it over.

run.json         command, process, host, state, as every run's record says them; and what was predicted and found
lock             held while it runs
attempts/        a record of each start, with its output
earlier/N/       the attempts of a `tightfit run` that was killed, when another has taken over
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tightfit.inputs.records import find_record, record_text
from tightfit.messages import Message, say_why
from tightfit.owned import replace_file
from tightfit.runs.folder import set_aside
from tightfit.runs.lock import FolderLock, InUse
from tightfit.runs.processes import end_carriers
from tightfit.runs.records import ATTEMPTS, RECORD, RunRecord, now, read_run
from tightfit.types import ConfigError

FOLDER = "tightfit-run"
_MOST_FOLDERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalRecord(RunRecord):
    """In the words of every run's `run.json`, so that whoever looks for runs finds this one."""

    kind: Literal["foreign"] = "foreign"  # as it has said from the first release on
    mark: str | None = None  # by which its processes are known
    last_command: tuple[str, ...] = ()  # as it was started last: after a rescue with another config

    def write_report(self, folder: Path, more: Mapping[str, Any], *, state: str, exit_code: int | None) -> None:
        """Whole or not at all. `more`: what was predicted and found."""
        ended = None if state == "running" else now()
        with suppress(OSError):  # a full disk costs the record and never the run
            ended_now = replace(self, state=state, exit_code=exit_code, ended=ended)
            replace_file(folder / RECORD, record_text(ended_now, more).encode())


def begin_record(command: Sequence[str], mark: str) -> ExternalRecord:
    return replace(ExternalRecord.begin(tuple(command)), mark=mark, last_command=tuple(command))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    path: Path
    lock: FolderLock
    before: ExternalRecord | None = None  # the killed run that it takes over; None: it is new


def claim(named: Path | None, command: Sequence[str], *, take_over: bool = False) -> ClaimedRun:
    """The folder for this command: the named one, one that such a command was killed in, or a new one. `take_over`: the
    user says that whoever held it on another machine has gone."""
    if named is not None:
        if named.exists() and (not named.is_dir() or any(named.iterdir())):
            before = find_abandoned(named)
            if before is None:
                record = read_run(named) if named.is_dir() else None
                if record is not None and record.lives:
                    raise ConfigError(Message("external.output-in-use", path=named, pid=record.pid))
                raise ConfigError(Message("external.output-there", path=named))
            if before.command != tuple(command):
                raise ConfigError(Message("external.other-command", path=named, command=shlex.join(before.command)))
            return _take_over(named, before, take_over=take_over)
        place = _make(named, exist_ok=True)
        assert place is not None
        return place
    numbered = [Path(f"{FOLDER}-{number}") for number in range(1, _MOST_FOLDERS)]
    there = [path for path in numbered if path.exists()]
    for path in reversed(there):
        before = find_abandoned(path)
        if before is not None and before.command == tuple(command):
            with suppress(InUse):  # it lives elsewhere
                return _take_over(path, before, take_over=take_over)
    for path in numbered:
        if path not in there and (place := _make(path)) is not None:
            return place
    raise ConfigError(Message("external.many-folders", most=_MOST_FOLDERS, folder=FOLDER))


def find_abandoned(path: Path) -> ExternalRecord | None:
    """A run whose `tightfit run` was killed; None: there is none, or its process lives, or it ended with a word. Of one
    on another machine its lock tells more."""
    record = find_record(path / RECORD, ExternalRecord)
    return record if record is not None and record.state == "running" and not record.lives else None


def _make(path: Path, *, exist_ok: bool = False) -> ClaimedRun | None:
    """Made here, so that two runs never share one; None: somebody was quicker."""
    try:
        (path / ATTEMPTS).mkdir(parents=True, exist_ok=exist_ok)
        return ClaimedRun(path=path, lock=FolderLock.take(path))
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(Message("external.cannot-make", path=path, why=say_why(error))) from None


def _take_over(path: Path, before: ExternalRecord, *, take_over: bool) -> ClaimedRun:
    """Its processes have been ended by their guard, or are about to be; its records make way."""
    lock = FolderLock.take(path, take_over=take_over)
    if before.mark is not None:
        end_carriers(before.mark)
    moving = [path / ATTEMPTS] if (path / ATTEMPTS).exists() else []
    try:
        set_aside(path, moving)
        (path / ATTEMPTS).mkdir(exist_ok=True)
    except BaseException:
        lock.release()
        raise
    return ClaimedRun(path=path, lock=lock, before=before)
