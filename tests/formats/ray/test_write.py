"""`ray_train.py`: what it asks of Ray, and that it trains on a Ray cluster of this machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ports import reserve_port
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Job
from tightfit.messages import LANGUAGES, Language, speak
from tightfit.planner.plan import Plan
from tightfit.types import Levers

MakePlan = Callable[..., Plan]


def program_of(make_plan: MakePlan, gpus: str) -> str:
    plan = make_plan(Levers(engine="fsdp2"), parse_hardware(gpus), Job(model="qwen2.5-7b"))
    return render(plan, Target(cluster="ray", port=29777))["ray_train.py"]


@pytest.mark.parametrize("gpus", ["8xA100-80GB", "2x8xK100-64GB"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_it_is_python(make_plan: MakePlan, gpus: str, language: Language) -> None:
    speak(language)
    try:
        text = program_of(make_plan, gpus)
    finally:
        speak("en")
    assert ast.parse(text).body


def test_it_asks_for_a_gpu_for_each_rank(make_plan: MakePlan) -> None:
    text = program_of(make_plan, "2x8xA100-80GB")
    assert 'ScalingConfig(num_workers=16, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 1})' in text
    assert 'os.environ.get("MASTER_PORT", "29777")' in text
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "VISIBLE_DEVICES" not in text, "Ray's choice must stand"


def test_without_the_target_there_is_no_program(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="fsdp2"), parse_hardware("8xA100-80GB"), Job(model="qwen2.5-7b"))
    assert "ray_train.py" not in render(plan, Target())


@pytest.mark.slow
def test_ray_trains_it_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'tightfit[ray]'")
    folder = tmp_path / "plan"
    small = ["--model", "tiny_llama", "--seq", "64", "--effective-batch", "4", "--max-steps", "3", "--world", "2"]
    writes = ["--write", str(folder), "--target", "ray", "--port", reserve_port()]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": ""}
    plan = [sys.executable, "-m", "tightfit", "plan", *small, *writes]
    planned = subprocess.run(plan, env=env, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr
    assert f"ray job submit -- python {folder / 'ray_train.py'}" in planned.stdout
    start = [sys.executable, str(folder / "ray_train.py")]
    done = subprocess.run(start, env=env, capture_output=True, text=True, check=False, timeout=300, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks started by ray" in done.stdout + done.stderr
    assert (folder / "output" / "model" / "config.json").exists()
    # A finished run is not begun again: the worker's own exit code comes out, after one attempt.
    again = subprocess.run(start, env=env, capture_output=True, text=True, check=False, timeout=300, cwd="/")
    assert again.returncode == 2, again.stdout + again.stderr
    assert (again.stdout + again.stderr).count("holds a finished run") == 1
