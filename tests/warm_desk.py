"""`tightfit …` as a process of its own, without the seconds in which one imports what it needs.

    done = warm_desk.run("estimate", "--model", "tiny_llama", env={...})
    process = warm_desk.Process("train", "--model", "tiny_llama", ranks=True)

One process has every verb's modules loaded and nothing else done; it forks a child for each command line. The child
has its own environment, folder, streams and exit code, as `python -W error -m tightfit` would; what `PYTHONPATH` names
comes first, for what is not imported yet. What else Python itself reads when it starts (`PYTHON…`, the locale) cannot
be told to a fork: then a process is started from scratch.

With `ranks` it is another process that forks, which has torch and the worker loaded too. Workers that its children
start are forked from them in turn: real processes and children of their desk, but with what they import there already.

As a script this file is that process: requests come in as lines of JSON through a socket, and answers go back.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import patience
from compiling import compile_part

LIMIT_S = 120.0
TURN_S = 300.0
READ_AT_START = ("PYTHON", "LC_", "LANG")
SOON = ("packaging.requirements", "tightfit.desk.advice", "tightfit.formats.render")
"""What verbs import when they come to it."""


def run(
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT_S,
    ranks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """One command line, to its end. `env`: all of it; None: this process's."""
    told = {name: value for name, value in (env or {}).items() if name.startswith(READ_AT_START)}
    if any(os.environ.get(name) != value for name, value in told.items() if name != "PYTHONPATH"):
        command = [sys.executable, "-W", "error", "-m", "tightfit", *words]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout)
    return _end(Process(*words, cwd=cwd, env=env, ranks=ranks), timeout)


