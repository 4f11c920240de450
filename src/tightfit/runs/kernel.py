"""The kernel's record of an attempt: whom it killed for want of memory, and what the drivers reported.

Two sources, of which this user may be allowed neither: the kernel's log, and the counter of killed processes that the
memory group of this process has. Both are remembered at the start, so that only what comes later counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KMSG = Path("/dev/kmsg")
GROUPS = Path("/sys/fs/cgroup")
_RECORD_BYTES = 8192
_MOST_LINES = 2000
_KILLED = re.compile(r"[Kk]ill(?:ed)? process (?P<pid>\d+)[ ,]*\(?(?P<name>[\w.:-]*)")
_MEMORY = re.compile(r"out of memory|oom[-_]", re.IGNORECASE)
_DEVICES = re.compile(r"\bXid\b|amdgpu|fallen off the bus|I/O error|EXT4-fs|XFS|Hardware Error", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSaid:
    """What is known of an attempt."""

    lines: tuple[str, ...] = ()
    readable: bool = False
    """Whether a process that was killed for want of memory would be known."""


class KernelRecord:
    """Listens from its making on; `close` it."""

    def __init__(self, log: Path = KMSG, groups: Path = GROUPS, memberships: Path = Path("/proc/self/cgroup")) -> None:
        self._file: int | None = None
        with suppress(OSError):  # most users may not
            self._file = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
            self._readable()
        self._counter = _counter(groups, memberships)
        self._before = _kills(self._counter)

    def _readable(self) -> None:
        """Whether a read is allowed: opening alone does not tell."""
        assert self._file is not None
        try:
            os.read(self._file, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # older lines were overwritten
            return
        except OSError:
            os.close(self._file)
            self._file = None

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
        while self._file is not None and len(found) < _MOST_LINES:
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
    try:
        rows = [line.split(":", 2) for line in memberships.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    for _, kinds, path in rows:
        inside = path.lstrip("/")
        if "memory" in kinds.split(","):
            places = [groups / "memory" / inside / "memory.oom_control", groups / "memory" / "memory.oom_control"]
        elif not kinds:
            places = [groups / inside / "memory.events", groups / "memory.events"]
        else:
            continue
        for place in places:
            if _kills(place) is not None:
                return place
    return None


def _kills(counter: Path | None) -> int | None:
    if counter is None:
        return None
    try:
        found = re.search(r"^oom_kill (\d+)$", counter.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
