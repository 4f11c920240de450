"""`tightfit run`: what a command held against its prediction, kept for the next; and GPUs that others hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_wait_for_gpu import UUID, Card, later

import warm_desk
from tightfit.diagnose.verdict import OomNumbers, Verdict
from tightfit.hardware.words import parse_hardware
from tightfit.planner.calibration import Calibration, Entry
from tightfit.planner.step_down import Shortfall
from tightfit.runs.external.command import recognise
from tightfit.runs.external.config import ExternalTraining, read_training
from tightfit.runs.external.process import MemoryPeak
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.start import machine as start_machine
from tightfit.start.external import KnownTraining, Planner, prediction
from tightfit.start.machine import wait_for_gpus

GIB = 2**30
YAML = """model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: lora
lora_target: all
template: qwen
dataset: mine
cutoff_len: 1024
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
bf16: true
output_dir: saves
deepspeed: ds.json
"""


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExternalTraining:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    return read_training(recognise(("llamafactory-cli", "train", "x.yaml")))


def planner(kept: list[Entry], calibration: Calibration | None) -> Planner:
    return Planner(hardware=parse_hardware("8xA100-80GB"), calibration=calibration, keep=kept.append)


def known_by(planner: Planner, external: ExternalTraining) -> KnownTraining:
    known = planner.known(external)
    assert isinstance(known, KnownTraining)
    return known


# --- measured against predicted -------------------------------------------------------------------


@pytest.mark.thorough
def test_more_than_was_predicted_is_counted_in_the_next_time(external: ExternalTraining) -> None:
    kept: list[Entry] = []
    first = planner(kept, Calibration())
    gpu = known_by(first, external).priced.footprint.gpu
    first.learn(external, MemoryPeak(own_bytes=gpu.required_bytes + 3 * GIB))
    assert len(kept) == 1
    assert kept[0].measured[0].error_bytes == 3 * GIB
    second = known_by(planner([], Calibration(entries=tuple(kept))), external)
    assert second.priced.footprint.gpu.peak_bytes == gpu.peak_bytes + 3 * GIB
    assert "Earlier runs held 3.0 GiB more than predicted: counted in." in prediction(second)


@pytest.mark.parametrize("held", [0, 2 * GIB])
def test_less_proves_nothing(external: ExternalTraining, held: int) -> None:
    kept: list[Entry] = []
    planner(kept, Calibration()).learn(external, MemoryPeak(own_bytes=held))
    assert kept == []


def test_without_calibration_nothing_is_kept(external: ExternalTraining) -> None:
    kept: list[Entry] = []
    planner(kept, None).learn(external, MemoryPeak(own_bytes=70 * GIB))
    assert kept == []


def out_of_memory(allocated: int, asked: int) -> Verdict:
    return Verdict(
        id="cuda-oom",
        kind="device-oom",
        cause="The GPU ran out of memory.",
        confidence="certain",
        evidence=(),
        fixes=(),
        phase="loss",
        oom=OomNumbers(asked=asked, free=0, allocated=allocated),
    )


@pytest.mark.thorough
def test_the_numbers_of_an_out_of_memory_are_a_lesson_too(external: ExternalTraining) -> None:
    kept: list[Entry] = []
    asked = planner(kept, Calibration())
    shortfall = Shortfall(where="gpu", missing_bytes=2 * GIB, phase="loss", room_bytes=76 * GIB)
    step = asked.smaller(external, shortfall, out_of_memory(76 * GIB, 2 * GIB), same_engine=False)
    assert step is not None
    assert [each.measured_bytes for each in kept[0].measured] == [78 * GIB]
    assert known_by(asked, external).priced.footprint.gpu.phases["loss"].total_bytes == 78 * GIB


# --- from the command line ------------------------------------------------------------------------


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm_desk.run("run", *words, cwd=folder)


HOLDS = """
import pathlib, sys, time
pathlib.Path("tools/pid").write_text(str(__import__("os").getpid()))
seen = pathlib.Path("tools/seen")
for _ in range(600):  # until somebody has looked, and has come back after that
    time.sleep(0.1)
    if seen.exists() and seen.stat().st_size > 1:
        break
