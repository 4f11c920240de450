"""`tightfit train` with the real worker on two CPU ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import patience
import warm_desk

pytestmark = pytest.mark.thorough

SMALL = ("--model", "tiny_llama", "--seq", "32", "--micro-batch", "1", "--accum", "1")


def surroundings(folder: Path) -> dict[str, str]:
    """The run has a cache of its own."""
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}


def command(folder: Path, *words: str) -> warm_desk.Process:
    return warm_desk.Process("train", *SMALL, "--no-probe", *words, cwd=folder, env=surroundings(folder), ranks=True)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_from_end_to_end(tmp_path: Path, ranks: int) -> None:
    """Every process is one of its own from its start, as a user has them."""
    words = ("--data", "shipped:text", "--max-steps", "3", "--json", "--num-gpus", str(ranks))
    words += ("--engine", "zero1", "--offload-optimizer", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "train", *SMALL, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=surroundings(tmp_path),
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["state"], told["steps"]) == ("done", 3)
    assert (tmp_path / "output/model/config.json").exists()
    assert not (tmp_path / "output/lock").exists()
    assert (tmp_path / "output/checkpoints/step-00000003/manifest.json").exists()
    proofs = [json.loads(line) for line in (tmp_path / "output/events.jsonl").read_text().splitlines()]
    assert all(event["ok"] for event in proofs if event["event"] == "proof")
    assert any(event["text"].get("launcher") == "tightfit" for event in proofs if event["event"] == "proof")


def test_bad_data_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "words"}\n' * 16 + '{"text": \n')
    process = command(tmp_path, "--data", "bad.jsonl", "--max-steps", "3")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "line 17" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "output").exists()


def steps_of(folder: Path) -> list[int]:
    events = folder / "output/events.jsonl"
    if not events.exists():
        return []
    told = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
    return [event["step"] for event in told if event["event"] == "step"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_stop_goes_on_later(tmp_path: Path, number: signal.Signals) -> None:
    process = command(tmp_path, "--max-steps", "100000")
    deadline = patience.now() + 120
    while not steps_of(tmp_path):
        assert patience.now() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    last = steps_of(tmp_path)[-1]
    assert f"stopped after step {last:,} and saved a checkpoint" in err
    assert [each.name for each in (tmp_path / "output/checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert not (tmp_path / "output/model").exists()
    process = command(tmp_path, "--max-steps", str(last + 3))
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert steps_of(tmp_path)[-4:] == [last, last + 1, last + 2, last + 3]
    assert (tmp_path / "output/model/config.json").exists()
