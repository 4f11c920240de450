"""One start of somebody else's program: its output passed on and kept, its memory watched, and no process left behind.

The program is the first process of a session of its own, so that a Ctrl-C at the terminal reaches us alone and is
passed on once. Launchers start ranks in further sessions (torchrun does), which no signal to a group would reach:
every process of ours carries a mark in its environment, and is found by that.

It hangs when its output has not grown, and none of its processes has used the CPU or a GPU, for as long as the user
allows. A collective that spins on a GPU for ever looks busy from here, and is left to the trainer's own timeout.
Before it is ended, every process is asked where it stands: by py-spy where that is installed and may look; otherwise
the kernel tells what call each waits in, which is little, and says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from tightfit.hardware.machine import occupancy
from tightfit.hardware.probes import probe_cards
from tightfit.inputs.surroundings import inherited
from tightfit.messages import Message, say_why
from tightfit.owned import open_own
from tightfit.runs.cause import KernelRecord, KernelSaid
from tightfit.runs.processes import MARK, PROC, carriers_of, end_carriers, guard, resident_bytes, stat_of, tell
from tightfit.runs.run import Signals
from tightfit.types import ConfigError

GRACE_S = 15.0  # between being asked to end and being ended
LOOK_S = 0.05
HOST_EVERY_S, GPU_EVERY_S = 1.0, 5.0
_PIECE = 65_536
_LINE_S = 1.0  # for a line to be whole before it goes to the log
BUSY_SHARE = 0.05  # of a core, for all processes together: what agents and watchers use that only wait is less
STACKS = "stacks.txt"
_SPY_S = 20.0
_BATON = re.compile(r"\bwait \(\S*torch/utils/file_baton\.py")
_SPIED = re.compile(r"^    (?P<place>.+ \(.+:\d+\))$", re.MULTILINE)


@dataclass(slots=True)
class MemoryPeak:
    host_bytes: int = 0
    gpu_bytes: dict[str, int] = field(default_factory=dict)
    """By the word of the device; what our own processes hold, or where that is not told, all that is used."""
    own_bytes: int = 0  # the most that our own processes held of one GPU; 0: nobody said


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    code: int  # negative: the signal that ended it
    at: float
    asked: int | None  # the signal with which the user asked it to end; None: nobody did
    peak: MemoryPeak
    kernel: KernelSaid
    stuck: Stuck | None = None  # it was ended because it did not move any more; None: not for that


def start_and_stay(
    words: Sequence[str],
    changes: Mapping[str, str],
    streams: tuple[BinaryIO, BinaryIO],
    signals: Signals,
    *,
    mark: str,
    log: Path,
    hang_timeout_s: float | None = None,
) -> Gone:
    """Run it to its end, to the user's second signal, or until it hangs. `changes`: of its environment; `streams`:
    where its two outputs go on to; `mark`: by which its processes are known."""
    kernel = KernelRecord()
    try:
        with open_own(log, "wb") as kept, guard(mark):
            process = _spawn(words, {**changes, MARK: mark, "PYTHONUNBUFFERED": "1"})
            watch = ProcessWatch(mark, log, hang_timeout_s)
            lock = threading.Lock()
            assert process.stdout is not None
            assert process.stderr is not None
            pairs = zip((process.stdout, process.stderr), streams, strict=True)
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
        raise ConfigError(Message("external.cannot-start", program=words[0], why=say_why(error))) from None


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
    end_carriers(mark, grace_s)
    try:
        process.wait(grace_s)  # one whose environment nobody can read
    except subprocess.TimeoutExpired:
        tell(process.pid, signal.SIGKILL)
        process.wait()


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


class ProcessWatch:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
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
        size = self._log.stat().st_size if self._log.exists() else 0
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
