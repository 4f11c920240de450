"""What can be ordered of a run from outside: to stop, and to go on by its own command.

A number in `run.json` is not enough to send a signal to: the number may belong to another process by now, and whoever
can write the file may have written any. The process must hold the run's lock open, which none does but the run itself,
and it is addressed by a descriptor that stays with it, so that it cannot be exchanged between the look and the signal.

A second signal ends a run at once, without a checkpoint, so a run is asked once and no more.

What is started lives on when its starter ends: it has a session of its own, and its output goes to a file beside the
run, since the run's folder has to be empty, or a run's, when it begins.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.messages import Message, say_why
from tightfit.runs.checkpoints import newest_first, step_of
from tightfit.runs.lock import LOCK
from tightfit.runs.processes import PROC, this_host
from tightfit.runs.records import RECORD, RunRecord, now, read_run
from tightfit.types import ConfigError

FRESH_STARTS = ("--overwrite", "--resume")
SEVERAL_NODES = ("--node-rank", "--nodes", "--master-addr")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    words: tuple[str, ...]  # from `tightfit` on; no shell ever sees them
    cwd: str

    @property
    def text(self) -> str:
        """As a shell would have it, for people."""
        return shlex.join(self.words)


def find_supervisor(run: Path) -> int:
    """The process that can be asked to stop this run. ConfigError: there is none, or none that is surely the run's."""
    record = _own_record(run)
    if record.host != this_host():
        raise ConfigError(Message("orders.elsewhere", host=record.host))
    if not record.lives:
        raise ConfigError(Message("orders.not-running"))
    if not _holds(record.pid, run / LOCK):
        raise ConfigError(Message("orders.not-its-process", pid=record.pid))
    return record.pid


class Stops:
    """Who was asked to stop already."""

    def __init__(self) -> None:
        self._asked: set[tuple[Path, int]] = set()

    def ask(self, run: Path) -> int:
        """Ask a run to save a checkpoint and to end; its process."""
        pid = find_supervisor(run)
        if (run, pid) in self._asked:
            raise ConfigError(Message("orders.asked-already"))
        try:
            process = os.pidfd_open(pid)
        except (OSError, AttributeError):  # an old kernel, or none of Linux's
            process = None
        try:
            if find_supervisor(run) != pid:
                raise ConfigError(Message("orders.not-running"))
            if process is None:
                os.kill(pid, signal.SIGTERM)
            else:
                signal.pidfd_send_signal(process, signal.SIGTERM)
        except OSError as error:
            raise ConfigError(Message("orders.no-signal", pid=pid, why=say_why(error))) from None
        finally:
            if process is not None:
                os.close(process)
        self._asked.add((run, pid))
        return pid


def find_command(run: Path) -> RunCommand:
    """The run's own command, which goes on from its newest checkpoint. ConfigError: it would not, or nobody knows."""
    record = _own_record(run)
    if record.lives is None:
        raise ConfigError(Message("orders.elsewhere", host=record.host))
    if record.lives:
        raise ConfigError(Message("orders.runs-already"))
    if record.state == "done":
        raise ConfigError(Message("orders.done"))
    if record.command[:2] != ("tightfit", "train"):
        raise ConfigError(Message("orders.other-program"))
    flags = [word.partition("=")[0].replace("_", "-") for word in record.command]
    if found := [flag for flag in flags if flag in FRESH_STARTS]:
        raise ConfigError(Message("orders.begins-anew", flag=found[0]))
    if found := [flag for flag in flags if flag in SEVERAL_NODES]:
        raise ConfigError(Message("orders.several-nodes", flag=found[0]))
    if not any(step_of(each) is not None for each in newest_first(run)):
        raise ConfigError(Message("orders.no-checkpoint"))
    if record.cwd is None or not Path(record.cwd).is_dir():
        raise ConfigError(Message("orders.no-folder"))
    return RunCommand(words=record.command, cwd=record.cwd)


def _own_record(run: Path) -> RunRecord:
    record = read_run(run)
    if record is None:
        raise ConfigError(Message("orders.no-record"))
    if (run / RECORD).lstat().st_uid != os.getuid():
        raise ConfigError(Message("orders.anothers"))
    return record


def _holds(pid: int, lock: Path) -> bool:
    with suppress(OSError):
        wanted = lock.stat()
        for file in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(file.stat(), wanted):
                    return True
    return False


# --- what is started -----------------------------------------------------------------------------


class StartedRun:
    def __init__(self, run: Path, command: RunCommand) -> None:
        """OSError: it cannot be."""
        self.run, self.log = run, run.with_name(f"{run.name}.out")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self.log, flags, 0o644), "ab") as output:
            self._begins = output.tell()
            output.write(f"$ {command.text}  # {now().isoformat(' ', 'seconds')}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tightfit", *command.words[1:]],
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._process.wait, name="tightfit-started", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None: it runs."""
        return self._process.returncode

    @property
    def has_begun(self) -> bool:
        """Whether the folder is its own by now."""
        record = read_run(self.run)
        return record is not None and record.pid == self.pid and record.host == this_host()

    def output(self) -> str:
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self._begins)
            return file.read(65_536).decode("utf-8", "replace")
        return ""


def train_plan(plan: Path, run: Path, cwd: Path) -> RunCommand:
    return RunCommand(words=("tightfit", "train", "--plan", str(plan), "--output", str(run)), cwd=str(cwd))
