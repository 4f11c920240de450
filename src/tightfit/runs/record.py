"""`run.json`: who ran what, where, and how it ended. Every run has one, also one of somebody else's program."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from tightfit.inputs.records import as_record, find_json, record_text
from tightfit.owned import replace_file
from tightfit.runs.processes import began_at, is_alive, this_host

RECORD = "run.json"
OLD_KEYS = frozenset({"command", "pid", "host", "started", "ended", "state", "exit_code"})
"""Of a record that was written before records had a schema."""
BEGAN_S = 5.0
"""What the clock of a record and that of a process may differ by."""
_BLOCK_BYTES = 4096
"""What a small file takes of a disk: up to here it grows without more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    SCHEMA: ClassVar[int] = 1

    kind: str = "train"
    command: tuple[str, ...]
    pid: int
    host: str
    started: datetime | None = None
    ended: datetime | None = None
    """None: it runs, or its process was killed."""
    state: str
    """`running`, `done`, `stopped`, `interrupted`, `failed`."""
    exit_code: int | None = None

    @classmethod
    def begin(cls, command: tuple[str, ...]) -> RunRecord:
        return cls(command=command, pid=os.getpid(), host=this_host(), started=now(), state="running")

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
    try:
        return as_record(tree, RunRecord)
    except ValueError:
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
