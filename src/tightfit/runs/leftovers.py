"""What dead runs of ours have left on this machine, and how it goes.

Nothing is taken for ours by its name alone. A run is ours by its record or lock; it is dead when the kernel gives its
lock to us and the process in its record has gone. A process is its worker when what it prints goes to the run's log.
Shared memory carries no run's name, so it must be of this user, called as torch, NCCL or DeepSpeed call theirs, made
while a dead run of ours lived, and in nobody's hands. What cannot be judged from here (another machine's run, another
user's) is left alone, and said.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tightfit.inputs.records import find_json, find_record
from tightfit.messages import Message, Said, say_why
from tightfit.owned import Ours, check_ours, find_strangers, flock, open_own, remove_file, remove_folder
from tightfit.runs.checkpoints import MANIFEST, STAGED, checked, newest_first, orphans, own_files, size_of
from tightfit.runs.folder import COMPILED, COMPILED_CACHE, DATA_BUILDING, DATA_CACHE, HALF, PLAN_STAGED, WEIGHTS_CACHE
from tightfit.runs.lock import LOCK, FolderLock, InUse, check_unlocked
from tightfit.runs.processes import PROC, began_at, every_pid, is_alive, mark_of, resident_bytes, this_host
from tightfit.runs.records import RunFolder, read_run
from tightfit.runs.reservations import Reservation
from tightfit.runs.watching import processes_of
from tightfit.types import ConfigError, TightfitError

Kind = Literal["process", "shared memory", "staging", "lock", "reservation", "cache"]
ORDER: tuple[Kind, ...] = ("process", "shared memory", "staging", "lock", "reservation", "cache")
"""Processes first: they hold the rest."""
DEPTH = 3  # folders below the one that is named, in which runs are looked for
MOST_FOLDERS = 20_000
SHM = Path("/dev/shm")  # noqa: S108 - it is read, and only what is known to be ours is removed
_SEGMENT = re.compile(
    r"torch_(?P<pid>\d+)_\d+(_\d+)?"  # torch's tensors between processes
    r"|nccl-\w{6}"
    r"|deepspeed_allreduce_buffer_\d+_.+_\d+_\d+"  # user, address, port, rank
)
GRACE_S = 10.0
SLACK_S = 10.0  # a segment may be a little older or younger than what its run has written
BUILDING = ".building-"
STAGING = ".tightfit-staging"
CACHES: dict[str, Ours | None] = {
    "calibration.json": None,
    "data": DATA_CACHE,
    "weights": WEIGHTS_CACHE,
    COMPILED: COMPILED_CACHE,
}
"""What can be made again, and what of each is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    kind: Kind
    what: Said  # a path, or `process 4711`
    because: Said
    bytes: int | None = None
    path: Path | None = None
    run: Path | None = None  # whose lock is held while it goes; None: nobody's
    pid: int | None = None
    mark: str | None = None  # see `mark_of`
    since: float = 0.0  # when the run began that it is of
    names: Ours | None = field(default=None, compare=False)  # what of a folder we wrote; None: it is a file


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLeftovers:
    leftovers: tuple[Leftover, ...]
    live: tuple[Path, ...]  # runs that live, and were left alone
    unsure: tuple[Said, ...]  # what cannot be judged from here, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRun:
    folder: Path
    first: float
    last: float  # when it was last heard of; both in seconds since the epoch


def runs_below(places: Iterable[Path]) -> list[Path]:
    """The folders of runs at and below these, not far down."""
    found: dict[Path, None] = {}
    budget = MOST_FOLDERS
    for place in places:
        level = [Path(os.path.realpath(place))]
        for _ in range(DEPTH + 1):
            below: list[Path] = []
            for folder in level:
                budget -= 1
                if budget < 0:
                    return list(found)
                if read_run(folder) is not None:
                    found[folder] = None
                    continue
                with suppress(OSError), os.scandir(folder) as entries:
                    inside = [each for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != "."]
                    below += sorted(Path(each.path) for each in inside)
            level = below
    return list(found)


