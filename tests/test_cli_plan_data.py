"""The data of a job that `tightfit plan` writes files for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli import main

SMALL = ("--model", "qwen1.5-0.5b", "--gpus", "2x24GB", "--host-ram", "64GB")


def orders(*words: str) -> Any:
    assert main(["plan", *SMALL, *words, "--write", "made", "--force"]) == 0
    return json.loads(Path("made/worker.json").read_text())["data"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_is_found_from_wherever_the_plan_is_started(tmp_path: Path) -> None:
    Path("mine.jsonl").write_text('{"text": "one"}\n')
    data = orders("--data", "mine.jsonl", "--format", "text", "--max-samples", "9")
    assert (data["path"], data["format"], data["max_samples"]) == (str(tmp_path / "mine.jsonl"), "text", 9)


def test_shipped_data_with_an_ablation() -> None:
    data = orders("--data", "shipped:dialogues", "--ablation", "profile_and_history")
    assert (data["path"], data["ablation"]) == ("shipped:dialogues", "profile_and_history")
