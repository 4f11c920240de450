"""The desk is quick: it never loads torch, and the command costs little more than its dependencies."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import speed

from tightfit.model.load import load_model

pytestmark = pytest.mark.thorough

HEAVY = ("torch", "deepspeed", "transformers", "peft", "accelerate", "numpy")
MOST_PROCESS_RATIO = 3.0

ESTIMATE = """
import contextlib, io, json, sys
from tightfit.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(["estimate", "--model", "qwen2.5-7b", "--engine", "zero3", "--gpus", "8x80GB", *sys.argv[1:]])
print(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize("flags", [[], ["--json"], ["--compare"]], ids=["picture", "json", "compare"])
def test_an_estimate_never_loads_torch(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATE, *flags], capture_output=True, text=True, check=True, timeout=60
    )
    code, modules = json.loads(done.stdout)
    assert code == 0
    assert not [name for name in modules if name.split(".")[0] in HEAVY]


def test_the_sweep_asks_for_every_engine() -> None:
    asked = list(speed.sweep(load_model("tiny_mamba")))
    assert {levers.engine for levers in asked} == {"zero0", "zero1", "zero2", "zero3", "fsdp2"}


def test_the_search_of_a_job_is_timed() -> None:
    considered, seconds, fits = speed.search("tiny_llama", "full", "1x24GB", runs=1)
    assert considered > 0
    assert seconds > 0
    assert fits


@pytest.mark.slow
def test_the_whole_process_is_within_three_times_its_imports() -> None:
    command, imports = speed.whole_process()
    assert command <= MOST_PROCESS_RATIO * imports
