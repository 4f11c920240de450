"""One start of somebody else's program: its output passed on and kept, its memory watched, and no process left behind.

The program is the first process of a session of its own, so that a Ctrl-C at the terminal reaches us alone and is
passed on once. Launchers start ranks in further sessions (torchrun does), which no signal to a group would reach:
every process of ours carries a mark in its environment, and is found by that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from tightfit.hardware.machine import occupancy
from tightfit.inputs.surroundings import inherited
from tightfit.messages import Message
from tightfit.owned import open_own
from tightfit.runs.cause import KernelRecord, KernelSaid
from tightfit.runs.external.hang import Stillness, Stuck, ask_for_stacks
from tightfit.runs.processes import MARK, Guard, carriers_of, resident_bytes, tell, tell_one
from tightfit.runs.run import Signals
from tightfit.types import ConfigError

GRACE_S = 15.0  # between being asked to end and being ended
LOOK_S = 0.05
HOST_EVERY_S, GPU_EVERY_S = 1.0, 5.0
_PIECE = 65_536
_LINE_S = 1.0  # for a line to be whole before it goes to the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Where the program's two outputs go on to."""

    out: BinaryIO
    err: BinaryIO


@dataclass(slots=True)
class MemoryPeak:
    """The most that was seen of memory."""

    host_bytes: int = 0
    gpu_bytes: dict[str, int] = field(default_factory=dict)
    """By the word of the device; what our own processes hold, or where that is not told, all that is used."""
    own_bytes: int = 0  # the most that our own processes held of one GPU; 0: nobody said


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """How one start ended."""

    code: int  # negative: the signal that ended it
    at: float
    asked: int | None  # the signal with which the user asked it to end; None: nobody did
    peak: MemoryPeak
    kernel: KernelSaid
    stuck: Stuck | None = None  # it was ended because it did not move any more; None: not for that


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStart:
    """What is started, and how it is watched."""

    words: Sequence[str]
    changes: Mapping[str, str]  # of its environment
    mark: str  # by which its processes are known
    log: Path
    hang_timeout_s: float | None = None  # None: nobody asked whether it hangs


def start_and_stay(start: CommandStart, streams: Streams, signals: Signals) -> Gone:
    """Run it to its end, to the user's second signal, or until it hangs."""
    mark, log = start.mark, start.log
    kernel = KernelRecord()
    try:
        with open_own(log, "wb") as kept, Guard(mark):
            process = _spawn(start.words, {**start.changes, MARK: mark, "PYTHONUNBUFFERED": "1"})
            watch = ProcessWatch(mark, log, start.hang_timeout_s)
            lock = threading.Lock()
            assert process.stdout is not None
            assert process.stderr is not None
            pairs = ((process.stdout, streams.out), (process.stderr, streams.err))
            pumps = [threading.Thread(target=_pump, args=(*pair, kept, lock), daemon=True) for pair in pairs]
            for pump in pumps:
                pump.start()
            try:
                wish = _stay(process, mark, signals, watch)
            finally:
                pids = watch.pids | {process.pid}
                _end(process, mark, GRACE_S if signals.times < 2 else 0.0)
                for pump in pumps:
                    pump.join(timeout=GRACE_S)
        code, said = process.returncode, kernel.said(pids)
    finally:
        kernel.close()
    return Gone(code=code, at=time.time(), asked=wish, peak=watch.peak, kernel=said, stuck=watch.stuck)


