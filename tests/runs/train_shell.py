"""`tightfit train` in this process, with a stand-in for the worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm_desk
from tightfit.cli import main
from tightfit.cli import train as cli_train

STAND_IN = Path(__file__).with_name("stand_in.py")
TINY = ("--model", "tiny_mamba", "--seq", "64", "--max-steps", "6")
DESK = (
    "import sys\n"
    "from tightfit import cli\n"
    "from tightfit.cli import train\n"
    "train.WORKER = (sys.executable, sys.argv[1], sys.argv[2])\n"
    "sys.exit(cli.main(['train', *sys.argv[3:]]))\n"
)


class Shell:
    """The command line in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.capsys, self.monkeypatch, self.folder = capsys, monkeypatch, folder

    def train(self, mode: str, *words: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(STAND_IN), mode))
        code = main(["train", *words])
        out, err = self.capsys.readouterr()
        return code, out, err

    def run(self, mode: str, *words: str) -> str:
        code, out, err = self.train(mode, *words)
        assert code == 0, err
        assert err == ""
        return out

    def refused(self, *words: str, mode: str = "good") -> str:
        code, out, err = self.train(mode, *words)
        assert code == 2, out
        assert out == ""
        assert err.startswith("tightfit: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """Its ranks are forked: they have nothing left to import."""
    monkeypatch.setattr(subprocess, "Popen", warm_desk.Forking)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Shell(capsys, monkeypatch, work)


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"told-{rank}.json").read_text())
    return found


@contextmanager
def desk(mode: str, *words: str, cache: Path, worker: Path = STAND_IN) -> Iterator[warm_desk.Process]:
    """The same as a process of its own."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "100"}
    process = warm_desk.Process(str(worker), mode, *words, env=env, code=DESK)
    try:
        yield process
    finally:
        process.kill()
