"""Real workers of which one is killed after a chosen call to the disk.

    ran = Server().run(plan, kill=Kill(rank=0, after=17))

They are forked (see `warm.py`). A child counts the calls by which a save changes the disk and notes each in a file,
so that another one can be killed with SIGKILL after any of them.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plain import write_examples
from running import Ran, edit, environments, read_run, write_plan
from warm import Rank, run_workers

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PARAMETERS = 10_544
SAYS_WHEN = ("written", "itself")
"""Fields of a manifest that are others at every writing."""

PLAIN = ("make_folder", "make_new_folder", "open_to_write", "sync", "rename", "remove_file")
"""Functions of `tightfit.runs.disk` that are one call to the system each. The others are counted from within:
`create` (the file is there, then it has its size), `put` (half of it, then all), `remove_folder` (each file, each
folder), `by_library` (each file that a library opens, and its end); `write_text` and `sync_path` call the former."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The rank that ends, and the number of its call to the disk after which it does."""

    rank: int
    after: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the disk, as it was noted."""

    number: int
    kind: str
    path: str


@dataclass(frozen=True)
class Forked(Ran):
    calls: list[list[Call]] = field(default_factory=list)
    """Of each rank, in order."""


class Server:
    """Workers that count their calls to the disk."""

    def run(
        self,
        plan: Path,
        *options: str,
        kill: Kill | None = None,
        meddle: str | None = None,
        cache: Path | None = None,
        launcher: str = "tests",
    ) -> Forked:
        """The ranks of a plan, to their end. `meddle`: Python that each child executes first."""
        orders = json.loads((plan / "worker.json").read_text())
        ranks = []
        for rank, environment in enumerate(environments(orders["world"]["ranks"], cache or plan / "cache")):
            after = kill.after if kill is not None and kill.rank == rank else None
            first = f"import forking\nforking.count({str(plan / f'calls-{rank}')!r}, {after})\n{meddle or ''}"
            ranks.append(Rank({**environment, "TIGHTFIT_LAUNCHER": launcher}, str(plan / f"said-{rank}"), first))
        codes = run_workers([str(plan / "worker.json"), *options], ranks)
        ran = read_run(Path(orders["saving"]["folder"]), codes, [Path(rank.said) for rank in ranks])
        calls = [read_calls(plan / f"calls-{rank}") for rank in range(len(ranks))]
        return Forked(ran.folder, ran.codes, ran.events, ran.stderr, calls)


def read_calls(path: Path) -> list[Call]:
    found = [line.split("\t") for line in path.read_text().splitlines()]
    return [Call(int(number), kind, where) for number, kind, where in found]


# --- what is trained, and what is left --------------------------------------------------------------


def small_plan(
    folder: Path, world: int, *, steps: int, data: Path | None = None, engine: str = "fsdp2", **flags: Any
) -> Path:
    """A plan for a model of a thousandth of the smallest preset, which saves after every step."""
    plan = write_plan(
        folder,
        world,
        model="tiny_llama",
        engine=engine,
        precision="bf16",
        seq=32,
        effective_batch=2,
        micro_batch=1,
        max_steps=steps,
        learning_rate=3e-3,
        data=str(data or write_examples(folder / "examples.jsonl")),
        **flags,
    )
    shape = {f"model__config__{name}": value for name, value in SMALL.items()}
    edit(plan, **shape, model__parameters=PARAMETERS, predicted__trainable_parameters=PARAMETERS)
    return edit(plan, saving__every_steps=1, saving__keep_last=99, saving__async_save=False)


def checkpoints_of(run: Path) -> dict[int, Path]:
    return {int(folder.name[5:]): folder for folder in (run / "checkpoints").glob("step-*")}


def contents(folder: Path) -> dict[str, object]:
    """Every file's bytes, and of a manifest what does not speak of the hour."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    if "manifest.json" in found:
        with suppress(ValueError):
            tree = json.loads((folder / "manifest.json").read_text())
            found["manifest.json"] = {key: value for key, value in tree.items() if key not in SAYS_WHEN}
    return found


# --- in the child --------------------------------------------------------------------------------


class Counter:
    """Notes every call to the disk, and ends the process after one of them."""

    def __init__(self, notes: Path, after: int | None) -> None:
        self._file = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC)
        self._after, self._count, self._lock = after, 0, threading.Lock()

    def done(self, kind: str, path: object) -> None:
        with self._lock:
            self._count += 1
            os.write(self._file, f"{self._count}\t{kind}\t{path}\n".encode())
            if self._count == self._after:
                os.kill(os.getpid(), signal.SIGKILL)


class Interposed(threading.local):
    """What of `tightfit.runs.disk` this thread is in, and where that is at work."""

    inside: str | None = None
    path: object = None
    begun: object = None
    """The file whose first bytes were halved: the others of its parts are of the same kind."""


def count(notes: str, after: int | None) -> None:
    """From here on this process notes its calls, and ends after the one with this number."""
    interpose(Counter(Path(notes), after))


def interpose(counter: Counter) -> None:
    from tightfit.runs import disk

    at = Interposed()
    for name in PLAIN:
        setattr(disk, name, _after(getattr(disk, name), name, counter))
    disk.create = _within(disk.create, "create", at)
    disk.remove_folder = _within(disk.remove_folder, "remove_folder", at)
    disk.by_library = _within(disk.by_library, "by_library", at, counter)
    put = disk.put

    def halves(descriptor: int, data: memoryview, offset: int) -> None:
        path = _path_of(descriptor)
        if at.begun != path:
            put(descriptor, data[: len(data) // 2], offset)
            counter.done("put.half", path)
            at.begun = path
        put(descriptor, data, offset)
        counter.done("put", path)

    disk.put = halves
    for name, kind in (("unlink", "remove_folder.file"), ("rmdir", "remove_folder.folder")):
        setattr(os, name, _removing(getattr(os, name), kind, at, counter))
    truncate = os.ftruncate

    def sized(descriptor: int, size: int) -> None:
        if at.inside == "create":
            counter.done("create.empty", _path_of(descriptor))
        truncate(descriptor, size)
        if at.inside == "create":
            counter.done("create", _path_of(descriptor))

    os.ftruncate = sized
    builtins.open = _after(builtins.open, "by_library.open", counter, lambda: at.inside == "by_library")


def _after(
    function: Callable[..., Any], kind: str, counter: Counter, counts: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if counts():
            counter.done(kind, " ".join(str(_path_of(each)) for each in args[: 2 if kind == "rename" else 1]))
        return found

    return call


def _removing(function: Callable[..., Any], kind: str, at: Interposed, counter: Counter) -> Callable[..., Any]:
    def call(path: Any, **options: Any) -> None:
        function(path, **options)
        if at.inside == "remove_folder":
            counter.done(kind, f"{at.path}/{path}")

    return call


def _within(
    function: Callable[..., Any], kind: str, at: Interposed, counter: Counter | None = None
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        at.inside, at.path = kind, args[0 if kind == "remove_folder" else -1]
        try:
            found = function(*args, **options)
        finally:
            at.inside = None
        if counter is not None:
            counter.done(kind, args[-1])
        return found

    return call


def _path_of(what: object) -> object:
    return os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what
