"""The records of attempts: whole or not there, and read as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli import main
from tightfit.messages import Message
from tightfit.runs import records
from tightfit.runs.events import AttemptBegan, AttemptFailed, event_of
from tightfit.runs.lines import line_of
from tightfit.runs.records import AttemptRecord, Cause, Next, RunFolder, attempt_path, read_attempts, write_attempt
from tightfit.runs.watching import RunEye, find_damaged

CAUSE = Cause(
    id="killed",
    kind="preempted",
    sentence="Rank 1 was killed.",
    confidence="likely",
    rank=1,
    phase="forward",
    evidence=("exit code: rank 1: -9 (SIGKILL)",),
)
RECORD = AttemptRecord(
    number=1,
    started="2026-07-01T10:00:00+00:00",
    plan="ZeRO-2, micro batch 4 × 1 on 2 ranks",
    ranks=2,
    effective_batch=8,
    ended="2026-07-01T10:05:00+00:00",
    state="failed",
    exit_codes=(1, -9),
    first_step=0,
    last_step=57,
    kept_step=50,
    cause=CAUSE,
    next=Next(
        action="smaller plan", because=Message("runs.raised", error="X"), changed=("ZeRO-2 → ZeRO-3",), wait_s=1.0
    ),
)
FAILED = AttemptFailed(
    number=1,
    kind="preempted",
    text="Rank 1 was killed.",
    step=57,
    kept_step=50,
    action="same plan",
    because="it may not happen again",
    wait_s=4.0,
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Messages by their ids, and text of an earlier release as text."""
    assert write_attempt(tmp_path, RECORD)
    assert read_attempts(tmp_path) == (RECORD,)
    assert RECORD.lost_steps == 7
    assert sorted(path.name for path in (tmp_path / "attempts").iterdir()) == ["001.json"]


def test_a_record_of_an_attempt_that_runs(tmp_path: Path) -> None:
    running = AttemptRecord(number=2, started="now", plan="p", ranks=1, effective_batch=None)
    write_attempt(tmp_path, RECORD)
    write_attempt(tmp_path, running)
    assert read_attempts(tmp_path) == (RECORD, running)
    assert running.state == "running"
    assert running.lost_steps == 0


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    write_attempt(tmp_path, RECORD)
    place = tmp_path / "attempts"
    whole = json.loads(attempt_path(tmp_path, 1).read_text())
    for number, text in enumerate(
        ["", "[1]", "{}", json.dumps({**whole, "schema": 99}), json.dumps({**whole, "ranks": "1"}), "{" * 99], start=2
    ):
        (place / f"{number:03d}.json").write_text(text)
    (place / "notes.json").write_text("{}")
    (place / "001").mkdir()
    assert read_attempts(tmp_path) == (RECORD,)
    assert read_attempts(tmp_path / "nowhere") == ()


def test_what_a_newer_version_adds_is_passed_over(tmp_path: Path) -> None:
    write_attempt(tmp_path, RECORD)
    path = attempt_path(tmp_path, 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    assert read_attempts(tmp_path) == (RECORD,)


def test_a_disk_that_takes_nothing_costs_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("in the way")
    assert not write_attempt(tmp_path, RECORD)
    records.put_aside(RunFolder(tmp_path), 1, [])
    records.append_event(RunFolder(tmp_path / "nowhere"), FAILED)


def test_logs_and_last_words_make_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.log("rank-0"), folder.errors / "rank-1.json", folder.plan / "worker.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)
    records.keep_plan(folder, 3)
    records.put_aside(folder, 3, [folder.log("rank-0"), folder.log("rank-1")])
    kept = tmp_path / "attempts/003"
    assert sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()) == [
        "errors/rank-1.json",
        "plan/worker.json",
        "rank-0.log",
    ]
    assert not folder.errors.exists()
    assert (folder.plan / "worker.json").exists()


def test_attempts_are_events_too_behind_a_torn_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.events.write_text('{"event": "step", "st')
    began = AttemptBegan(number=2, plan="ZeRO-3", changed=("ZeRO-2 → ZeRO-3",))
    records.append_event(folder, FAILED)
    records.append_event(folder, began)
    lines = folder.events.read_text().splitlines()
    assert [event_of(line) for line in lines[1:]] == [FAILED, began]
    assert str(line_of(FAILED)[0]) == (
        "✗ attempt 1 failed after step 57 (the checkpoint of step 50 is kept): Rank 1 was killed → same plan, in 4 s: "
        "it may not happen again"
    )
    assert str(line_of(began)[0]) == "→ attempt 2: ZeRO-3; ZeRO-2 → ZeRO-3"


