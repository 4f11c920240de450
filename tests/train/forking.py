"""Many real workers in little time, and one that is killed after a chosen call to the disk.

A worker spends its first seconds on importing torch and transformers. Here one process does so once and forks a child
for each rank that is asked for; the child is the worker from its `main` on, with its own environment and exit code.

    with Server() as server:
        ran = server.run(plan, kill=Kill(rank=0, after=17))

A child counts the calls by which a save changes the disk and notes each in a file, so that another one can be killed
with SIGKILL after any of them. As a script this file is the server: requests come in as lines of JSON, and answers go
out the same way.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plain import write_examples
from running import Ran, edit, write_plan

GRACE_S = 20.0
"""For the ranks that are left when one is gone; a launcher would end them too."""
LIMIT_S = 120.0

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

PLAIN = ("make_folder", "open_to_write", "sync", "rename", "remove_file")
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
    """Asks the process that forks."""

    def __enter__(self) -> Server:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **threads, "TIGHTFIT_LAUNCHER": "tests"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=LIMIT_S)
        self._process.stdout.close()

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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        orders = json.loads((plan / "worker.json").read_text())
        run, world = Path(orders["saving"]["folder"]), orders["world"]["ranks"]
        request = {
            "argv": [str(plan / "worker.json"), *options],
            "world": world,
            "notes": str(plan),
            "cache": str(cache or plan / "cache"),
            "kill": None if kill is None else asdict(kill),
            "meddle": meddle,
            "launcher": launcher,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server that forks has ended"
        said = [(plan / f"said-{rank}").read_text() for rank in range(world)]
        calls = [read_calls(plan / f"calls-{rank}") for rank in range(world)]
        log = run / "events.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return Forked(run, json.loads(answer)["codes"], events, said, calls)


def read_calls(path: Path) -> list[Call]:
    found = [line.split("\t") for line in path.read_text().splitlines()]
    return [Call(int(number), kind, where) for number, kind, where in found]


# --- what is trained, and what is left --------------------------------------------------------------


def small_plan(folder: Path, world: int, *, steps: int, data: Path | None = None) -> Path:
    """A plan for a model of a thousandth of the smallest preset, which saves after every step."""
    plan = write_plan(
        folder,
        world,
        model="tiny_llama",
        engine="fsdp2",
        precision="bf16",
        seq=32,
        effective_batch=2,
        micro_batch=1,
        max_steps=steps,
        learning_rate=3e-3,
        data=str(data or write_examples(folder / "examples.jsonl")),
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
    def call(*args: Any) -> Any:
        at.inside, at.path = kind, args[-1]
        try:
            found = function(*args)
        finally:
            at.inside = None
        if counter is not None:
            counter.done(kind, args[-1])
        return found

    return call


def _path_of(what: object) -> object:
    return os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what


# --- the server ----------------------------------------------------------------------------------


def serve() -> None:
    _warm()
    for line in sys.stdin:
        request = json.loads(line)
        os.write(1, (json.dumps({"codes": _wait(_fork(request))}) + "\n").encode())


def _warm() -> None:
    """All that every child would do alike, short of what starts threads: those do not live on in a fork."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import tightfit.train.__main__
    import tightfit.train.engines.fsdp2
    import tightfit.train.worker  # noqa: F401
    from tightfit.train.data import load_tokenizer
    from tightfit.train.saved_names import saved_parts

    torch.set_num_threads(1)
    load_tokenizer(None, 10**6, trust_remote_code=False)
    with torch.device("meta"):
        saved_parts(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1)))
    gc.collect()
    gc.freeze()


def _fork(request: Mapping[str, Any]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(request["world"]):
        child = os.fork()
        if child == 0:
            try:
                _child(request, rank, port)
            finally:
                os._exit(99)
        children.append(child)
    return children


def _child(request: Mapping[str, Any], rank: int, port: int) -> None:
    notes, kill = Path(request["notes"]), request["kill"]
    said = os.open(notes / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, target in ((0, nothing), (1, nothing), (2, said)):
        os.dup2(target, number)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["world"], "LOCAL_WORLD_SIZE": request["world"]}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), XDG_CACHE_HOME=request["cache"])
    os.environ["TIGHTFIT_LAUNCHER"] = request["launcher"]
    interpose(Counter(notes / f"calls-{rank}", kill["after"] if kill and kill["rank"] == rank else None))
    if request["meddle"]:
        exec(request["meddle"], {})  # noqa: S102 - the test's own words
    from tightfit.train import pictures
    from tightfit.train.__main__ import main

    pictures.draw = lambda _: []  # a second that says nothing about the disk
    main(request["argv"])


def _wait(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.005)
    return [codes[child] for child in children]


if __name__ == "__main__":
    serve()
