"""`tightfit plan --tier all` beside a job that leaves a tier little to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.cli import main

JOB = "model: qwen1.5-1.8b\nmethod: lora\nsequence: 2048\neffective_batch: 16\nprecision: fp16\n"
TITLE = "The same here, since what you say yourself wins over a tier:"


def test_tiers_that_do_not_differ_here_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["plan", str(tmp_path / "job.yaml"), "--gpus", "1x4GB", "--tier", "all"]) == 0
    out = capsys.readouterr().out
    assert TITLE in out
    assert "\n  - minimal, standard, fp16_safe, extreme\n" in out
    assert main(["plan", "--model", "qwen1.5-1.8b", "--method", "lora", "--gpus", "1x4GB", "--tier", "all"]) == 0
    assert TITLE not in capsys.readouterr().out