def python(
    code: str, *words: str, env: Mapping[str, str] | None = None, ranks: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE WORDS`, to its end. With `ranks` torch, transformers and DeepSpeed are loaded when it begins."""
    return _end(Process(*words, env=env, ranks=ranks, code=code), LIMIT_S)


def _end(process: Process, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.words, process.returncode, out, err)


class Turn:
    """Several ranks train together, and no others beside them: in each layer they wait for one another, and for a
    processor each time where there are more of them than processors.

    All workers of pytest take turns; the trainings of one worker, which a test may start together, have one together.
    A turn ends with the process that has it, and is a courtesy: whoever has waited long enough goes ahead.
    """

    def __init__(self) -> None:
        path = Path(tempfile.gettempdir(), f"tightfit-tests-{os.getuid()}-ranks.lock")
        self._file, self._lock, self._held = FileLock(path, thread_local=False), threading.Lock(), 0

    def take(self) -> None:
        with self._lock:
            if not self._held:
                with suppress(Timeout):
                    self._file.acquire(TURN_S, poll_interval=0.02)
            self._held += 1

    def leave(self) -> None:
        with self._lock:
            self._held -= 1
            if not self._held:
                self._file.release()

    @contextmanager
    def taken(self, several: bool) -> Iterator[None]:
        if several:
            self.take()
        try:
            yield
        finally:
            if several:
                self.leave()


turn = Turn()


def growing() -> Iterator[float]:
    """Seconds between two looks at what may end at once, or not for long: to look costs something too."""
    pause = 0.005
    while True:
        yield pause
        pause = min(1.1 * pause, 0.05)


class Process:
    """A command line that runs, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        ranks: bool = False,
        worker: bool = False,
        code: str = "",
    ) -> None:
        """`worker`: it is no command line of the desk's, but one of `python -m tightfit.train`. `code`: nor is it that,
        but one of `python -c CODE`, in a session of its own."""
        self.words, self.returncode, self._server = words, None, server(ranks or worker)
        self._folder = tempfile.mkdtemp(prefix="tightfit-desk-")
        for name in ("out", "err"):
            Path(self._folder, name).touch()
        given = dict(os.environ if env is None else env)
        request = {"words": words, "cwd": str(cwd or Path.cwd()), "env": given}
        request |= {"into": self._folder, "worker": worker, "code": code}
        self._several = ranks and words[:1] == ("train",) and "--num-gpus" not in words
        if self._several:
            turn.take()
        self.pid: int = self._server.ask(request)
        self.returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
            if self.returncode is not None and self._several:
                turn.leave()
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        end, pauses = patience.now() + timeout, growing()
        while (code := self.poll()) is None:
            if patience.now() > end:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(next(pauses))
        return code

    def first_line(self, timeout: float = LIMIT_S) -> str:
        """Of what it prints, as soon as it stands there; all that there is, if it ends without one."""
        end = patience.now() + timeout
        while not (text := Path(self._folder, "out").read_text(encoding="utf-8")).count("\n") and self.poll() is None:
            if patience.now() > end:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(0.02)
        return text.partition("\n")[0]

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """What it said, once it has ended."""
        self.wait(timeout)
        out, err = (Path(self._folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, and forget what it said."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Server:
    """The process that forks, one for all workers of pytest: whoever needs it first starts it, and it ends when the
    last of them has gone."""

    def __init__(self, ranks: bool) -> None:
        self._lock, self._socket = threading.Lock(), socket.socket(socket.AF_UNIX)
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        path = Path(tempfile.gettempdir(), f"tightfit-{session}-{'ranks' if ranks else 'desk'}")
        with FileLock(f"{path}.lock"):
            if not self._connect(path):
                started = self._start(ranks, path)
                while not self._connect(path):
                    assert os.waitpid(started, os.WNOHANG) == (0, 0), "the process that forks did not start"
                    time.sleep(0.02)
        self._answers = self._socket.makefile(encoding="utf-8")
        atexit.register(self._socket.close)

    def _connect(self, path: Path) -> bool:
        try:
            self._socket.connect(str(path))
        except OSError:
            return False
        return True

    def _start(self, ranks: bool, path: Path) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        if ranks:
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        words = [*([] if ranks else ["-W", "error"]), __file__, str(path), *(["ranks"] if ranks else [])]
        return os.posix_spawn(sys.executable, [sys.executable, *words], environment)

    def ask(self, request: Mapping[str, object]) -> Any:
        """Start a command line and get its number; or poll one, for its exit code."""
        with self._lock:
            self._socket.sendall((json.dumps(request) + "\n").encode())
            answer = self._answers.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)


@functools.cache
def server(ranks: bool, /) -> Server:
    """One of each for all tests of this process."""
    if ranks:
        compile_part("cpu_adam")
    return Server(ranks)


# --- the process that forks -----------------------------------------------------------------------


def serve(path: Path, ranks: bool) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    door = socket.create_server(str(path), family=socket.AF_UNIX)
    load(ranks)
    asking: dict[socket.socket, Any] = {}
    while True:
        for ready in select.select([door, *asking], (), ())[0]:
            if ready is door:
                caller = door.accept()[0]
                asking[caller] = caller.makefile(encoding="utf-8")
            elif line := asking[ready].readline():
                ready.sendall((json.dumps(answer(json.loads(line), ranks)) + "\n").encode())
            else:
                asking.pop(ready).close()
                ready.close()
        with FileLock(f"{path}.lock") if not asking else nullcontext():  # nobody knocks now
            if not asking and not select.select([door], (), (), 0)[0]:
                path.unlink()
                Path(f"{path}.lock").unlink()
                os._exit(0)  # libraries have much to say when they are taken down


def answer(request: Mapping[str, Any], ranks: bool) -> int | None:
    if "poll" not in request:
        return fork(functools.partial(become, request, ranks))
    ended, status = os.waitpid(request["poll"], os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def load(ranks: bool) -> None:
    from tightfit.cli import VERBS
    from tightfit.diagnose.catalogue import catalogue
    from tightfit.job.file import job_from_flags

    os.dup2(2, 1)  # what libraries print while they are loaded is nothing that a test has said
    if ranks:
        sys.path.append(str(Path(__file__).parent / "train"))
        import warm

        warm.load()
    for module in (*VERBS.values(), *SOON):
        import_module(module)
    with suppress(ImportError):  # where the page is not installed
        import_module("tightfit.web.serve")
    catalogue()  # what is shipped is the same for all, and has many expressions to compile
    job_from_flags({"model": "tiny_llama"})  # and so is what checks a job
    gc.collect()
    gc.freeze()


def fork(work: Callable[[], int | str | None]) -> int:
    """A child that does this and ends as a Python script does; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a desk that forks has threads; none of them holds a lock
        child = os.fork()
    if child:
        return child
    code: int | str | None = 1
    try:
        gc.freeze()  # what is left of the parent would close files of the child when it is collected
        code = work()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)
    raise AssertionError


_parents: list[Any] = []
"""Streams of a parent's: what they still hold would be written, or their file closed, if they were let go."""


def take_streams(streams: Sequence[int], kept: Sequence[int] = ()) -> None:
    """Standard input, output and error; every other file of the parent is closed, but for those that are kept."""
    tempfile.tempdir = None  # a child may be told another one
    for number, file in enumerate([os.dup(file) for file in streams]):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # it was the listing itself
    _parents.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as it lives
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as it lives
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 - for as long as it lives


def take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    if hub := sys.modules.get("huggingface_hub.constants"):  # it has read this one when it was loaded
        hub.HF_HUB_OFFLINE = env.get("HF_HUB_OFFLINE", "0") == "1"


def become(request: Mapping[str, Any], ranks: bool) -> int:
    """The command line, in this child."""
    writes = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC
    into = request.get("into")
    files = [Path(into, name) for name in ("out", "err")] if into else [os.devnull, request["said"]]
    take_streams([os.open(os.devnull, os.O_RDONLY), *(os.open(file, writes) for file in files)])
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in request["env"])
    take_environment(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["tightfit", *request["words"]]
    if request.get("code"):
        os.setsid()
        subprocess.Popen = Forking
        exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the test's own words
        return 0
    if request["worker"]:
        if not request.get("draws"):
            draw_nothing()
        exec(request.get("first", ""), {})  # noqa: S102 - the test's own words
        from tightfit.train.__main__ import main as work

        return work(request["words"])
    Forking.workers = ranks
    subprocess.Popen = Forking
    if request["words"][:1] in (["train"], ["run"]):
        count_silence()
    from tightfit.cli import main

    code = main()
    atexit._run_exitfuncs()
    return code


def draw_nothing() -> None:
    """The pictures at the end of a training take as long as all of its steps, and say nothing about them."""
    from tightfit.train import pictures

    pictures.draw = lambda _: []


def count_silence() -> None:
    """A rank that waits for a processor is not silent: `--hang-timeout` is by the tests' clock from here on."""
    from tightfit.runs import hang, own
    from tightfit.runs.external import process

    own.Watch = functools.partial(own.Watch, clock=patience.now)
    process.Stillness = functools.partial(process.Stillness, clock=patience.now)
    hang.DUMP_S = 30.0


class Forking(subprocess.Popen):
    """Forks what is Python of ours and has nothing left to import, and starts anything else as ever."""

    workers = False
    """Whether torch is there too, and no thread of it."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, *more: Any,
    ) -> None:  # fmt: skip
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        main = self._main_of(args)
        if main is None:
            given = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *pipes)
            rest = (restore_signals, gid, gids, uid, umask, start_new_session, *more)
            super()._execute_child(args, *given, *rest)
            return

        def work() -> int | str | None:
            if start_new_session:
                os.setsid()
            given = enumerate((p2cread, c2pwrite, errwrite))
            take_streams([number if file == -1 else file for number, file in given], pass_fds)
            for number in signal.valid_signals():
                if signal.getsignal(number) not in (signal.SIG_DFL, None):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            subprocess.Popen = Forking.__bases__[0]
            take_environment(dict(os.environ) if env is None else env)
            os.chdir(cwd or Path.cwd())
            return main()

        self.pid = fork(work)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _main_of(self, args: Any) -> Callable[[], int | str | None] | None:
        """What is to be done in the child; None: it cannot be forked."""
        if not isinstance(args, (list, tuple)) or len(args) < 2 or args[0] != sys.executable:
            return None
        words, script = [str(word) for word in args[1:]], Path(str(args[1]))
        if words[:2] == ["-m", "tightfit.train"] and self.workers:
            return functools.partial(train, words[1:])
        if words[:2] == ["-m", "tightfit"] and self.workers:
            return functools.partial(run_desk, words[1:])
        if words[:2] == ["-m", GUARD]:
            return functools.partial(run_script, sys.modules[GUARD].__file__, words[1:])
        ours = script.parent == STAND_INS or (script == TRAINER and self.workers)
        return functools.partial(run_script, str(script), words) if ours else None


STAND_INS = Path(__file__).parent / "runs"
"""Where scripts are that take the place of a worker."""
TRAINER = Path(__file__).parent / "assets/hf_trainer.py"
GUARD = "tightfit.runs.processes"


def train(words: list[str]) -> int | str | None:
    sys.argv = words
    draw_nothing()
    from tightfit.train.__main__ import main

    return main(words[1:])


def run_desk(words: list[str]) -> int:
    """A command line that another one starts, with ranks of its own."""
    sys.argv = words
    subprocess.Popen = Forking
    count_silence()
    from tightfit.cli import main

    return main()


def run_script(path: str, words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), "ranks" in sys.argv)
