"""Stages in a job file: what each of them is, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.job import Job
from tightfit.job.file import folder_of_merged_model, model_left_by, read_job, stage_folder, stage_of
from tightfit.types import ConfigError

JOB = """
model: tiny_llama
method: lora
lora: {rank: 4}
epochs: 3
learning_rate: 1.0e-4
stages:
  - {trains: embeddings, max_steps: 20, learning_rate: 1.0e-3}
  - {lora: {alpha: 32}}
  - {method: full, trains: layers}
"""


def read(folder: Path, text: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return read_job(path).job


def test_a_stage_wins_over_the_job(tmp_path: Path) -> None:
    job = read(tmp_path, JOB)
    first, second, third = (stage_of(job, number) for number in (1, 2, 3))
    assert (first.trains, first.method, first.max_steps, first.epochs) == ("embeddings", "full", 20, None)
    assert (first.learning_rate, second.learning_rate) == (1e-3, 1e-4)
    assert (second.method, second.lora.rank, second.lora.alpha, second.epochs) == ("lora", 4, 32, 3)
    assert (third.method, third.trains) == ("full", "layers")
    assert not first.stages


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("{model: x}", r"stages\[1\].model in job.yaml belongs to the whole job"),
        ("{saving: {folder: x}}", r"stages\[1\].saving.folder in job.yaml belongs to the whole job"),
        ("{max_stepz: 1}", "unknown field 'max_stepz' in job.yaml; did you mean 'max_steps'"),
        ("{trains: embedding}", r"stages\[1\].trains in job.yaml knows no 'embedding'"),
        ("{max_steps: 0}", r"stages\[1\].max_steps in job.yaml must be a whole number of at least 1"),
        ("embeddings", "stages in job.yaml must be a list of blocks of fields"),
    ],
)
def test_what_is_no_stage(tmp_path: Path, stage: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, f"model: tiny_llama\nstages: [{stage}]\n")


def test_the_next_stage_starts_from_merged_adapters(tmp_path: Path) -> None:
    assert model_left_by(tmp_path, 1) is None
    for folder in (stage_folder(tmp_path, 1) / "model", folder_of_merged_model(tmp_path, 1)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        assert model_left_by(tmp_path, 1) == folder
