"""A run that failed: its cause, and fixes that lead to the Plan view."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import client, step_line, written

from tightfit.cli import main
from tightfit.web.failure import find_failure
from tightfit.web.plan_answer import read_address

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."


def attempt(**more: object) -> dict[str, Any]:
    """As it is written down when every way out was tried."""
    cause = {
        "id": "device-oom", "kind": "device-oom", "sentence": "The GPU ran out of memory in the backward.",
        "confidence": "certain", "rank": 1, "phase": "backward", "evidence": [f"rank-1.log:17: {OOM}"],
    }  # fmt: skip
    return {
        "schema": 1, "number": 1, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00",
        "plan": "DDP", "ranks": 2, "effective_batch": 8, "state": "failed", "exit_codes": [1, 1], "first_step": 0,
        "last_step": 3, "kept_step": 2, "cause": cause, "next": None, **more,
    }  # fmt: skip


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """With a plan: a run of ours on two cards of 24 GB."""
    said = ["tightfit", "train", "--model", "1b_mamba", "--gpus", "2x24GB", "--host-ram", "64GB"]
    run = written(tmp_path / "run", [step_line(1)], state="failed", exit_code=1, command=said)
    assert main(["plan", "--model", "1b_mamba", "--gpus", "2x24GB", "--seq", "512", "--write", str(run / "plan")]) == 0
    return run


@pytest.mark.thorough
def test_what_was_judged_at_its_end_is_believed(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (failed / "attempts").mkdir()
    (failed / "attempts" / "001.json").write_text(json.dumps(attempt()))
    found = find_failure(failed)
    assert found is not None
    assert (found.cause, found.rank, found.phase) == ("The GPU ran out of memory in the backward.", 1, "backward")
    assert str(found.predicted).startswith("Predicted in the backward pass: ")
    own = dict(parse_qsl(found.address or ""))
    assert (own["model"], own["gpus"], own["host-ram"], own["seq"]) == ("1b_mamba", "2x24GB", "64GB", "512")
    asked = {str(each.fix.command): dict(parse_qsl(each.address)) for each in found.remedies if each.address}
    assert asked["levers: {sequence: N}"]["seq"] == "256"
    assert asked["method: lora"] == {**own, "method": "lora"}
    for each in found.remedies:  # the Plan view can be asked all of them
        if each.address:
            read_address(parse_qsl(each.address)).request()
    page = client(failed.parent).get("/runs/failure", params={"run": "0/run"}).text
    assert "ran out of memory in the backward" in page
    assert page.count('class="button" href="/plan?') == len(asked)
    assert "显存" in client(failed.parent).get("/runs/failure", params={"run": "0/run", "lang": "zh"}).text


@pytest.mark.thorough
def test_without_a_judgement_its_logs_are_judged(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (failed / "logs").mkdir()
    (failed / "logs" / "rank-1.log").write_text(f"Traceback (most recent call last):\n{OOM}\n")
    found = find_failure(failed)
    assert found is not None
    assert "The GPU ran out of memory" in str(found.cause)
    assert any("rank-1.log:2: torch.OutOfMemoryError" in str(line) for line in found.evidence)


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [step_line(1)], state="failed", exit_code=None)
    (run / "run.json").unlink()
    assert find_failure(run) is None
    assert "nothing in its folder says why" in client(tmp_path).get("/runs/failure", params={"run": "0/run"}).text