"""


@pytest.mark.thorough
def test_what_the_probe_saw_is_in_the_cache_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi shows the command's own process with more than its card was predicted to hold."""
    tools = tmp_path / "tools"
    tools.mkdir()
    row = f"0, {UUID}, 24564, 8.9, NVIDIA GeForce RTX 4090\\n"
    whole = f"0, 00000000:01:00.0, {UUID}, 24564, 20564, 4000, 0, 41, 31.50, 550.54.15, 8.9, RTX 4090\\n"
    (tools / "nvidia-smi").write_text(
        f"#!{sys.executable} -SE\nimport pathlib, sys\npid = pathlib.Path({str(tools)!r}, 'pid')\n"
        f"apps = f'{UUID}, {{pid.read_text()}}, 20480\\n' if pid.exists() else ''\n"
        f"answers = {{'--query-gpu=index,uuid': '{row}', '--query-gpu=index,pci': '{whole}', "
        "'--query-compute': apps}\n"
        "if apps and sys.argv[1].startswith('--query-compute'):\n    pid.with_name('seen').open('a').write('.')\n"
        "print(next((text for key, text in answers.items() if sys.argv[1].startswith(key)), ''), end='')\n",
        encoding="utf-8",
    )
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(HOLDS, encoding="utf-8")
    words = ("--", sys.executable, "train.py", "--model", "tiny_llama", "--max_length", "64", "--batch_size", "1")
    first = run(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    assert "Earlier runs" not in first.stderr
    kept = tmp_path / "cache/tightfit/calibration.json"
    entry: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))["entries"][0]
    assert entry["training"]["gpu"] == "RTX 4090"
    second = run(tmp_path, "--dry-run", *words)
    assert "Earlier runs" not in second.stdout, "so far off, it counts when it was seen twice"
    (tools / "pid").unlink()
    (tools / "seen").unlink()
    assert run(tmp_path, *words).returncode == 0
    third = run(tmp_path, "--dry-run", *words)
    assert "Earlier runs held 1" in third.stdout
    without = run(tmp_path, "--dry-run", "--no-calibration", *words)
    assert "Earlier runs" not in without.stdout


# --- others on the GPU ----------------------------------------------------------------------------


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tightfit.hardware.probes.tools.BESIDE_PATH", {})
    monkeypatch.setattr(start_machine, "WAIT_S", 0.05)
    made = Card(folder)
    yield made
    assert made.holder.poll() is None, "it was not ours to end"
    made.holder.kill()
    made.holder.wait()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("need", "words"),
    [
        (10 * GIB, "GPU 0 has 0.8 GiB free and the command is predicted to need 10.0"),
        (None, "GPU 0 has 0.8 of 24.0 GiB free"),
    ],
)
def test_it_waits_until_there_is_room_and_says_once_for_whom(card: Card, need: int | None, words: str) -> None:
    said: list[str] = []
    timer = later(0, lambda: (card.wait_for_looks(5), card.give_back()))
    assert wait_for_gpus(need, 1, said.append)
    timer.join()
    assert len(said) == 1
    assert said[0].startswith(f"waiting: {words}")
    assert f"process {card.holder.pid} (" in said[0]


def test_it_waits_for_a_run_of_ours_and_can_be_told_to_stop(card: Card, tmp_path: Path) -> None:
    card.give_back()
    registry = Reservations(tmp_path / "cache/tightfit/reservations")
    registry._folder.mkdir(parents=True)
    registry.add(Reservation.ours(Path("/runs/other"), 0, (UUID,), None))
    said: list[str] = []
    assert not wait_for_gpus(None, 1, said.append, lambda: bool(said))
    assert said == [f"waiting: GPU 0 is in use by the run in /runs/other (process {os.getpid()})"]
