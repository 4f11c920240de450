"""Start, stop and resume from the page, with `tightfit ui --control` alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import patience

sys.path.insert(0, str(Path(__file__).parent))

from test_accessible import complaints
from visits import HTML, client, need_a_browser, opened, says, served, stranger, written

from tightfit.runs.lock import FolderLock
from tightfit.runs.orders import Stops, find_command, find_supervisor
from tightfit.runs.records import RunRecord, read_run
from tightfit.types import ConfigError

HERE = {"Origin": "http://127.0.0.1:8741"}
TRAIN = ("tightfit", "train", "--model", "tiny_mamba", "--output", "run")
QUESTION = "model=tiny_mamba&gpus=1&card=24GB&host-ram=64GB&max-steps=5&seq=64"
START = {"question": QUESTION, "root": "0"}


def recorded(run: Path, **said: object) -> Path:
    """A run of this machine that has stopped."""
    here = {"host": socket.gethostname(), "schema": 1, "kind": "train", "cwd": str(run.parent)}
    written(run, [], **{"command": TRAIN, "state": "stopped", "exit_code": 4, **here, **said})
    return run


def with_checkpoint(run: Path) -> Path:
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    return run


def confirmation(page: str) -> str:
    found = re.search(r'name="confirmed" value="(\w+)"', page)
    assert found, page
    return found[1]


@pytest.mark.parametrize("action", ["start", "stop", "resume", "started", "other"])
def test_without_control_there_is_no_such_address(action: str, tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    visitor = client(tmp_path)
    assert visitor.get(f"/control/{action}?run=0/run").status_code == 404
    assert visitor.post(f"/control/{action}", headers=HERE, data={"run": "0/run"}).status_code == 404
    shown = visitor.get("/runs/view?run=0/run", headers=HTML).text
    assert "/control/" not in shown
    assert "/control/stop" in client(tmp_path, control=True).get("/runs/view?run=0/run", headers=HTML).text


def test_the_token_the_method_the_origin_and_the_confirmation_are_needed(tmp_path: Path) -> None:
    run = with_checkpoint(recorded(tmp_path / "run"))
    visitor = client(tmp_path, control=True)
    page = visitor.get("/control/resume?run=0/run", headers=HTML).text
    assert "tightfit train --model tiny_mamba --output run" in page
    said = {"run": "0/run", "confirmed": confirmation(page)}
    assert stranger(tmp_path, control=True).post("/control/resume", data=said, headers=HERE).status_code == 403
    for headers in ({}, {"Origin": "http://127.0.0.1:9999"}, {"Origin": "null"}):
        assert visitor.post("/control/resume", data=said, headers=headers).status_code == 403
    for wrong in ("", "x", said["confirmed"][:-1]):
        answer = visitor.post("/control/resume", data={**said, "confirmed": wrong}, headers=HERE)
        assert (answer.status_code, "look at it again" in answer.text) == (400, True)
    # What was read is what is done: another command in the meantime is another confirmation.
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "command": [*TRAIN, "--wandb"]}))
    assert visitor.post("/control/resume", data=said, headers=HERE).status_code == 400
    assert visitor.get("/control/resume", params=said).status_code == 200  # shown, and nothing done
    assert not (tmp_path / "run.out").exists()
    assert visitor.put("/control/resume").status_code == 405


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"host": "elsewhere", "state": "running"}, "this run is on elsewhere"),
        ({"state": "done"}, "this run is done"),
        ({"command": ("tightfit", "run", "--", "python", "train.py")}, "only what tightfit train has started"),
        ({"command": (*TRAIN, "--overwrite")}, "says --overwrite"),
        ({"command": (*TRAIN, "--resume=none")}, "says --resume"),
        ({"command": (*TRAIN, "--node_rank", "0")}, "says --node-rank"),
        ({"command": ("rm", "-rf", "/")}, "only what tightfit train has started"),
        ({"cwd": None}, "in which folder"),
        ({"cwd": "/no/such/folder"}, "in which folder"),
    ],
)
def test_what_cannot_be_resumed_says_why(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    with_checkpoint(recorded(tmp_path / "run", **said))
    answer = client(tmp_path, control=True).get("/control/resume?run=0/run", headers=HTML)
    assert answer.status_code == 400
    assert why in answer.text
    assert "confirmed" not in answer.text


def test_without_a_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        find_command(recorded(tmp_path / "run"))


def test_a_process_that_is_not_the_runs_is_never_signalled(tmp_path: Path) -> None:
    """Numbers are given out again, and a record may say anything."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        ours = recorded(tmp_path / "ours", state="running", pid=os.getpid(), started=None, ended=None)
        with pytest.raises(ConfigError, match="does not hold this run's lock"):
            find_supervisor(ours)
        lock = FolderLock.take(ours)
        stops = Stops()
        assert stops.ask(ours) == os.getpid()
        assert asked == [signal.SIGTERM]
        with pytest.raises(ConfigError, match="asked to stop already"):  # a second signal would end it at once
            stops.ask(ours)
        lock.release()
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
            gone = recorded(tmp_path / "gone", state="running", pid=other.pid, ended=None)
            with pytest.raises(ConfigError, match="not running"):  # it began after the record was written
                find_supervisor(gone)
            other.kill()
        for said, why in (({"host": "elsewhere"}, "on elsewhere"), ({"state": "done"}, "not running")):
            with pytest.raises(ConfigError, match=why):
                find_supervisor(recorded(tmp_path / why, **{"state": "running", **said}))
        assert asked == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("", "cannot be"), ("..", "cannot be"), ("../out", "cannot be"), ("/tmp/out", "cannot be"),  # noqa: S108
        (".hidden", "cannot be"), ("a/b/c/d/e/f/g", "cannot be"), ("a\0b", "cannot be"), ("link/out", "cannot be"),
        ("run/out", "is a run"), ("full", "is not empty"), ("file", "is not empty"), ("planned", "is not empty"),
    ],
)  # fmt: skip
def test_a_start_needs_a_new_folder_below_the_root(folder: str, why: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    recorded(root / "run")
    (root / "full").mkdir()
    (root / "full" / "notes.txt").touch()
    (root / "file").touch()
    (root / "planned.plan").mkdir()
    (root / "link").symlink_to(tmp_path)
    answer = client(root, control=True).get("/control/start", params={**START, "folder": folder}, headers=HTML)
    assert answer.status_code == 400
    assert why in answer.text


@pytest.mark.thorough
def test_a_start_is_confirmed_with_its_whole_command(tmp_path: Path) -> None:
    visitor = client(tmp_path, control=True)
    assert "/control/start?model=tiny_mamba" in visitor.get(f"/plan/answer?{QUESTION}").text
    assert "/control/start" not in client(tmp_path).get(f"/plan/answer?{QUESTION}").text
    assert 'name="folder"' in visitor.get(f"/control/start?{QUESTION}").text
    page = visitor.get("/control/start", params={**START, "folder": "exp/first"}).text
    assert f"tightfit train --plan {tmp_path}/exp/first.plan --output {tmp_path}/exp/first" in page
    assert list(tmp_path.iterdir()) == []
    wrong = {**START, "folder": "exp/other", "confirmed": confirmation(page)}
    assert visitor.post("/control/start", data=wrong, headers=HERE).status_code == 400
    for question in ("model=7b_mamba&card=4GB&gpus=1&host-ram=8GB", "model=tiny_llama&card=24GB&for=llamafactory"):
        answer = visitor.get("/control/start", params={**START, "question": question, "folder": "other"})
        assert answer.status_code == 400
        assert "no plan to start here" in answer.text


# --- a real run, in a real browser ----------------------------------------------------------------


def state_of(run: Path, wanted: str) -> RunRecord:
    end = patience.now() + 120
    while (found := read_run(run)) is None or found.state != wanted:
        assert patience.now() < end, (run.with_name("first.out")).read_text()
        time.sleep(0.1)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder for it. What is started there does not end with the page, and so not with the test either."""
    made = tmp_path / "runs" / "first"
    made.parent.mkdir()
    yield made
    if (left := read_run(made)) is not None and left.lives:
        os.kill(left.pid, signal.SIGKILL)


@pytest.mark.thorough
def test_a_run_is_started_stopped_and_resumed_from_the_page(run: Path, tmp_path: Path) -> None:
    need_a_browser()
    told = r"(tightfit: \S+ \S+ \S+: [^\n]*\n){3}"
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    question = "model=tiny_mamba&card=this&gpus=1&seq=64&precision=fp32&engine=zero1&max-steps=100000&effective-batch=1"
    with (
        served("--root", "runs", "--control", cwd=tmp_path, env=cache, ranks=True, told=told) as link,
        opened(f"{link}&lang=en") as page,
    ):
        page.goto(f"{link.partition('/?')[0]}/plan?{question}")
        page.click("#use summary")
        page.click("#start")
        page.fill("#folder", "first")
        assert complaints(page) == []
        page.keyboard.press("Enter")
        assert f"tightfit train --plan {run}.plan --output {run}" in page.text_content("pre")
        assert complaints(page) == []
        assert not run.exists()
        page.click("#confirm")
        page.wait_for_url("**/runs/view?run=0%2Ffirst")
        page.wait_for_selector("#state[data-state=running]")
        says(page, "#d-loss", "at step 1,")
        first = state_of(run, "running")
        assert complaints(page) == []
        page.click("#stop")
        assert str(first.pid) in page.text_content("main")
        page.click("#confirm")
        page.wait_for_selector("#state[data-state=stopped]")
        stopped = state_of(run, "stopped")
        assert stopped.exit_code == 4
        assert not Path(f"/proc/{first.pid}").exists()  # nobody waits for it: it was noticed
        page.click("#resume")
        assert f"tightfit train --plan {run}.plan" in page.text_content("pre")
        page.click("#confirm")
        page.wait_for_url("**/runs/view?run=0%2Ffirst")
        page.wait_for_selector("#state[data-state=running]")
        second = state_of(run, "running")
        assert second.pid != first.pid
        assert os.getsid(second.pid) == second.pid
    # The page has ended, and the run goes on from its checkpoint.
    end = patience.now() + 120
    while '"event": "step"' not in (said := (run / "events.jsonl").read_text()).partition('"event": "resumed"')[2]:
        assert patience.now() < end, said
        time.sleep(0.1)
    Stops().ask(run)
    assert state_of(run, "stopped").pid == second.pid
