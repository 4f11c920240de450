"""What DeepSpeed compiles at its first use: where, and what is said meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import patience
from tightfit.messages import Message
from tightfit.train.engines.deepspeed import extensions_folder, join, report_meanwhile
from tightfit.train.place import Place

pytestmark = pytest.mark.thorough


def test_what_is_compiled_is_said_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.train.engines.deepspeed.LOOK_S", 0.01)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    said: list[Message] = []

    def until(text: str) -> None:
        end = patience.now() + 20
        while str(said[-1]) != text:
            assert patience.now() < end, said
            time.sleep(0.01)

    with report_meanwhile(Message("train.starting-deepspeed"), said.append):
        for part, usual in (("cpu_adam", "1 to 2 min"), ("odd", "a few min")):
            lock, begun = tmp_path / part / "lock", tmp_path / "begun"
            lock.parent.mkdir(exist_ok=True)
            begun.touch()
            began = time.mktime(time.strptime("2026-02-03 14:02", "%Y-%m-%d %H:%M"))
            os.utime(begun, (began, began))
            begun.rename(lock)
            until(f"compiling {part} since 14:02 (once; usually {usual})")
            (lock.parent / f"{part}.so").touch()
            until("starting DeepSpeed")
            lock.unlink()
    assert len(said) == 5, "each is said once"


def test_the_folder_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "parts"))
    assert extensions_folder() == tmp_path / "parts"


def test_what_inference_alone_asks_for_is_not_compiled(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    def load(*_: Any) -> None:
        raise AssertionError("it is compiled")

    monkeypatch.setattr(ShareMemCommBuilder, "load", load)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, ShareMemCommBuilder.NAME, True)
    monkeypatch.setattr(comm, "cdb", None)
    join(Place(rank=0, local_rank=0, world=1, device=mesh.device_type, launcher="python"))
    assert comm.cdb.shm_comm_op is None


def test_ninja_is_found_though_nobody_activated_the_environment(tmp_path: Path) -> None:
    code = (
        "import shutil\nfrom tightfit.train.__main__ import set_environment\n"
        "assert shutil.which('ninja') is None\nset_environment()\nprint(shutil.which('ninja'))\n"
    )
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert Path(done.stdout.strip()).parent == Path(sys.executable).parent
