"""A job of two stages, trained for real: the embeddings alone, then adapters on what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import warm_desk
from tightfit.cli import main

JOB = """
model: tiny_llama
data: {{path: "shipped:text"}}
sequence: 64
effective_batch: 2
precision: fp32
method: lora
learning_rate: 1.0e-2
levers: {{engine: zero1}}
saving: {{folder: {folder}}}
stages:
  - {{trains: embeddings, max_steps: 2}}
  - {{max_steps: 1}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path / "out"), encoding="utf-8")
    return path


@pytest.mark.thorough
def test_embeddings_first_then_adapters(job: Path) -> None:
    trained = warm_desk.run("train", str(job), "--num-gpus", "1", "--no-probe", cwd=job.parent, ranks=True)
    assert trained.returncode == 0, trained.stderr
    out = job.parent / "out"
    assert "65,536 parameters train, as planned" in trained.stdout
    worker = json.loads((out / "stage-2" / "plan" / "worker.json").read_text(encoding="utf-8"))
    assert worker["model"]["weights"] == str(out / "stage-1" / "model")
    adapter = json.loads((out / "stage-2" / "model" / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == str(out / "stage-1" / "model")
    again = warm_desk.run("train", str(job), "--num-gpus", "1", cwd=job.parent, ranks=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is done already") == 2


@pytest.mark.thorough
def test_the_plan_shows_every_stage(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--json", "--write", str(tmp_path / "plans")]) == 0
    first, second = json.loads(capsys.readouterr().out)["stages"]
    assert first["chosen"]["levers"]["trains"] == "embeddings"
    assert second["chosen"]["levers"]["method"] == "lora"
    worker = json.loads((tmp_path / "plans" / "stage-2" / "worker.json").read_text(encoding="utf-8"))
    assert worker["model"]["weights"] == str(tmp_path / "out" / "stage-1" / "model")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["estimate", "JOB"], "pick one with --only-stage 1 to --only-stage 2"),
        (["estimate", "JOB", "--only-stage", "3"], "job.yaml has the stages 1 to 2"),
        (["plan", "--model", "tiny_llama", "--only-stage", "1"], "there are none: leave it out"),
    ],
)
def test_which_stage(job: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(job) if word == "JOB" else word for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_one_stage_is_estimated(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(job), "--only-stage", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["levers"]["trains"] == "embeddings"
