"""The GPU's kernels, interpreted: what they compute, not how fast. Bounds as in test_scan."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BOUND = {"bf16": 4e-3, "fp16": 5e-4}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compute_what_the_definition_says() -> None:
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, errors in json.loads(done.stdout.splitlines()[-1]).items():
        assert errors.pop("same bits", 1) == 1, case
        too_large = {name: error for name, error in errors.items() if not error < BOUND.get(case, 1e-5)}
        assert too_large == {}, case


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_so_do_those_for_nvidias_cards(tmp_path: Path) -> None:
    script = Path(__file__).with_name("emulated.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for case, errors in json.loads(done.stdout.splitlines()[-1]).items():
        too_large = {name: error for name, error in errors.items() if not error < BOUND.get(case, BOUND["bf16"])}
        assert too_large == {}, case
