"""Many real workers in little time.

A worker spends its first seconds on importing torch, transformers and DeepSpeed. Here one process does so once and
forks a child for each rank that is asked for; the child is the worker from its `main` on, with its own environment,
its own standard error and its own exit code.

    codes = Warm().run(["worker.json"], [Rank(environment, said) for environment in environments])

As a script this file is that process: requests come in as lines of JSON, and answers go out the same way.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a script has only its own folder

import patience

GRACE_S = 20.0
"""For the ranks that are left when one has failed; a launcher would end them too."""
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Rank:
    environment: Mapping[str, str]
    """All of it."""
    said: str
    """The file that takes its standard error."""
    first: str = ""
    """Python that the child executes before the worker begins."""


class Warm:
    """Asks the process that forks."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **threads},
        )

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=LIMIT_S)
        self._process.stdout.close()

    def run(self, argv: Sequence[str], ranks: Sequence[Rank]) -> list[int]:
        """The exit codes of the ranks, once all have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": list(argv), "ranks": [asdict(rank) for rank in ranks]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        codes: list[int] = json.loads(answer)
        return codes


def serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print while they are loaded is no answer
    load()
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(request["argv"], Rank(**rank)) for rank in request["ranks"]]
        os.write(answers, (json.dumps(_wait(children)) + "\n").encode())


def load() -> None:
    """All that every child would do alike, short of what starts threads: those do not live on in a fork."""
    import deepspeed  # noqa: F401
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


def _fork(argv: list[str], rank: Rank) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = _child(argv, rank)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _child(argv: list[str], rank: Rank) -> int:
    said = os.open(rank.said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, target in ((0, nothing), (1, nothing), (2, said)):
        os.dup2(target, number)
    os.environ.clear()
    os.environ.update(rank.environment)
    exec(rank.first, {})  # noqa: S102 - the test's own words
    from tightfit.train.__main__ import main

    return main(argv)


def _wait(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    end = patience.now() + LIMIT_S
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if patience.now() > end:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, patience.now() + GRACE_S)
        time.sleep(0.005)
    return [codes[child] for child in children]


if __name__ == "__main__":
    serve()
