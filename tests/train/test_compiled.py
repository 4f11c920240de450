"""Torch's locks on what is compiled: one that is held is left alone, one that a killed process left is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.train.compiled import compiled_parts, left_locks, remove


def test_a_lock_is_left_when_nobody_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    assert left_locks(tmp_path) == ()
    with lock.open("w"):
        assert left_locks(tmp_path) == ()
    assert left_locks(tmp_path) == (lock,)
    assert remove((lock,)) == f"a process that was killed while it compiled had left {lock}: removed"
    assert not lock.exists()


def test_the_folder_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "parts"))
    assert compiled_parts() == tmp_path / "parts"


def test_ninja_is_found_though_nobody_activated_the_environment(tmp_path: Path) -> None:
    code = (
        "import shutil\nfrom tightfit.train.__main__ import _environment\n"
        "assert shutil.which('ninja') is None\n_environment()\nprint(shutil.which('ninja'))\n"
    )
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert Path(done.stdout.strip()).parent == Path(sys.executable).parent
