"""`tightfit plan --tier all` beside a job that leaves a tier little to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.cli import main

JOB = "model: qwen1.5-1.8b\nmethod: lora\nsequence: 2048\neffective_batch: 16\nprecision: fp16\n"
TITLE = "The same here, since what you say yourself wins over a tier:"


@pytest.mark.thorough
def test_tiers_that_do_not_differ_here_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["plan", str(tmp_path / "job.yaml"), "--gpus", "1x4GB", "--tier", "all"]) == 0
    out = capsys.readouterr().out
    assert TITLE in out
    assert "\n  - minimal, standard, fp16_safe, extreme\n" in out
    assert main(["plan", "--model", "qwen1.5-1.8b", "--method", "lora", "--gpus", "1x4GB", "--tier", "all"]) == 0
    assert TITLE not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_tier_that_does_not_fit_proposes_no_change_where_none_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    asked = [
        "plan",
        str(tmp_path / "job.yaml"),
        "--gpus",
        "1x4GB",
        "--host-ram",
        "32GB",
        "--write",
        str(tmp_path / "p"),
    ]
    assert main([*asked, "--tier", "stage3"]) == 2
    said = capsys.readouterr().err
    assert "the tier stage3 does not fit, so nothing was written: leave --tier out, and FSDP2" in said
    assert "--allow" not in said
    assert not (tmp_path / "p").exists()
    assert main([*asked, "--tier", "auto"]) == 0
    assert "Tier minimal" in capsys.readouterr().out
