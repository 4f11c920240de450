"""`tightfit …` as a process of its own, without the second in which one imports what it needs.

    done = warm_desk.run("estimate", "--model", "tiny_llama", env={...})

One process has every verb's modules loaded and nothing else done; it forks a child for each command line. The child
has its own environment, folder, streams and exit code, as `python -W error -m tightfit` would. What Python itself reads
when it starts (`PYTHON…`, the locale) cannot be told to a fork: then a process is started from scratch.

As a script this file is that process: requests come in as lines of JSON, and answers go out the same way.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # a script of another folder imports this

import patience

LIMIT_S = 120.0


def run(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """One command line, to its end. `env`: all of it; None: this process's."""
    given = dict(os.environ if env is None else env)
    if read_at_start(given) != read_at_start(os.environ):
        command = [sys.executable, "-W", "error", "-m", "tightfit", *words]
        return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        request = {"words": words, "cwd": str(cwd or Path.cwd()), "env": given, "into": folder, "limit_s": timeout}
        code = server().ask(request)
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout, out, err)
    return subprocess.CompletedProcess(words, code, out, err)


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG"))}


class Server:
    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: Mapping[str, object]) -> int | None:
        """The exit code; None: it did not end in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        code: int | None = json.loads(answer)
        return code

    def end(self) -> None:
        self._process.communicate()


@functools.cache
def server() -> Server:
    """One for all tests of this process."""
    started = Server()
    atexit.register(started.end)
    return started


# --- the process that forks -----------------------------------------------------------------------


def serve() -> None:
    from tightfit.cli import VERBS

    for module, _ in VERBS.values():
        import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
        sys.stdout.write(json.dumps(wait(child, request["limit_s"])) + "\n")
        sys.stdout.flush()


def wait(child: int, limit_s: float) -> int | None:
    end = patience.now() + limit_s
    while patience.now() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def become(request: Mapping[str, object]) -> None:
    """The command line, in this child; never comes back."""
    code: object = 1
    try:
        into = Path(str(request["into"]))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(into / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        sys.stdin = io.TextIOWrapper(io.FileIO(0))
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w")), encoding="utf-8", line_buffering=True)
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        os.chdir(str(request["cwd"]))
        sys.argv = ["tightfit", *request["words"]]  # type: ignore[misc]
        from tightfit.cli import main

        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    serve()
