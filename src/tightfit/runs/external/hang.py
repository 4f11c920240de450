"""Somebody else's program that does not move any more: seen from outside, for it gives no signs of life of its own.

It hangs when its output has not grown, and none of its processes has used the CPU or a GPU, for as long as the user
allows. A collective that spins on a GPU for ever looks busy from here, and is left to the trainer's own timeout.
Before it is ended, every process is asked where it stands: by py-spy where that is installed and may look; otherwise
the kernel tells what call each waits in, which is little, and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.hardware.probes import probe_cards
from tightfit.messages import Message
from tightfit.runs.processes import PROC, stat_of

BUSY_SHARE = 0.05  # of a core, for all processes together: what agents and watchers use that only wait is less
STACKS = "stacks.txt"
_SPY_S = 20.0
_BATON = re.compile(r"\bwait \(\S*torch/utils/file_baton\.py")
_SPIED = re.compile(r"^    (?P<place>.+ \(.+:\d+\))$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A program that was ended because it did not move any more."""

    silent_s: float
    stands: tuple[tuple[int, str], ...]  # a line for each process: where it stands
    how: Message  # who said so, and what could not be said
    told: bool  # whether the Python stacks are known
    waits_for_a_build: bool  # whether one waits for torch's lock on a part that is compiled


class Stillness:
    """Notes when the program last did anything."""

    def __init__(
        self,
        log: Path,
        timeout_s: float,
        uses_gpu: Callable[[Sequence[int]], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._timeout, self._clock = log, timeout_s, clock
        self._uses_gpu = uses_gpu or uses_a_gpu
        self._size = -1
        self._spent: dict[int, float] = {}
        self._moved = self._looked = clock()

    def look(self, pids: Sequence[int]) -> float | None:
        """For how many seconds nothing has moved, where that is too long."""
        now, before = self._clock(), self._looked
        self._looked = now
        size = _size(self._log)
        spent = {pid: 0.0 if (stat := stat_of(pid)) is None else stat.cpu_s for pid in pids}
        used = sum(max(0.0, seconds - self._spent.get(pid, 0.0)) for pid, seconds in spent.items())
        busy = used > BUSY_SHARE * max(now - before, 1e-3)
        if size != self._size or busy or set(spent) != set(self._spent):
            self._moved = now
        self._size, self._spent = size, spent
        if now - self._moved <= self._timeout:
            return None
        if self._uses_gpu(pids):
            self._moved = now
            return None
        return now - self._moved


def uses_a_gpu(pids: Sequence[int]) -> bool:
    """Whether a card computes on which one of these is; where nobody says who is on a card, whether any does."""
    ours = set(pids)
    for card in probe_cards().cards:
        on_it = card.processes is None or any(each.pid in ours for each in card.processes)
        if on_it and (card.use_percent or 0) > 0:
            return True
    return False


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


# --- where they stand ---------------------------------------------------------------------------


def ask_for_stacks(pids: Sequence[int], silent_s: float, place: Path) -> Stuck:
    """Ask for the stacks of all processes, and keep what was said in the attempt's folder."""
    spy = shutil.which("py-spy")
    stands, texts, mute = [], [], 0
    for pid in sorted(pids):
        said, command = "", ""
        if spy is not None and _is_python(pid):
            asked = [spy, "dump", "--pid", str(pid)]
            with suppress(OSError, subprocess.TimeoutExpired):
                done = subprocess.run(
                    asked, capture_output=True, text=True, errors="replace", timeout=_SPY_S, check=False
                )
                said = done.stdout if done.returncode == 0 else ""
        if said.strip():
            frames = _SPIED.findall(said)
            stands.append((pid, frames[0] if frames else "no Python frame"))
        else:
            mute += _is_python(pid)
            # the call in which the process waits, and the kernel's own stack where this user may read it
            entry, found = PROC / str(pid), []
            with suppress(OSError):
                name = (entry / "wchan").read_text(encoding="ascii", errors="replace").strip()
                found.append(f"waits in {name}" if name not in ("", "0") else "waits in no call of the kernel")
            with suppress(OSError):
                found += (entry / "stack").read_text(encoding="ascii", errors="replace").splitlines()
            said = "\n".join(found)
            stands.append((pid, said.splitlines()[0] if said else "gone"))
        with suppress(OSError):
            words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
            command = words.decode(errors="replace").strip()
        texts.append(f"--- process {pid}: {command}\n{said}\n")
    with suppress(OSError):
        (place / STACKS).write_text("\n".join(texts), encoding="utf-8")
    how = Message("external.by-py-spy")
    if spy is None:
        how = Message("external.without-py-spy")
    elif mute:
        how = Message("external.py-spy-may-not")
    waits = any(_BATON.search(text) for text in texts)
    told = spy is not None and not mute
    return Stuck(silent_s=silent_s, stands=tuple(stands), how=how, told=told, waits_for_a_build=waits)


def _is_python(pid: int) -> bool:
    with suppress(OSError):
        return "python" in os.path.basename((PROC / str(pid) / "exe").readlink())
    return False
