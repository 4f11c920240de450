"""Running a maker's tool so that nothing it does can hold us up.

A driver that is wedged stops its tool in the kernel, where not even SIGKILL reaches it, and a tool may leave children
behind that keep its pipes open. So the output goes to a file and not to a pipe, the whole process group is ended, and
whoever does not end is left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from tightfit.messages import Message, Said

TIMEOUT_S = 2.0
FORGIVE_S = 60.0
_MOST_OUTPUT = 8 * 2**20
_LAST_WAIT_S = 0.2
_CHILD = Path(__file__).parents[1] / "child.py"

BESIDE_PATH: dict[str, tuple[str, ...]] = {
    "nvidia-smi": ("/usr/lib/wsl/lib/nvidia-smi",),
    "amd-smi": ("/opt/rocm/bin/amd-smi",),
    "hy-smi": ("/opt/hyhal/bin/hy-smi", "/usr/local/hyhal/bin/hy-smi"),
    "rocm-smi": ("/opt/rocm/bin/rocm-smi",),
    "nvcc": ("/usr/local/cuda/bin/nvcc",),
}
"""Where the tools live when a login shell has not put them on PATH."""


class Silent(Exception):
    """A tool without an answer."""

    def __init__(self, said: Message | None = None, complaint: str = "") -> None:
        """`said`: why; None: it is not installed. `complaint`: all that it printed."""
        super().__init__(said)
        self.said, self.complaint = said, complaint


class HungTool(Silent):
    """A tool that did not answer in time: what else it is asked would hang as well."""


_hung: dict[str, float] = {}
"""Place of a tool → when it last hung. It is not asked again for a while: who asks next would hang as well."""


def place_of(tool: str) -> str | None:
    """Where the tool is; None: it is not installed."""
    beside = BESIDE_PATH.get(tool, ())
    return shutil.which(tool) or next((path for path in beside if os.access(path, os.X_OK)), None)


def ask(tool: str, *arguments: str, timeout_s: float | None = None) -> str:
    """A tool's output; Silent if it is missing, fails or hangs."""
    place = place_of(tool)
    if place is None:
        raise Silent
    if time.monotonic() - _hung.get(place, -FORGIVE_S) < FORGIVE_S:
        raise HungTool(Message("machine.tool-just-hung", tool=tool))
    try:
        return run(tool, [place, *arguments], timeout_s=timeout_s)
    except HungTool:
        _hung[place] = time.monotonic()
        raise


def ask_by(deadline: float, tool: str, *arguments: str) -> str:
    """The same by a moment of the monotonic clock: a tool may have to wake a driver, about a second a card."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise HungTool(Message("machine.tool-slow", tool=tool))
    return ask(tool, *arguments, timeout_s=left)


def run_child(name: Said, *arguments: str, timeout_s: float, flags: tuple[str, ...] = ()) -> str:
    """What `child.py` prints to a question that may hang."""
    return run(name, [sys.executable, *flags, str(_CHILD), *arguments], timeout_s)


def run(name: Said, command: list[str], timeout_s: float | None = None) -> str:
    """A command's output; `name`: what to call it in a sentence."""
    wait_s = TIMEOUT_S if timeout_s is None else timeout_s
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            problem = error.strerror or str(error)
            raise Silent(Message("machine.tool-not-started", tool=name, problem=problem)) from error
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise HungTool(Message("machine.tool-hung", tool=name, wait_s=wait_s)) from None
        finally:
            # end the whole group; a process that the kernel holds is not waited for
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WAIT_S)
        output, complaint = (_text(file) for file in (out, err))
    if code != 0:
        printed = (complaint + "\n" + output).strip()
        if not printed:
            raise Silent(Message("machine.tool-exit-code", tool=name, code=code))
        first = printed.splitlines()[0].strip().rstrip(".")[:200]
        raise Silent(Message("machine.tool-failed", tool=name, problem=first), printed)
    return output


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")
