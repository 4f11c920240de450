"""The folder of one run.

    plan/           what was planned: worker.json and all other rendered files
    events.jsonl    what the worker reports, a line each
    logs/rank-N.log what each rank printed
    errors/         rank-N.json, where a rank left in distress
    run.json        the command, when, where, and how it ended
    lock            held while the run lives
    model/          what came out
    earlier/N/      what runs in this folder left that did not finish

A start that fails before the first step leaves nothing behind, unless a rank crashed: then the logs are what is needed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tightfit.render.write import write
from tightfit.runs.lock import LOCK, FolderLock, check_unlocked
from tightfit.runs.processes import this_host
from tightfit.types import ConfigError

RUNS = {"run.json", "events.jsonl", "errors", "model"}
"""What only a run's folder has; another node may have left its errors there before node 0 began."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The places in a run's folder."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"


def check_folder(path: Path, *, overwrite: bool = False) -> None:
    """Raise what would keep a run from this folder; write nothing."""
    if not path.exists():
        _check_parent(path)
        return
    if not path.is_dir():
        raise ConfigError(f"{path} is a file: name a folder with --output")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} may not be written to: name another folder with --output")
    check_unlocked(path)
    _check_contents(path, overwrite=overwrite)


def _check_parent(path: Path) -> None:
    parent = next(place for place in path.parents if place.exists())
    if not parent.is_dir():
        raise ConfigError(f"{parent} is a file, so {path} cannot be made: name another folder with --output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{parent} may not be written to: name another folder with --output")


def _check_contents(path: Path, *, overwrite: bool) -> None:
    names = {entry.name for entry in path.iterdir()} - {LOCK, "earlier"}
    if "model" in names and not overwrite:
        raise ConfigError(f"{path} holds a finished run: name another --output, or say --overwrite")
    if names and not names & RUNS:
        raise ConfigError(
            f"{path} holds {sorted(names)[0]!r} and is no run's folder: name a new or empty one with --output"
        )


class ClaimedFolder:
    """A run folder that is ours until it is released."""

    def __init__(self, folder: RunFolder, lock: FolderLock, made: list[Path], aside: Path | None) -> None:
        self.folder, self._lock, self._made, self._aside = folder, lock, made, aside

    @classmethod
    def claim(cls, path: Path, *, overwrite: bool) -> ClaimedFolder:
        """Make the folder and hold it, or say who does; what an earlier run left makes way."""
        check_folder(path, overwrite=overwrite)
        made = [place for place in (path, *path.parents) if not place.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock.take(path)
        except OSError as error:
            _unmake(made)
            raise _unwritable(path, error) from None
        try:
            _check_contents(path, overwrite=overwrite)  # again, now that nobody else can change it
            aside = _make_way(path)
        except BaseException:
            lock.release()
            raise
        return cls(RunFolder(path), lock, made, aside)

    def begin(self, files: Mapping[str, str], record: RunRecord) -> None:
        """Write down what is to run."""
        try:
            write(files, self.folder.plan, force=True)
            record.write(self.folder)
        except OSError as error:
            raise _unwritable(self.folder.path, error) from None
        except ConfigError as error:  # `write` speaks of the flag of `tightfit plan`
            raise ConfigError(str(error).replace("--write", "--output")) from None

    def release(self, *, done: bool = False) -> None:
        """Let it go. A finished run that this one was to replace goes when this one is `done`, and not before."""
        if done and self._aside is not None and (self._aside / "model").exists():
            _remove(self._aside)
            _unmake([self._aside.parent])
        self._lock.release()

    def discard(self) -> None:
        """Leave everything as it was before this run."""
        path = self.folder.path
        for entry in list(path.iterdir()):
            if entry.name not in (LOCK, "earlier"):
                _remove(entry)
        if self._aside is not None:
            for entry in list(self._aside.iterdir()):
                entry.rename(path / entry.name)
            _unmake([self._aside, self._aside.parent])
        self._lock.release()
        _unmake(self._made)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    why = (error.strerror or str(error)).lower()
    room = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ConfigError(f"{path} cannot be written ({why}): {room}name another folder with --output")


def _make_way(path: Path) -> Path | None:
    """Move what an earlier run left into a folder of its own; None: nothing was there."""
    there = [entry for entry in path.iterdir() if entry.name not in (LOCK, "earlier")]
    if not there:
        return None
    earlier = path / "earlier"
    number = 1 + max((int(each.name) for each in earlier.glob("[0-9]*") if each.name.isdigit()), default=0)
    aside = earlier / str(number)
    aside.mkdir(parents=True)
    for place in there:
        place.rename(aside / place.name)
    return aside


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unmake(made: list[Path]) -> None:
    with suppress(OSError):  # somebody else has put something there
        for place in made:
            place.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`: who ran what, and how it ended."""

    command: tuple[str, ...]
    pid: int
    started: str
    host: str

    @classmethod
    def begin(cls, command: tuple[str, ...]) -> RunRecord:
        return cls(command=command, pid=os.getpid(), started=_now(), host=this_host())

    def write(self, folder: RunFolder, *, state: str = "running", exit_code: int | None = None) -> None:
        """Whole or not at all: others may read it at any moment."""
        plain: dict[str, Any] = {
            "command": list(self.command),
            "pid": self.pid,
            "host": self.host,
            "started": self.started,
            "ended": None if state == "running" else _now(),
            "state": state,
            "exit_code": exit_code,
        }
        beside = folder.record.with_suffix(".new")
        try:
            beside.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            beside.replace(folder.record)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise

    def close(self, folder: RunFolder, *, state: str, exit_code: int) -> None:
        """The last word. A full disk may be why it ended, and must not hide what is to be said about that."""
        with suppress(OSError):
            self.write(folder, state=state, exit_code=exit_code)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
