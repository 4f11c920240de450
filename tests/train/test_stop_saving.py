"""Signals while a checkpoint is being written, on a disk that is slow enough to be caught at it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import edit, start_ranks, write_plan

import patience
from tightfit.runs.checkpoints import checked, newest_first, spans_of, step_of, verify

pytestmark = pytest.mark.thorough

AGAIN_S = 0.7
"""A second signal that comes sooner is taken for the first."""


def started(folder: Path, *, background: bool) -> tuple[Path, list[subprocess.Popen[str]]]:
    """Two ranks in the middle of their second save."""
    plan = write_plan(folder, 2, model="tiny_llama", engine="fsdp2", seq=32, effective_batch=2, max_steps=100_000)
    edit(plan, saving__every_steps=3, saving__async_save=background, saving__keep_last=9)
    command = [sys.executable, str(Path(__file__).with_name("slowly.py")), str(plan / "worker.json"), "--no-probe"]
    ranks = start_ranks(command, 2, folder / "cache")
    run, deadline = folder / "run", patience.now() + 120
    while not (newest_first(run) and list((run / "checkpoints").glob(".step-*.partial"))):
        assert patience.now() < deadline
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.02)
    return run, ranks


def ended(ranks: list[subprocess.Popen[str]]) -> list[int]:
    for rank in ranks:
        rank.communicate(timeout=60)
    return [rank.returncode for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_signal_during_a_save_is_heard_after_it(tmp_path: Path, background: bool) -> None:
    run, ranks = started(tmp_path, background=background)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    assert ended(ranks) == [4, 4]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    last = [event["step"] for event in events if event["event"] == "step"][-1]
    newest = newest_first(run)[0]
    assert step_of(newest) == last
    verify(newest, spans_of(checked(newest)))
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    run, ranks = started(tmp_path, background=False)
    whole = newest_first(run)[0]
    for wait in (AGAIN_S, 0.0):
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        time.sleep(wait)
    began = patience.now()
    assert ended(ranks) == [143, 143]
    assert patience.now() - began < 5
    assert newest_first(run)[0] == whole
    verify(whole, spans_of(checked(whole)))
