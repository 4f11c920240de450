"""`tightfit run` over its life: what others see of it, a hang, a kill −9, and a start that takes over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import patience
import warm_desk
from tightfit.messages import from_json
from tightfit.runs.external.process import Stillness
from tightfit.runs.records import read_run

pytestmark = pytest.mark.thorough

ASSETS = Path(__file__).parents[1] / "assets"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return folder


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return warm_desk.run("run", *words, timeout=300)


@contextmanager
def running(*words: str) -> Iterator[warm_desk.Process]:
    process = warm_desk.Process("run", *words)
    try:
        yield process
    finally:
        process.kill()


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text, encoding="utf-8")
    return "train.py"


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = patience.now() + limit_s
    while not condition():
        assert patience.now() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def record(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return read


def attempts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "attempts").glob("*.json"))]


# --- what others see ----------------------------------------------------------------------------

SLEEPS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("child").write_text(str(child.pid))
print("ready", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""


def test_its_record_is_that_of_every_run_from_the_start_on(here: Path) -> None:
    with running("--", sys.executable, script(here, SLEEPS)) as process:
        assert process.first_line() == "ready"
        seen = read_run(here / "tightfit-run-1")
        assert seen is not None
        assert (seen.state, seen.pid, seen.lives) == ("running", process.pid, True)
        assert seen.command == (sys.executable, "train.py")
        told = warm_desk.run("watch", "tightfit-run-1", "--once")
        assert told.returncode == 0, told.stderr
        cleaned = warm_desk.run("clean", ".")
        assert cleaned.returncode == 0, cleaned.stderr
        assert (here / "tightfit-run-1/lock").exists(), "it lives, and nothing of it is a leftover"
        (here / "go").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0
    seen = read_run(here / "tightfit-run-1")
    assert seen is not None
    assert (seen.state, seen.exit_code, seen.lives) == ("done", 0, False)
    assert seen.ended is not None
    assert not (here / "tightfit-run-1/lock").exists()


# --- a kill that nobody can catch -----------------------------------------------------------------


def test_a_killed_supervisor_takes_its_command_along_and_another_takes_over(here: Path) -> None:
    name = script(here, SLEEPS)
    with running("--output", "out", "--", sys.executable, name) as process:
        process.first_line()
        child, pids = int((here / "child").read_text(encoding="ascii")), members_of("out")
        assert child in pids
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: all(map(is_gone, pids)), 20)
    assert record(here / "out")["state"] == "running"
    other = run("--output", "out", "--", sys.executable, "-c", "1")
    assert other.returncode == 2
    assert "holds the run of another command" in other.stderr
    (here / "go").touch()
    again = run("--output", "out", "--", sys.executable, name)
    assert again.returncode == 0, again.stderr
    assert f"the run in out is taken over: its process {process.pid} has gone without a word" in again.stderr
    assert record(here / "out")["state"] == "done"
    assert [each["state"] for each in attempts(here / "out")] == ["done"]
    assert [each["state"] for each in attempts(here / "out/earlier/1")] == ["running"]
    done = run("--output", "out", "--", sys.executable, name)
    assert done.returncode == 2
    assert "name a new folder" in done.stderr


def members_of(folder: str) -> list[int]:
    from tightfit.runs.processes import carriers_of

    return carriers_of(record(Path(folder))["mark"])


def test_without_a_name_the_last_folder_of_the_same_command_is_taken_over(here: Path) -> None:
    name = script(here, SLEEPS)
    with running("--", sys.executable, name) as process:
        process.first_line()
        process.send_signal(signal.SIGKILL)
        process.wait()
    (here / "go").touch()
    again = run("--", sys.executable, name)
    assert again.returncode == 0, again.stderr
    assert "the run in tightfit-run-1 is taken over" in again.stderr
    other = run("--", sys.executable, name)
    assert "logs and records in tightfit-run-2" in other.stderr


HF = ("--max_steps", "8", "--save_steps", "2", "--output_dir", "model", "--report_to", "none", "--use_cpu", "True")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trainer_goes_on_with_the_config_of_its_last_start(here: Path) -> None:
    """It ran out of memory, was stepped down, and then somebody killed the supervisor."""
    trainer = str(ASSETS / "hf_trainer.py")
    words = ("--", "python", trainer, *HF, "--per_device_train_batch_size", "8", "--oom_above", "4", "--wait_at", "6")
    with running("--output", "out", *words) as process:
        wait_until((here / "waits").exists, 240)
        pids = members_of("out")
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: all(map(is_gone, pids)), 30)
    (here / "waits").write_text("no more", encoding="utf-8")
    again = run("--output", "out", *words)
    assert again.returncode == 0, again.stderr
    assert "finished at step 8, batch 4" in again.stdout
    assert "it goes on from checkpoint-6" in again.stderr
    last = record(here / "out")["last_command"]
    assert last[last.index("--per_device_train_batch_size") + 1] == "4"
    assert last[last.index("--resume_from_checkpoint") + 1] == "model/checkpoint-6"


# --- a command that hangs -------------------------------------------------------------------------

HANGS_ONCE = """
import pathlib, time
flag = "--resume_from_checkpoint"
mark = pathlib.Path("hung")
print("begins", flush=True)
if not mark.exists():
    mark.touch()
    time.sleep(600)
