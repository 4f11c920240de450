"""`tightfit clean` as a user meets it: dead runs that were killed for real, and live ones that it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from desks import desk, steps_in, surroundings, wait_until
from stored import left_behind, store

from terminal import Terminal
from tightfit.cli import main
from tightfit.runs.processes import is_alive, this_host

Capsys = pytest.CaptureFixture[str]
CLEAN = [sys.executable, "-W", "error", "-m", "tightfit", "clean"]
SHM = Path("/dev/shm")  # noqa: S108


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "110")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def killed(place: Path) -> Iterator[Path]:
    """A run whose desk was killed, and whose ranks did not notice; half a checkpoint beside a whole one."""
    run = place / "runs" / "dead"
    run.parent.mkdir()
    pids: list[int] = []
    try:
        with desk("survivor", run, place.parent / "cache") as process:
            wait_until(lambda: all((run / f"pid-{rank}").exists() for rank in (0, 1)))
            wait_until(lambda: all((run / f"pid-{rank}").read_text() for rank in (0, 1)))
            pids = ranks_of(run)
            process.kill()
            process.wait()
        store(run, 2)
        left_behind(run, ".step-00000004.partial")
        left_behind(run, ".step-00000002.old")
        left_behind(run, ".step-00000006.old")
        yield run
    finally:
        for pid in pids:
            if is_alive(pid, None):
                os.kill(pid, signal.SIGKILL)
            for left in segments(pid):
                left.unlink()


def ranks_of(run: Path) -> list[int]:
    return [int((run / f"pid-{rank}").read_text()) for rank in (0, 1)]


def segments(pid: int) -> list[Path]:
    return list(SHM.glob(f"torch_{pid}_*"))


def refused(capsys: Capsys, *words: object) -> str:
    assert main(["clean", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    return err


def told(capsys: Capsys, *words: object) -> dict[str, Any]:
    assert main(["clean", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def kinds(found: dict[str, Any]) -> list[str]:
    return [each["kind"] for each in found["leftovers"]]


# --- what the user got wrong --------------------------------------------------------------------


def test_mistakes(place: Path, capsys: Capsys) -> None:
    (place / "file").write_text("")
    assert "there is nothing at gone" in refused(capsys, "gone")
    assert "file is a file" in refused(capsys, "file")
    assert "say one of them" in refused(capsys, "--yes", "--dry-run")
    assert "say --dry-run or --yes" in refused(capsys, "--json")
    assert "did you mean --caches?" in refused(capsys, "--cache")


def test_nothing_is_left(place: Path, capsys: Capsys) -> None:
    assert main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out == "Nothing is left of dead runs.\n"


# --- dead runs ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_in_a_pipe_it_only_shows(killed: Path, capsys: Capsys) -> None:
    pids = ranks_of(killed)
    assert main(["clean"]) == 0
    out = capsys.readouterr().out
    for pid in pids:
        assert f"process {pid}," in out
    assert "Nothing was removed: --yes removes it." in out
    assert all(is_alive(pid, None) for pid in pids)
    assert (killed / "lock").exists()


@pytest.mark.thorough
def test_a_dead_run_is_cleaned(killed: Path, capsys: Capsys) -> None:
    pids = ranks_of(killed)
    shown = told(capsys, "--dry-run")
    assert kinds(shown)[:4] == ["process", "process", "shared memory", "shared memory"]
    assert {each["pid"] for each in shown["leftovers"]} >= set(pids)
    assert f"the run in {killed} lived" in shown["leftovers"][2]["because"]
    assert main(["clean", "--yes"]) == 0
    assert not any(is_alive(pid, None) for pid in pids)
    assert not (killed / "lock").exists()
    left = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert left == [".step-00000006.old", "step-00000002"], "a checkpoint that is set aside stays if it is the only one"
    assert (killed / "events.jsonl").exists()
    capsys.readouterr()
    assert not any(segments(pid) for pid in pids)
    assert told(capsys, "--dry-run")["leftovers"] == []


@pytest.mark.thorough
def test_shared_memory_of_others_stays(killed: Path, capsys: Capsys) -> None:
    pids = ranks_of(killed)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid, None) for pid in pids))
    foreign, held = SHM / "torch_holder_of_ours", SHM / f"torch_{pids[0]}_77"
    old = SHM / f"torch_{pids[1]}_78"
    try:
        for path in (foreign, held, old):
            path.write_bytes(b"x")
        os.utime(old, (1, 1))
        with held.open("rb"):  # by this process
            found = [each["what"] for each in told(capsys, "--dry-run")["leftovers"] if each["kind"] == "shared memory"]
        assert sorted(found) == sorted(str(path) for pid in pids for path in segments(pid) if path not in (held, old))
    finally:
        for path in (foreign, held, old):
            path.unlink(missing_ok=True)


@pytest.mark.thorough
def test_a_live_run_is_left_alone(place: Path, capsys: Capsys) -> None:
    run = place / "live"
    with desk("watched", run, place.parent / "cache") as process:
        wait_until(lambda: steps_in(run) > 3)
        left_behind(run, ".step-00000004.partial")
        (place.parent / "cache" / "tightfit" / "data").mkdir()
        found = told(capsys, "--yes", "--caches")
        assert found["leftovers"] == []
        assert found["live"] == [str(run)]
        assert process.poll() is None
        before = steps_in(run)
        wait_until(lambda: steps_in(run) > before + 3)
        assert (run / "checkpoints/.step-00000004.partial").exists()
        assert (place.parent / "cache" / "tightfit" / "data").exists()
        assert (run / "lock").exists()
        (run / "finish").touch()
        assert process.wait(30) == 0


def test_another_machines_run_is_left_alone(place: Path, capsys: Capsys) -> None:
    run = place / "far"
    run.mkdir()
    record = {"command": [], "pid": 2**22 + 5, "host": "elsewhere", "started": None, "ended": None}
    (run / "run.json").write_text(json.dumps({**record, "state": "running", "exit_code": None}))
    (run / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "today"}))
    found = told(capsys, "--yes")
    assert found["leftovers"] == []
    assert len(found["unsure"]) == 1
    assert (run / "lock").exists()
    (run / "lock").unlink()
    left_behind(run, ".step-00000004.partial")
    assert "was run on elsewhere" in told(capsys, "--yes")["unsure"][0]
    assert (run / "checkpoints/.step-00000004.partial").exists()


def test_what_is_no_run_is_not_looked_into(place: Path, capsys: Capsys) -> None:
    for name in ("mine", ".hidden/run", "a/b/c/d/run"):
        (place / name).mkdir(parents=True)
        (place / name / "lock").write_text("{}")
    (place / "mine" / "run.json").write_text('{"mine": 1}')
    left_behind(place / "mine", ".step-00000004.partial")
    assert told(capsys, "--yes")["leftovers"] == []
    assert (place / "mine" / "lock").exists()


# --- caches -------------------------------------------------------------------------------------


def test_caches_go_when_asked_for(place: Path, capsys: Capsys) -> None:
    cache = place.parent / "cache" / "tightfit"
    (cache / "data" / ("a" * 32)).mkdir(parents=True)
    (cache / "data" / ("a" * 32) / "tokens.bin").write_bytes(b"tokens")
    (cache / "data" / f".building-{'a' * 32}-{2**22 + 7}").mkdir()
    (cache / "data" / f".building-{'d' * 32}-{os.getpid()}").mkdir()
    (cache / "calibration.json").write_text('{"schema": 1, "tightfit": "0.1", "entries": []}')
    (cache / "reservations").mkdir()
    held = {"host_bytes": 1, "gpus": [], "port": None}
    dead = {"pid": 2**22 + 7, "mark": None, "host": this_host(), "folder": "/nowhere", **held}
    (cache / "reservations" / "dead.json").write_text(json.dumps(dead))
    (cache / "reservations" / "live.json").write_text(json.dumps({**dead, "pid": os.getpid()}))
    (cache / "reservations" / "strange.json").write_text("{")
    assert main(["clean", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "Caches, which stay unless --caches is said:" in out
    assert "Removed 2 of 2" in out
    assert sorted(path.name for path in cache.glob("*/*")) == [
        f".building-{'d' * 32}-{os.getpid()}", "a" * 32, "live.json", "strange.json",
    ]  # fmt: skip
    assert main(["clean", "--yes", "--caches"]) == 0
    assert not (cache / "data").exists()
    assert not (cache / "calibration.json").exists()


# --- on a terminal ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_terminal_is_asked(killed: Path, place: Path) -> None:
    for pid in ranks_of(killed):
        os.kill(pid, signal.SIGKILL)
    for answer, there in (("no", True), ("yes", False)):
        terminal = Terminal(["clean"], surroundings(place.parent / "cache"), place)
        try:
            terminal.until(lambda text: "Remove all of this? Type yes:" in text)
            assert (killed / "lock").exists()
            terminal.type(f"{answer}\n")
            assert terminal.rest() == 0
        finally:
            terminal.close()
        assert (killed / "lock").exists() == there


def smi(folder: Path, *pids: int) -> Path:
    """`nvidia-smi` of a card that these processes hold."""
    uuid = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a00"
    row = f"0, 00000000:01:00.0, {uuid}, 24564, 8000, 16564, 97, 61, 312.50, 550.54.15, 8.9, NVIDIA GeForce RTX 4090"
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    apps = "".join(f"{uuid}, {pid}, 4000\n" for pid in pids)
    path.write_text(
        f"#!{sys.executable} -SE\nimport sys\nwords = ' '.join(sys.argv[1:])\n"
        f"sys.stdout.write({apps!r} if 'compute-apps' in words else {row!r} + chr(10) if 'query' in words else '')\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


def sleeper(*, stubborn: bool = False) -> subprocess.Popen[bytes]:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    command = [sys.executable, "-SE", "-c", f"import signal, time; {code}print(1, flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.thorough
def test_processes_on_gpus_are_ended_one_by_one(place: Path) -> None:
    first, second = sleeper(), sleeper()
    env = surroundings(place.parent / "cache", PATH=f"{smi(place, first.pid, second.pid, 1)}:{os.environ['PATH']}")
    try:
        # In a pipe they are named, and nobody is ended, whatever is said.
        done = subprocess.run(
            [*CLEAN, "--yes"], input="yes\nyes\n", capture_output=True, text=True, env=env, cwd=place, check=True
        )
        assert f"Process {first.pid} (" in done.stdout
        assert "holds 4,000 MiB of GPU 0." in " ".join(done.stdout.split())  # wherever a long path broke the line
        assert first.poll() is None
        terminal = Terminal(["clean"], env, place)
        try:
            terminal.until(lambda text: f"End process {first.pid} (" in text)
            terminal.type("y\n")
            terminal.until(lambda text: f"End process {second.pid} (" in text)
            assert first.poll() is None, "only a whole yes counts"
            terminal.type("yes\n")
            wait_until(lambda: second.poll() is not None)
            terminal.until(lambda text: f"process {second.pid} has ended" in text)
        finally:
            terminal.close()
        assert first.poll() is None
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