def _spawn(words: Sequence[str], changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=inherited(changes),
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(Message("external.no-program", program=words[0])) from None
    except PermissionError:
        raise ConfigError(Message("external.may-not-run", program=words[0])) from None
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise ConfigError(Message("external.cannot-start", program=words[0], why=what)) from None


def _stay(process: subprocess.Popen[bytes], mark: str, signals: Signals, watch: ProcessWatch) -> int | None:
    """Until the program has ended or hangs; a signal is passed on, a second one ends the wait."""
    wish: int | None = None
    deadline = 0.0
    while process.poll() is None:
        if signals.caught and wish is None:
            wish, deadline = signals.caught[0][0], time.monotonic() + GRACE_S
            # as a terminal would do it: to every process
            tell(process.pid, signal.Signals(wish))
            for pid in carriers_of(mark):
                with suppress(ProcessLookupError, PermissionError):
                    if os.getpgid(pid) != process.pid:
                        os.kill(pid, wish)
        if wish is not None and (signals.times > 1 or time.monotonic() > deadline):
            return wish
        watch.look()
        if watch.stuck is not None:
            return wish
        time.sleep(LOOK_S)
    return wish


def _end(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> None:
    """Whatever is left of it: asked first, then ended."""
    deadline, told = time.monotonic() + grace_s, False
    while True:
        process.poll()
        left = carriers_of(mark)
        if not left and process.returncode is not None:
            return
        if not told:
            for pid in left:
                tell_one(pid, signal.SIGTERM)
            told = True
        elif time.monotonic() > deadline:
            for pid in left:
                tell_one(pid, signal.SIGKILL)
            tell(process.pid, signal.SIGKILL)
            process.wait()
        time.sleep(LOOK_S)


# --- its output ---------------------------------------------------------------------------------


def _pump(source: IO[bytes], sink: BinaryIO, log: BinaryIO, lock: threading.Lock) -> None:
    """A terminal that has closed, or a disk that is full, must not stop the program.

    The terminal gets every piece at once, the log whole lines: a diagnosis could not read those of which the halves
    are mixed with the other stream's. A line that takes long to end, as dots of a progress do, is passed on as it is.
    """
    begun, since = b"", time.monotonic()
    with source:
        while True:
            try:
                piece = os.read(source.fileno(), _PIECE)
            except OSError:
                piece = b""
            since = since if begun else time.monotonic()
            begun += piece
            is_long = len(begun) > _PIECE or time.monotonic() - since > _LINE_S
            end = len(begun) if not piece or is_long else max(begun.rfind(b"\n"), begun.rfind(b"\r")) + 1
            whole, begun = begun[:end], begun[end:]
            with lock:
                with suppress(OSError, ValueError):
                    log.write(whole)
                    log.flush()
                with suppress(OSError, ValueError):
                    sink.write(piece)
                    sink.flush()
            if not piece:
                return


# --- its memory ---------------------------------------------------------------------------------


class ProcessWatch:
    """What the program's processes hold, looked at from time to time."""

    def __init__(self, mark: str, log: Path, hang_timeout_s: float | None = None) -> None:
        self._mark, self._file, self._folder = mark, log.with_name("memory.jsonl"), log.parent
        self._still = None if hang_timeout_s is None else Stillness(log, hang_timeout_s)
        self.stuck: Stuck | None = None
        self._host_at = self._gpu_at = 0.0
        self._has_gpus: bool | None = None
        self.peak = MemoryPeak()
        self.pids: set[int] = set()  # all that were seen

    def look(self) -> None:
        now = time.monotonic()
        if now < self._host_at:
            return
        self._host_at = now + HOST_EVERY_S
        pids = carriers_of(self._mark)
        self.pids |= set(pids)
        host = sum(resident_bytes(pid) or 0 for pid in pids)
        self.peak.host_bytes = max(self.peak.host_bytes, host)
        gpus: dict[str, int] = {}
        if now >= self._gpu_at and self._has_gpus is not False:
            self._gpu_at = now + GPU_EVERY_S
            devices = occupancy().devices
            self._has_gpus = bool(devices)
            for device in devices:
                ours = [each.held_bytes for each in device.holders if each.pid in pids and each.held_bytes is not None]
                if ours:
                    gpus[device.word] = sum(ours)
                    self.peak.own_bytes = max(self.peak.own_bytes, sum(ours))
                elif device.total_bytes is not None and device.free_bytes is not None:
                    gpus[device.word] = device.total_bytes - device.free_bytes
            for word, size in gpus.items():
                self.peak.gpu_bytes[word] = max(self.peak.gpu_bytes.get(word, 0), size)
        with suppress(OSError), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 1), "host_bytes": host, "gpu_bytes": gpus}) + "\n")
        silent_s = None if self._still is None else self._still.look(pids)
        if silent_s is not None:
            self.stuck = ask_for_stacks(pids, silent_s, self._folder)
