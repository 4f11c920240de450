"""What stands in the place of a record may be anything: no verb that reads a run's folder waits for it or breaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

sys.path.insert(0, str(Path(__file__).parents[1] / "web"))
sys.path.insert(0, str(Path(__file__).parent))

from stored import store
from visits import client, step_line

from tightfit.cli import main, watch
from tightfit.runs.processes import this_host
from tightfit.runs.records import AttemptRecord, attempt_path, write_attempt

RECORDS = (
    "run.json",
    "events.jsonl",
    "plan/worker.json",
    "attempts/001.json",
    "checkpoints/step-00000002/manifest.json",
    "checkpoints/step-00000002/state.json",
    "errors/rank-0.json",
    "heartbeats/rank-0",
    "logs/rank-0.log",
    "lock",
)
ENDLESS = ("events.jsonl", "logs/rank-0.log")
"""What may be as long as a run is."""


def put_directory(path: Path) -> None:
    path.mkdir()
    (path / "somebody's").write_text("own")


def put_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


STRANGERS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": put_directory,
    "huge file": put_huge_file,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "torn": lambda path: path.write_text('{"schema": 1, "sta'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "another's": lambda path: path.write_text("[1, null, {}]"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed, with every record that a run may have."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run.mkdir()
    words = ["plan", "--model", "tiny_mamba", "--seq", "64", "--write"]
    assert main([*words, str(run / "plan")]) == 0
    shutil.copytree(run / "plan", run.parent / "plan")
    said = {
        "schema": 1, "kind": "train", "command": ["tightfit", "train"], "pid": 2**22 + 1, "host": this_host(),
        "started": "2026-02-03T04:05:06+00:00", "ended": "2026-02-03T05:05:06+00:00", "state": "failed", "exit_code": 1,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(said))
    start = {"event": "start", "at": 1.0, "model": "m", "engine": "zero2", "world": 1, "launcher": "tightfit"}
    saved = {"event": "saved", "at": 9.0, "folder": "model", "files": ["model.safetensors"]}
    lines = [start, *(step_line(number) for number in range(1, 9)), saved]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_attempt(
        run,
        AttemptRecord(
            number=1, started="2026-02-03T04:05:06+00:00", plan="ZeRO-2", ranks=1, effective_batch=4,
            ended="2026-02-03T05:05:06+00:00", state="failed", exit_codes=(1,),
        ),
    )  # fmt: skip
    assert attempt_path(run, 1).is_file()
    store(run, 2)
    for name, text in {
        "errors/rank-0.json": json.dumps({"kind": "bug", "text": "ValueError: no", "rank": 0, "time": 2.0}),
        "heartbeats/rank-0": "17 forward 4 1".ljust(63) + "\n",
        "logs/rank-0.log": "Traceback (most recent call last):\nValueError: no\n",
        "lock": "",
    }.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    return run


class Hangs(BaseException):
    """Not an error that a reader could take for one of the disk's."""


@contextmanager
def no_hang(seconds: int = 60) -> Iterator[None]:
    """What waits for a pipe waits for ever; the limit is for that alone."""

    def give_up(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verbs(run: Path, plan: Path) -> list[list[str]]:
    train = ["train", "--plan", str(plan), "--dry-run", "--output"]
    return [
        ["diagnose", str(run)],
        ["watch", str(run), "--once"],
        ["checkpoints", str(run)],
        ["checkpoints", str(run), "--verify"],
        ["clean", str(run), "--dry-run"],
        ["export", str(run), "--to", str(run.parent / "exported")],
        [*train, str(run)],
        [*train, str(run), "--overwrite"],
        [*train, str(run.parent / "other"), "--resume", str(run)],
        [*train[:1], "--plan", str(run / "plan"), *train[3:], str(run.parent / "other")],
    ]


def places() -> Iterator[ParameterSet]:
    """Each with each. Records are read by the same few functions: what `make test` leaves out is one more variant."""
    for number, name in enumerate(RECORDS):
        for place, each in enumerate(STRANGERS):
            if each != "huge file" or name not in ENDLESS:
                is_told = each in ("pipe", "another's") or (number + place) % 3 == 0
                yield pytest.param(name, each, marks=() if is_told else pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "stranger"), list(places()))
def test_whatever_stands_in_the_place_of_a_record_is_said_or_passed_over(
    name: str,
    stranger: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "ONCE_S", 0.0)  # the machine's load is of no interest
    run = tmp_path / "runs" / "run"
    shutil.copytree(whole, run)
    (run / name).unlink()
    STRANGERS[stranger](run / name)
    for words in verbs(run, whole.parent / "plan"):
        with no_hang():
            code = main(words)
        out, err = capsys.readouterr()
        assert code in (0, 1, 2), words
        if code == 2:
            assert err.startswith("tightfit: "), words
            assert err.count("\n") == 1, words
        else:
            assert out, words
    with no_hang():
        visitor = client(run.parent)
        for view in ("/runs", "/runs/table", "/runs/view?run=0/run", "/runs/log?run=0/run&name=logs/rank-0.log"):
            assert visitor.get(view).status_code in (200, 404), view
