"""`tightfit watch` as a user meets it: on a terminal whose screen is read, in a pipe, and for programs."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from desks import desk, steps_in, surroundings, wait_until

import warm_desk
from terminal import Terminal
from tightfit.cli import main
from tightfit.screen.watch import sparkline

pytestmark = pytest.mark.thorough

Capsys = pytest.CaptureFixture[str]
WATCH = [sys.executable, "-W", "error", "-m", "tightfit", "watch"]
UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a00"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def running(place: Path) -> Iterator[Path]:
    """A run that makes steps until it is told to finish."""
    run = place / "run"
    with desk("watched", run, place / "cache"):
        wait_until(lambda: steps_in(run) > 3)
        yield run


def recorded(run: Path, lines: list[dict[str, object]], **record: object) -> Path:
    """A run of which only files are left."""
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = {
        "command": ["tightfit", "train"], "pid": 1, "host": "elsewhere", "started": "2026-02-03T04:05:06+00:00",
        "ended": None, "state": "running", "exit_code": None,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps({**said, **record}))
    return run


def step_on(screen: str) -> int:
    return int(screen.partition("step ")[2].partition("/")[0].replace(",", ""))


def refused(capsys: Capsys, *words: object) -> str:
    assert main(["watch", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    return err


# --- what the user got wrong --------------------------------------------------------------------


def test_what_is_no_run(place: Path, capsys: Capsys) -> None:
    (place / "empty").mkdir()
    (place / "file").write_text("")
    assert "is no run's folder: name one that `tightfit train` made" in refused(capsys, "empty")
    assert "file is a file" in refused(capsys, "file")
    assert "there is nothing at gone" in refused(capsys, "gone")


@pytest.mark.parametrize("interval", ["0", "0.01", "-1", "soon", "1e9", "nan", "99999"])
def test_intervals_that_are_none(place: Path, capsys: Capsys, interval: str) -> None:
    assert "--interval" in refused(capsys, f"--interval={interval}")


def test_a_log_that_cannot_be_written(place: Path, capsys: Capsys) -> None:
    assert "cannot be written (is a directory): name another file with --log" in refused(capsys, "--log", place)
    assert "no such file" in refused(capsys, "--log", place / "no/where.jsonl")


def test_json_is_for_one_look(place: Path, capsys: Capsys) -> None:
    assert "--json needs --once" in refused(capsys, "--json")


# --- one look -----------------------------------------------------------------------------------


def test_the_machine_in_one_look(place: Path, capsys: Capsys) -> None:
    assert main(["watch", "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "host " in out
    assert "memory under 90 %" in out
    assert re.search(r"^CPU    \d+ % of \d+ cores? busy, load \d+\.\d$", out, re.MULTILINE)
    assert main(["watch", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] is None
    assert 0 < found["host"]["free_bytes"] <= found["host"]["total_bytes"]
    assert 0 <= found["host"]["cpu_percent"] <= 100
    assert found["host"]["load"] >= 0
    assert found["host"]["cores"] >= 1
    assert set(found["lights"]) == {"memory under 90 %", "loss falling", "no OOM"}


def test_a_run_on_another_machine_is_what_its_files_say(place: Path, capsys: Capsys) -> None:
    memory = {"now_bytes": None, "peak_bytes": None, "host_bytes": 2**30}
    lines: list[dict[str, object]] = [
        {"event": "step", "step": n, "steps": 90, "loss": 5 - n / 50, "memory": memory} for n in range(1, 41)
    ]
    recorded(place / "run", [{"event": "warning", "text": "\x1b[31mred\x1b[0m"}, *lines])
    assert main(["watch", "run", "--once"]) == 0
    out = capsys.readouterr().out
    assert "step 40/90  loss 4.2000" in out
    assert "✓ loss falling: 4.8900 → 4.2900 in 40 steps" in out
    assert "rank 0" in out
    assert "\x1b" not in out
    assert "  ! [31mred [0m" in out


def test_torn_files_are_shown_as_far_as_they_go(place: Path, capsys: Capsys) -> None:
    run = recorded(place / "run", [{"event": "step", "step": 7, "loss": 1.0}])
    (run / "run.json").write_text('{"comm')
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"event": "step", "st')
    assert main(["watch", "run", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]
    assert (found["step"], found["state"], found["ended"]) == (7, None, None)


def test_warnings_from_recorded_events(place: Path, capsys: Capsys) -> None:
    scale = [{"event": "step", "step": n, "loss": 1.0, "loss_scale": 2.0 ** (20 - max(0, n - 5))} for n in range(1, 12)]
    recorded(place / "run", scale)
    assert main(["watch", "run", "--once"]) == 0
    out = capsys.readouterr().out
    assert "! the loss scale fell 6 times in a row, from 1,048,576 to 16,384 since step 5" in out
    assert "! nothing was heard of the run" not in out


def test_the_folder_of_another_trainer(place: Path, capsys: Capsys) -> None:
    """Which has attempts, and no events of ours."""
    cause = {
        "id": "device-oom", "kind": "device-oom", "sentence": "The GPU ran out of memory.", "confidence": "certain",
        "rank": 3, "phase": None, "evidence": [],
    }  # fmt: skip
    record = {
        "schema": 1, "number": 1, "started": "x", "plan": "a LLaMA-Factory file", "ranks": 4, "effective_batch": None,
        "ended": "y", "state": "failed", "exit_codes": [1], "first_step": None, "last_step": 12, "kept_step": None,
        "cause": cause, "next": {"action": "stop", "because": "z", "changed": [], "wait_s": 0.0},
    }  # fmt: skip
    (place / "run/attempts").mkdir(parents=True)
    (place / "run/attempts/001.json").write_text(
        json.dumps({**record, "ended": None, "state": "running", "next": None})
    )
    assert main(["watch", "run", "--once"]) == 0
    assert "run; " not in capsys.readouterr().out.splitlines()[0]
    (place / "run/attempts/001.json").write_text(json.dumps(record))
    assert main(["watch", "run", "--once"]) == 0
    out = capsys.readouterr().out
    assert "✗ ran out of memory: The GPU ran out of memory." in out
    assert "  1, a LLaMA-Factory file, after step 12: The GPU ran out of memory → stop" in out
    assert main(["watch", "run"]) == 1
    assert "its last attempt ended: failed" in capsys.readouterr().out


def test_no_letters_but_plain_ones(place: Path) -> None:
    recorded(place / "run", [{"event": "step", "step": n, "loss": 5 - n / 9} for n in range(1, 20)])
    env = surroundings(place / "cache", PYTHONIOENCODING="ascii", COLUMNS="100")
    done = subprocess.run([*WATCH, "run", "--once"], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.isascii()
    assert "loss 4.8889 #" in done.stdout


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_screen(
    place: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    recorded(place / "run", [{"event": "warning", "text": "long " * 60}, {"event": "step", "step": 1, "loss": 1.0}])
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["watch", "run", "--once"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_sparklines() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60


# --- live ---------------------------------------------------------------------------------------


def test_a_run_on_a_terminal_to_its_end(running: Path, place: Path) -> None:
    words = ["watch", "run", "--interval", "0.2", "--log", "looks.jsonl"]
    terminal = Terminal(words, surroundings(place / "cache"), place)
    try:
        text = terminal.until(lambda text: "step " in text and "✓ loss falling" in text)
        before = step_on(text)
        assert text.splitlines()[0].startswith("run; tiny_mamba, full, ")
        assert "rank 0" in text
        assert "rank 1" in text
        assert "✓ memory under 90 %" in text
        assert "something to know" in text
        later = terminal.until(lambda text: "loss falling" in text and step_on(text) > before + 3)  # drawn to its end
        assert later.count("loss falling") == 1, "the picture is drawn in place"
        (running / "finish").touch()
        assert terminal.rest() == 0
        assert "it is done" in terminal.screen.text
        assert f"tightfit: the run in {running} has ended: it is done, after step " in terminal.screen.text
    finally:
        terminal.close()
    looks = [json.loads(line) for line in (place / "looks.jsonl").read_text().splitlines()]
    assert len(looks) > 2
    assert looks[-1]["run"]["state"] == "done"
    assert looks[0]["run"]["ranks"][0]["now_bytes"] > 2**20


def test_ctrl_c_leaves_quietly(place: Path) -> None:
    terminal = Terminal(["watch", "--interval", "0.2"], surroundings(place / "cache"), place)
    try:
        terminal.until(lambda text: "host " in text)
        terminal.interrupt()
        assert terminal.rest() == 0
        assert "Traceback" not in terminal.screen.text
        assert "\x1b[?25h" in terminal.raw, "the cursor is shown again"
    finally:
        terminal.close()


def test_a_pipe_gets_a_line_where_something_happens(running: Path, place: Path) -> None:
    env = surroundings(place / "cache", PYTHONUNBUFFERED="1")
    process = warm_desk.Process("watch", "run", "--interval", "0.2", env=env, cwd=place)
    try:
        assert "watching the run in" in process.first_line()
        (running / "finish").touch()
        out, err = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert out.count("✓ memory under 90 %") == 1
    assert out.splitlines()[-1].startswith("tightfit: the run in ")


def test_a_run_whose_desk_was_killed_has_gone(place: Path, capsys: Capsys) -> None:
    run = place / "run"
    with desk("watched", run, place / "cache") as process:
        wait_until(lambda: steps_in(run) > 3)
        process.kill()
        process.wait()
        assert main(["watch", "run"]) == 1
    out = capsys.readouterr().out
    assert f"its process {process.pid} has gone without a word, after step " in out
    assert f"`tightfit diagnose {run}` says why" in out


def test_a_run_that_runs_out_of_memory(place: Path, capsys: Capsys) -> None:
    run = place / "run"
    with desk("failing", run, place / "cache", "--max-attempts", "1") as process:
        process.wait(60)
    assert main(["watch", "run"]) == 1
    out = capsys.readouterr().out
    assert "✗ ran out of memory" in out
    assert "has ended: it failed, after step 2, exit code 3" in out


# --- cards --------------------------------------------------------------------------------------


def smi(folder: Path, gpus: int = 2) -> Path:
    """`nvidia-smi` as its output was written down, repeating itself where it is asked to; memory grows."""
    rows = [
        f"{i}, 00000000:0{i + 1}:00.0, {UUID[:-1]}{i}, 24564, {{used}}, {{free}}, 97, 61, 312.50, 550.54.15, 8.9, "
        "NVIDIA GeForce RTX 4090"
        for i in range(gpus)
    ]
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys, time\n"
        "words = ' '.join(sys.argv[1:])\n"
        "if '--query-compute-apps' in words:\n"
        f"    sys.exit(print('{UUID}, {os.getpid()}, 4000'))\n"
        "if '--query-gpu' not in words or 'compute_cap' not in words:\n"
        "    sys.exit(print('CUDA Version: 12.4'))\n"
        f"rows, used = {rows!r}, 8000\n"
        "while True:\n"
        "    for row in rows:\n"
        "        print(row.format(used=used, free=24564 - used), flush=True)\n"
        "    if '-lms' not in sys.argv:\n"
        "        break\n"
        "    used = min(24000, used + 4000)\n"
        "    time.sleep(int(sys.argv[-1]) / 1000)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


def test_one_row_a_gpu(place: Path) -> None:
    env = surroundings(place / "cache", PATH=f"{smi(place)}:{os.environ['PATH']}", COLUMNS="120")
    done = warm_desk.run("watch", "--once", env=env)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("GPU 0 ") and "█" in line]
    figures = ["7.8", "7.8", "24.0", "97", "%", "61", "°C", "312", "W", str(os.getpid())]
    assert row.split()[3:13] == figures
    assert f"process {os.getpid()}" in done.stdout
    told = warm_desk.run("watch", "--once", "--json", env=env)
    card = json.loads(told.stdout)["cards"][1]
    assert (card["used_bytes"], card["use_percent"], card["processes"]) == (8000 * 2**20, 97.0, [])


def test_cards_on_a_terminal_fill_up(place: Path) -> None:
    env = surroundings(place / "cache", PATH=f"{smi(place)}:{os.environ['PATH']}")
    terminal = Terminal(["watch", "--interval", "0.2"], env, place, columns=120)
    try:
        terminal.until(lambda text: "✓ memory under 90 %" in text)
        text = terminal.until(lambda text: "✗ memory over 90 %: 98 % of GPU" in text)
        assert "! GPU 0 has 0.55 GiB of 23.99 GiB left: a longer batch may not fit" in text
        terminal.interrupt()
        assert terminal.rest() == 0
    finally:
        terminal.close()


def test_a_wedged_tool_does_not_hold_the_picture(place: Path) -> None:
    """It answers once, and never again."""
    folder = smi(place)
    path = folder / "nvidia-smi"
    path.write_text(path.read_text().replace("    used = min", "    time.sleep(600)\n    used = min"))
    env = surroundings(place / "cache", PATH=f"{folder}:{os.environ['PATH']}")
    terminal = Terminal(["watch", "--interval", "0.2"], env, place, columns=120)
    try:
        terminal.until(lambda text: "GPU 1" in text)
        terminal.until(lambda text: " s ago" in text)
        terminal.interrupt()
        assert terminal.rest(5) == 0
    finally:
        terminal.close()


# --- for real -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_run_is_followed_to_its_end(place: Path) -> None:
    train = [sys.executable, "-m", "tightfit", "train", "--model", "tiny_mamba", "--seq", "64", "--max-steps", "30"]
    env = surroundings(place / "cache")
    with subprocess.Popen([*train, "--output", "run"], stdout=subprocess.DEVNULL, env=env, cwd=place) as training:
        wait_until((place / "run/run.json").exists, 120)
        terminal = Terminal(["watch", "run", "--interval", "0.5"], env, place)
        try:
            text = terminal.until(lambda text: "step " in text and "rank 1" in text, 420)
            assert "plan" in text
            assert terminal.rest(420) == 0
            assert "has ended: it is done, after step 30" in terminal.screen.text
        finally:
            terminal.close()
        assert training.wait(60) == 0