def leftovers(places: Sequence[Path], cache: Path, *, caches: bool = False) -> FoundLeftovers:
    """Everything that may go. `cache`: our cache's folder; `caches`: what can be made again goes too."""
    live: list[Path] = []
    unsure: list[Said] = []
    dead: list[DeadRun] = []
    found: list[Leftover] = []
    # Runs that have reserved something, wherever they lie.
    entries = (find_record(path, Reservation) for path in _glob(cache / "reservations", "*.json"))
    folders = [Path(entry.folder) for entry in entries if entry is not None]
    folders = [folder for folder in folders if folder.is_absolute() and read_run(folder) is not None]
    reserved = [Path(os.path.realpath(folder)) for folder in folders]
    for run in dict.fromkeys([*runs_below(places), *reserved]):
        try:
            one = _dead(run)
        except InUse as error:
            record = read_run(run)
            if record is not None and record.host != this_host():
                unsure.append(error.who)
            else:
                live.append(run)
            continue
        except ConfigError as error:
            unsure.append(error.said)
            continue
        if one is None:
            live.append(run)
            continue
        dead.append(one)
        for process in processes_of(run):
            with suppress(OSError):
                if (PROC / str(process.pid)).stat().st_uid == os.geteuid():
                    found.append(
                        Leftover(
                            kind="process",
                            what=Message("runs.process", pid=process.pid),
                            because=Message("runs.of-ended-run", name=process.name.replace("-", " "), folder=run),
                            bytes=resident_bytes(process.pid),
                            pid=process.pid,
                            mark=mark_of(process.pid),
                        )
                    )
        found += _find_staging(run)
        if (lock := run / LOCK).exists():
            found.append(_thing("lock", lock, Message("runs.its-run-ended"), run=run))
    for path in _glob(cache / "reservations", "*.json"):
        entry = find_record(path, Reservation)
        if entry is not None and entry.host == this_host() and not is_alive(entry.pid, entry.mark):
            found.append(_thing("reservation", path, Message("runs.its-run-ended")))
    for path in _glob(cache, f"*/{BUILDING}*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not is_alive(int(pid), None):
            found.append(_thing("staging", path, Message("runs.half-built", pid=pid), DATA_BUILDING))
    if caches and not live:
        again = Message("runs.can-be-made-again")
        found += [_thing("cache", path, again, CACHES[path.name]) for path in cached_things(cache)]
    # What is ours throughout, and a sentence about each thing that is not.
    ours: list[Leftover] = []
    for each in found:
        strangers: list[Path] = []
        if each.path is not None and each.names:
            strangers = find_strangers(each.path, each.names)
        elif each.path is not None and (each.path.is_symlink() or not each.path.is_file()):
            strangers = [each.path]
        if not strangers:
            ours.append(each)
        elif strangers[0] == each.path:
            unsure.append(Message("runs.not-ours", path=each.path))
        else:
            unsure.append(Message("runs.not-ours-so-stays", path=strangers[0], folder=each.path))
    going = frozenset(each.pid for each in ours if each.pid is not None)
    ours += _segments(dead, going)
    ours.sort(key=lambda each: ORDER.index(each.kind))
    return FoundLeftovers(leftovers=tuple(ours), live=tuple(live), unsure=tuple(unsure))


def _dead(run: Path) -> DeadRun | None:
    """None: it lives. InUse: somebody holds its lock."""
    record = read_run(run)
    assert record is not None
    check_unlocked(run)
    if record.host != this_host():
        raise ConfigError(Message("runs.ran-elsewhere", run=run, host=record.host))
    if record.lives:
        return None
    try:
        files = [run / LOCK, RunFolder(run).events, RunFolder(run).record, *(run / "logs").glob("*.log")]
        times = [path.stat().st_mtime for path in files if path.exists()]
    except OSError as error:
        raise ConfigError(Message("runs.run-not-seen", run=run, why=say_why(error))) from None
    first = min(times) if record.started is None else record.started.timestamp()
    return DeadRun(folder=run, first=first, last=max(times))


def _find_staging(run: Path) -> list[Leftover]:
    """What was being written when its writer was killed. A checkpoint that was set aside to be replaced stays for as
    long as it is the only whole one of its step."""
    whole = set()
    for folder in newest_first(run):
        with suppress(TightfitError):
            checked(folder)
            whole.add(folder.name)
    places: dict[Path, Ours | None] = {
        path: own_files(path) or STAGED
        for path in orphans(run)
        if not path.name.endswith(".old") or path.name[1 : -len(".old")] in whole
    }
    places |= {run / name: STAGED for name in HALF} | {RunFolder(run).plan / STAGING: PLAN_STAGED}
    places |= dict.fromkeys([run / "run.new", *_glob(run, ".run.json.*.new"), *_glob(run / "attempts", "*.new")])
    return [
        _thing("staging", path, Message("runs.half-written"), names, run)
        for path, names in places.items()
        if os.path.lexists(path)
    ]


def _segments(dead: Sequence[DeadRun], going: frozenset[int]) -> list[Leftover]:
    """Of these runs. `going`: processes that are about to be ended, and whose hands do not count."""
    candidates = []
    for path in _glob(SHM, "*"):
        name = _SEGMENT.fullmatch(path.name)
        with suppress(OSError):
            seen = path.lstat()
            if name is None or not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
                continue
            within = [run for run in dead if run.first - 1 <= seen.st_mtime <= run.last + SLACK_S]
            run = max(within, key=lambda run: run.first, default=None)
            maker = None if name["pid"] is None else int(name["pid"])
            if run is None or (maker is not None and maker not in going and is_alive(maker, None)):
                continue
            candidates.append((path, seen, run))
    held = _list_open_files(min(run.first for _, _, run in candidates), going) if candidates else frozenset()
    if held is None:
        return []
    return [
        Leftover(
            kind="shared memory",
            what=str(path),
            because=Message("runs.in-nobodys-hands", folder=run.folder),
            bytes=seen.st_blocks * 512,
            path=path,
            since=run.first,
        )
        for path, seen, run in candidates
        if (seen.st_dev, seen.st_ino) not in held
    ]


def _list_open_files(since: float, going: frozenset[int] = frozenset()) -> frozenset[tuple[int, int]] | None:
    """Device and number of every file that a process of this user has open or in its memory; None: nobody can tell,
    since one of its processes may not be looked into. One that is older than the runs, as a container's first process
    is, has nothing of theirs."""
    found = set()
    for pid in every_pid():
        entry = PROC / str(pid)
        try:
            if entry.stat().st_uid != os.geteuid() or pid in going:
                continue
            for line in (entry / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith(f"{SHM}/"):
                    major, minor = (int(part, 16) for part in fields[3].split(":"))
                    found.add((os.makedev(major, minor), int(fields[4])))
            for fd in (entry / "fd").iterdir():
                with suppress(OSError):
                    seen = fd.stat()
                    found.add((seen.st_dev, seen.st_ino))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        except (OSError, ValueError):
            began = began_at(pid)
            if began is None or began >= since:
                return None
    return frozenset(found)


def cached_things(cache: Path) -> list[Path]:
    """What can be made again: measured corrections of plans, data as tokens, converted weights, code of layers."""
    found = []
    for path in (cache / name for name in CACHES):
        tree = None if path.is_dir() else find_json(path)
        if path.is_dir() or (isinstance(tree, dict) and {"schema", "tightfit", "entries"} <= set(tree)):
            found.append(path)
    return found


def _thing(kind: Kind, path: Path, because: Message, names: Ours | None = None, run: Path | None = None) -> Leftover:
    size = 0
    with suppress(OSError):
        size = size_of(path) if path.is_dir() and not path.is_symlink() else path.lstat().st_size
    return Leftover(kind=kind, what=str(path), because=because, bytes=size, path=path, run=run, names=names)


def _glob(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def remove(leftover: Leftover) -> Said | None:
    """Why it could not go; None: it is gone."""
    try:
        if leftover.pid is not None:
            return end(leftover.pid, leftover.mark)
        # Within a run's folder only for whoever holds its lock, and letting go removes that.
        with ExitStack() as held:
            if leftover.run is not None:
                held.callback(FolderLock.take(leftover.run).release)
            _away(leftover)
    except (OSError, ConfigError) as error:
        return say_why(error) if isinstance(error, OSError) else error.said
    return None


def _away(leftover: Leftover) -> None:
    path = leftover.path
    if path is None or leftover.kind == "lock":
        return
    if leftover.names is not None:
        if os.path.lexists(path):
            check_ours(path, leftover.names, Message("runs.stays-beside"))
            remove_folder(path, leftover.names, last=MANIFEST)
    elif leftover.kind == "cache":
        with open_own(path.with_suffix(".lock"), "ab") as lock:
            flock(lock.fileno())
            remove_file(path)
    elif leftover.kind == "shared memory":
        held, seen = _list_open_files(leftover.since), path.lstat()
        if held is None or (seen.st_dev, seen.st_ino) in held:
            raise ConfigError(Message("runs.a-process-holds-it"))
        path.unlink()
    else:
        remove_file(path)


def end(pid: int, mark: str | None, *, at_once: bool = False, grace_s: float = GRACE_S) -> Message | None:
    """End a process, if it is still the one that was meant: asked first, and where it is ours to decide, then ended."""
    asks = {} if at_once else {signal.SIGTERM: grace_s}
    # Whoever was killed takes no time of its own, but a busy kernel may.
    return _signal(pid, mark, {**asks, signal.SIGKILL: GRACE_S}, Message("runs.kernel-holds-it"))


def ask_to_end(pid: int, mark: str | None, grace_s: float = GRACE_S) -> Message | None:
    """SIGTERM alone, for what is not ours; why it still runs, or None."""
    return _signal(pid, mark, {signal.SIGTERM: grace_s}, Message("runs.still-runs", seconds=grace_s))


def _signal(pid: int, mark: str | None, graces_s: Mapping[signal.Signals, float], in_vain: Message) -> Message | None:
    """One signal after the other, for as long as it lives; why it still does, or None."""
    try:
        for what, grace_s in graces_s.items():
            if not is_alive(pid, mark):
                return None
            os.kill(pid, what)
            deadline = time.monotonic() + grace_s
            while is_alive(pid, mark) and time.monotonic() < deadline:
                time.sleep(0.05)
    except ProcessLookupError:
        return None
    except PermissionError:
        return Message("runs.another-users")
    return in_vain if is_alive(pid, mark) else None
