"""The data of a job that `tightfit plan` writes files for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_a_plan_that_is_written_says_on_what_it_would_train(capsys: pytest.CaptureFixture[str]) -> None:
    orders()
    said = " ".join(capsys.readouterr().out.split())
    assert "qwen1.5-0.5b is a shape without weights, so they are drawn from the seed: --model Qwen/Qwen1.5-0.5B" in said
    assert "No data is named: the samples are random tokens" in said
    assert main(["plan", *SMALL]) == 0
    assert "is a shape without weights" not in capsys.readouterr().out
    orders("--data", "shipped:text")
    assert "No data is named" not in capsys.readouterr().out


# --- a LLaMA-Factory file -----------------------------------------------------------------------

FILE = """model_name_or_path: Qwen/Qwen1.5-0.5B
stage: sft
finetuning_type: lora
template: qwen
dataset: "[Easy Dataset] mine"
cutoff_len: 512
per_device_train_batch_size: 1
output_dir: saves/a
"""
ON = ("--gpus", "2x24GB", "--host-ram", "64GB", "--write", "made", "--force")


def listed(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "dataset_info.json").write_text('{"[Easy Dataset] mine": {"file_name": "a.json"}}')


def test_the_data_set_of_a_llamafactory_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE)
    listed("data")  # where LLaMA-Factory looks, where nothing is said
    assert main(["plan", "lf.yaml", *ON, "--launcher", "llamafactory"]) == 0
    written = yaml.safe_load(Path("made/llamafactory.yaml").read_text())
    assert (written["dataset"], written["dataset_dir"]) == ("[Easy Dataset] mine", str(tmp_path / "data"))
    assert not Path("made/dataset_info.json").exists()
    assert "Left aside" not in capsys.readouterr().out
    path = json.loads(Path("made/worker.json").read_text())["data"]["path"]
    assert path == f"{tmp_path}/data/dataset_info.json:[Easy Dataset] mine"


@pytest.mark.parametrize(
    ("keys", "packs"),
    [("", False), ("packing: true\n", True), ("neat_packing: true\n", True), ("neat_packing: false\n", False),
     ("packing: true\nneat_packing: false\n", True)],
)  # fmt: skip
def test_packed_samples_are_kept_apart_and_that_is_said(keys: str, packs: bool) -> None:
    """By our worker and by LLaMA-Factory alike, whichever way the file asked for packing."""
    Path("lf.yaml").write_text(FILE + keys)
    assert main(["plan", "lf.yaml", *ON, "--launcher", "llamafactory"]) == 0
    text = Path("made/llamafactory.yaml").read_text()
    written = yaml.safe_load(text)
    assert (written["packing"], written.get("neat_packing", False)) == (packs, packs)
    assert json.loads(Path("made/worker.json").read_text())["data"]["packing"] is packs
    assert ("packing alone lets them see each other" in text) is packs


def test_a_data_set_that_lies_elsewhere_is_pointed_out() -> None:
    Path("lf.yaml").write_text(FILE + "dataset_dir: over/there\n")
    assert main(["plan", "lf.yaml", *ON]) == 0
    text = Path("made/llamafactory.yaml").read_text()
    assert "dataset_info.json is looked for in over/there, as seen from this folder: correct dataset_dir" in text
    assert yaml.safe_load(text)["dataset_dir"] == "over/there"


def test_several_data_sets_are_left_aside(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE.replace("mine", "mine,other"))
    assert main(["plan", "lf.yaml", *ON]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Left aside from lf.yaml: dataset." in said
    assert "No data is named" in said


def test_whose_trainer_a_llamafactory_file_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE)
    assert main(["plan", "lf.yaml", *ON]) == 0
    assert "--launcher llamafactory plans for LLaMA-Factory" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "lf.yaml", *ON, "--launcher", "llamafactory"]) == 0
    assert "tightfit's own worker" not in " ".join(capsys.readouterr().out.split())


def test_training_with_a_data_set_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE.replace("Qwen/Qwen1.5-0.5B", "tiny_llama").replace("lora", "full"))
    assert main(["train", "lf.yaml", "--dry-run"]) == 2
    assert "there is no data at data/dataset_info.json:[Easy Dataset] mine" in capsys.readouterr().err