print("second start", flush=True)
"""


def test_a_command_that_hangs_is_ended_and_started_again(here: Path) -> None:
    done = run("--hang-timeout", "2s", "--", sys.executable, script(here, HANGS_ONCE))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begins\nbegins\nsecond start\n"
    assert "printed nothing for" in done.stderr
    first = attempts(here / "tightfit-run-1")[0]
    assert (first["cause"]["kind"], first["next"]["action"]) == ("hang", "same plan")
    assert any(line.startswith("process ") for line in first["cause"]["evidence"])
    assert (here / "tightfit-run-1/attempts/001/stacks.txt").read_text(encoding="utf-8").startswith("--- process ")


@pytest.mark.parametrize("text", ["soon", "0"])
def test_a_time_that_is_none(here: Path, text: str) -> None:
    done = run("--hang-timeout", text, "--", sys.executable, "-c", "1")
    assert done.returncode == 2
    assert "--hang-timeout takes a time such as 300s" in done.stderr


def test_silence_alone_is_no_hang(tmp_path: Path) -> None:
    """A process that computes, a GPU that is used, or a line of output count as moving."""
    log, now, uses = tmp_path / "log", [0.0], [True]
    log.touch()
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        still = Stillness(log, 10.0, uses_gpu=lambda pids: uses[0], clock=lambda: now[0])
        for _ in range(4):
            time.sleep(0.15)
            now[0] += 8.0
            assert still.look([process.pid]) is None or _ > 0
        process.kill()
    still = Stillness(log, 10.0, uses_gpu=lambda pids: uses[0], clock=lambda: now[0])
    still.look([])
    now[0] += 11
    assert still.look([]) is None, "a GPU is used"
    uses[0] = False
    now[0] += 11
    assert still.look([]) == pytest.approx(11)
    log.write_text("a line", encoding="utf-8")
    assert still.look([]) is None


BATON = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("file_baton", {path!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
module.FileBaton({lock!r}).wait()
"""
"""Torch's own code, without the seconds that torch takes."""


@pytest.mark.parametrize("spied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lock_that_a_killed_compiler_left_is_named_before_and_after(
    here: Path, monkeypatch: pytest.MonkeyPatch, spied: bool
) -> None:
    if spied and shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    if not spied:
        monkeypatch.setenv("PATH", os.defpath)
    lock = here / "parts/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    past = time.time() - 3600
    os.utime(lock, (past, past))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(here / "parts"))
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    waits = BATON.format(path=str(Path(torch.origin).parent / "utils/file_baton.py"), lock=str(lock))
    done = run("--hang-timeout", "2s", "--retry-anyway", "--", sys.executable, script(here, waits))
    assert f"rm {lock}" in done.stderr.splitlines()[2]
    assert lock.exists(), "it may be somebody else's"
    assert done.returncode != 0
    found = attempts(here / "tightfit-run-1")
    assert len(found) == 1, done.stderr  # it would wait again
    assert found[0]["cause"] is not None, done.stderr
    assert "waits for torch's lock" in str(from_json(found[0]["cause"]["sentence"]))
    how = "py-spy told the stacks" if spied else "with py-spy installed"
    assert how in found[0]["cause"]["evidence"][-1]


def test_a_lock_that_the_command_itself_left_is_removed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(here / "parts"))
    text = """
import os, pathlib, signal
lock = pathlib.Path("parts/cpu_adam/lock")
if not lock.parent.exists():
    lock.parent.mkdir(parents=True)
    os.open(lock, os.O_CREAT | os.O_EXCL)
    os.kill(os.getpid(), signal.SIGKILL)
print("locked" if lock.exists() else "free", flush=True)
"""
    done = run("--retry-anyway", "--", sys.executable, script(here, text))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "free\n"
    assert f"had left {here / 'parts/cpu_adam/lock'}: removed" in done.stderr
