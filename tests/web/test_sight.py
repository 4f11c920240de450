"""What the page knows of a run beside its curve."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import step_line, written

from tightfit.cli import main
from tightfit.messages import as_json
from tightfit.runs.machine_eye import MachineEye
from tightfit.web.sight import RunSight

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a00"
MIB, GIB = 2**20, 2**30


def looked(run: Path, eye: MachineEye | None = None) -> dict[str, Any]:
    sight = RunSight(run)
    while not sight.history.is_whole:
        sight.history.read_on(1.0)
    return dict(sight.look(eye))


def smi(folder: Path, pid: int) -> Path:
    """`nvidia-smi` as its output was written down: two cards, and the process on the first."""
    rows = [
        f"{i}, 00000000:0{i + 1}:00.0, {UUID[:-1]}{i}, 24564, 8000, 16564, 97, 61, 312.50, 550.54.15, 8.9, "
        "NVIDIA GeForce RTX 4090"
        for i in range(2)
    ]
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable} -SE\nimport sys\nwords = ' '.join(sys.argv[1:])\n"
        f"if '--query-compute-apps' in words:\n    sys.exit(print('{UUID}, {pid}, 7900'))\n"
        "if '--query-gpu' not in words or 'compute_cap' not in words:\n    sys.exit(print('CUDA Version: 12.4'))\n"
        f"print('\\n'.join({rows!r}))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """A run on a card that lives, as far as anybody can see: a process whose output goes to the log of rank 0."""
    steps = [step_line(n, now_bytes=6 * GIB, peak_bytes=7 * GIB) for n in range(1, 20)]
    here = {"host": socket.gethostname(), "pid": os.getpid(), "started": "2099-01-01T00:00:00+00:00"}
    run = written(tmp_path / "run", steps, state="running", ended=None, **here)
    words = ["plan", "--model", "tiny_mamba", "--gpus", "1x24GB", "--seq", "64", "--write", str(run / "plan")]
    assert main(words) == 0
    (run / "logs").mkdir()
    with (run / "logs" / "rank-0.log").open("wb") as log:
        rank = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], stdout=log, start_new_session=True
        )
    monkeypatch.setenv("PATH", f"{smi(tmp_path, rank.pid)}:{os.environ['PATH']}")
    try:
        yield run
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.thorough
def test_a_run_on_a_card(on_gpu: Path) -> None:
    worker = json.loads((on_gpu / "plan" / "worker.json").read_text())
    found = looked(on_gpu, MachineEye(1.0))
    assert found["head"]["state"] == "running"
    (card,) = found["memory"]["rows"]  # the other card is not the run's
    assert (card["name"], card["now"], card["peak"], card["total"]) == ("GPU 0", 8000 * MIB, 8000 * MIB, 24564 * MIB)
    assert card["planned"] == worker["predicted"]["gpu"]["required_bytes"]
    assert found["memory"]["planned"] == worker["predicted"]["gpu"]["peak_bytes"]
    assert found["memory"]["card"] == 24 * GIB
    assert found["memory"]["host"]["total"] > found["memory"]["host"]["used"] > 0
    assert str(found["lights"]["lights"][0]["text"]) == "33 % of GPU 0"


@pytest.mark.thorough
def test_a_run_elsewhere_is_what_its_events_say(on_gpu: Path) -> None:
    record = json.loads((on_gpu / "run.json").read_text())
    (on_gpu / "run.json").write_text(json.dumps({**record, "host": "elsewhere"}))
    found = looked(on_gpu, MachineEye(1.0))
    assert found["head"]["state"] == "elsewhere"
    assert found["head"]["host"] == "elsewhere"
    (row,) = found["memory"]["rows"]
    assert (row["name"], row["now"], row["peak"], row["total"]) == ("rank 0", 6 * GIB, 7 * GIB, 24 * GIB)


def test_a_process_that_has_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = {"host": socket.gethostname(), "pid": gone.pid}
    assert looked(written(tmp_path / "run", [step_line(1)], state="running", **here))["head"]["state"] == "gone"


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "a state of a newer version"])
def test_how_it_ended(state: str, tmp_path: Path) -> None:
    head = looked(written(tmp_path / "run", [step_line(1)], state=state, exit_code=3))["head"]
    assert head["state"] == (state if state in ("done", "stopped", "failed") else "ended")
    assert head["exit_code"] == 3


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    head = looked(written(tmp_path / "run", [step_line(1), step_line(2, loss=None)]))["head"]
    assert (head["step"], head["has_step"], head["loss"]) == (2, True, None)


def test_secrets_are_struck_out(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    lines = [{"event": "warning", "text": f"no access with {secret}"}]
    run = written(tmp_path / "run", lines, command=["tightfit", "train", f"--token={secret}"])
    assert secret not in json.dumps(looked(run), default=as_json)


@pytest.mark.thorough
def test_nothing_is_written(on_gpu: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in on_gpu.rglob("*")}
    time.sleep(0.02)
    looked(on_gpu, MachineEye(1.0))
    assert {path: path.stat().st_mtime_ns for path in on_gpu.rglob("*")} == before