def test_events_of_another_version_are_shown_as_they_are() -> None:
    assert type(event_of('{"event": "attempt", "text": "x"}')).__name__ == "Other"
    found = event_of('{"event": "attempt_failed", "number": 3}')
    assert isinstance(found, AttemptFailed)
    assert (found.kind, found.step, found.wait_s) == ("unknown", None, None)


WRONG = ("text", -1.5, float("inf"), None, [["deep"]])


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [1, pytest.param(len(WRONG) - 1, marks=pytest.mark.slow)])
def test_a_record_with_wrong_types_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: int
) -> None:
    """In every field of every record of a run, whatever stands there: no traceback from `diagnose` or `watch`.

    `kinds`: of wrong values beside the last, in turn.
    """
    run = tmp_path / "run"
    for path in ("plan", "logs", "attempts"):
        (run / path).mkdir(parents=True)
    (run / "logs" / "rank-0.log").write_text("RuntimeError: no such tensor\n")
    levers = {
        "engine": "zero2", "method": "full", "optimizer": "adamw", "offload_optimizer": "none", "offload_param": "none",
        "micro_batch": 1, "accum": 1, "seq": 8, "precision": "bf16", "checkpointing": "none", "attention": "sdpa",
        "loss": "plain",
    }  # fmt: skip
    gpu = {"required_bytes": 1, "peak_bytes": 1}
    records: dict[str, dict[str, Any]] = {
        "run.json": {
            "schema": 1, "kind": "train", "command": ["x"], "pid": 1, "host": "here", "state": "failed", "exit_code": 3,
            "started": "2026-02-03T04:05:06+00:00", "ended": "2026-02-03T04:05:07+00:00",
        },
        "plan/worker.json": {
            "schema": 1, "model": {"name": "x", "config": None}, "levers": levers, "saving": {"folder": "x"},
            "world": {"nodes": 1, "gpus_per_node": 1, "ranks": 1, "vendor": "cpu"}, "buckets": {"pin_memory": True},
            "predicted": {"gpu": gpu, "host": {"peak_bytes_per_node": 1}, "step_s": 1.0, "tokens_per_s": 1.0},
        },
        "attempts/001.json": {
            "schema": 1, "number": 1, "started": "x", "plan": "x", "ranks": 1, "effective_batch": 1, "ended": "x",
            "state": "failed", "exit_codes": [1], "first_step": 0, "last_step": 1, "kept_step": 1,
            "cause": {
                "id": "x", "kind": "crash", "sentence": "x", "confidence": "likely", "rank": 0, "phase": None,
                "evidence": ["x"],
            },
            "next": {"action": "stop", "because": "x", "changed": [], "wait_s": 0.0},
        },
    }  # fmt: skip
    for name, record in records.items():
        (run / name).write_text(json.dumps(record))
    assert find_damaged(run) == ()
    for name, record in records.items():
        for number, place in enumerate(places_in(record)):
            for wrong in (*(WRONG[(number + more) % (len(WRONG) - 1)] for more in range(kinds)), WRONG[-1]):
                (run / name).write_text(json.dumps(with_value(record, place, wrong)))
                main(["diagnose", str(run)])
                told = capsys.readouterr()
                assert "Traceback" not in told.err
                RunEye(run).look()
                if wrong == [["deep"]] and place[-1] in ("engine", "state", "number", "pid", "exit_codes"):
                    assert find_damaged(run) == (run / name,), place
                    assert f"{run / name} is damaged, and was passed over" in told.err
        (run / name).write_text(json.dumps(record))


def places_in(tree: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in tree.items():
        found.append((*above, key))
        found += places_in(value, (*above, key)) if isinstance(value, dict) else []
    return found


def with_value(tree: dict[str, Any], place: tuple[str, ...], value: object) -> dict[str, Any]:
    first, *rest = place
    return {**tree, first: with_value(tree[first], tuple(rest), value) if rest else value}
