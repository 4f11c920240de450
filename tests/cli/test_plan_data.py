"""The data of a job that `tightfit plan` writes files for."""

from __future__ import annotations

import json
import shutil
import subprocess
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


@pytest.mark.thorough
def test_a_file_is_found_from_wherever_the_plan_is_started(tmp_path: Path) -> None:
    Path("mine.jsonl").write_text('{"text": "one"}\n')
    data = orders("--data", "mine.jsonl", "--format", "text", "--max-samples", "9")
    assert (data["path"], data["format"], data["max_samples"]) == (str(tmp_path / "mine.jsonl"), "text", 9)


def test_shipped_data_with_an_ablation() -> None:
    data = orders("--data", "shipped:dialogues", "--ablation", "profile_and_history")
    assert (data["path"], data["ablation"]) == ("shipped:dialogues", "profile_and_history")


@pytest.mark.thorough
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
ON = ("--gpus", "2x24GB", "--host-ram", "64GB", "--engine", "zero2", "--write", "made", "--force")


def listed(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "dataset_info.json").write_text('{"[Easy Dataset] mine": {"file_name": "a.json"}}')


@pytest.mark.thorough
def test_the_data_set_of_a_llamafactory_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE)
    listed("data")  # where LLaMA-Factory looks, where nothing is said
    assert main(["plan", "lf.yaml", *ON, "--for", "llamafactory"]) == 0
    written = yaml.safe_load(Path("made/llamafactory.yaml").read_text())
    assert (written["dataset"], written["dataset_dir"]) == ("[Easy Dataset] mine", str(tmp_path / "data"))
    assert not Path("made/dataset_info.json").exists()
    assert "Left aside" not in capsys.readouterr().out
    assert main(["plan", "lf.yaml", *ON, "--for", "tightfit"]) == 0
    assert not Path("made/llamafactory.yaml").exists(), "the plan is for another trainer now"
    assert "Left aside" not in capsys.readouterr().out
    path = json.loads(Path("made/worker.json").read_text())["data"]["path"]
    assert path == f"{tmp_path}/data/dataset_info.json:[Easy Dataset] mine"


@pytest.mark.parametrize(
    ("keys", "packs"),
    [("", False), ("packing: true\n", True), ("neat_packing: true\n", True), ("neat_packing: false\n", False),
     ("packing: true\nneat_packing: false\n", True)],
)  # fmt: skip
def test_packing_is_the_files(keys: str, packs: bool) -> None:
    """LLaMA-Factory packs as it was told; our worker keeps packed samples apart, whichever way the file asked."""
    Path("lf.yaml").write_text(FILE + keys)
    assert main(["plan", "lf.yaml", *ON, "--for", "tightfit"]) == 0
    assert json.loads(Path("made/worker.json").read_text())["data"]["packing"] is packs
    assert main(["plan", "lf.yaml", *ON, "--for", "llamafactory"]) == 0
    written, before = (yaml.safe_load(Path(name).read_text()) for name in ("made/llamafactory.yaml", "lf.yaml"))
    for key in ("packing", "neat_packing"):
        assert written.get(key) == before.get(key)


def test_a_data_set_that_lies_elsewhere_is_asked_for_at_the_start() -> None:
    Path("lf.yaml").write_text(FILE + "dataset_dir: over/there\n")
    assert main(["plan", "lf.yaml", *ON]) == 0
    assert yaml.safe_load(Path("made/llamafactory.yaml").read_text())["dataset_dir"] == "over/there"
    done = subprocess.run(["bash", "made/launch.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no data at over/there/dataset_info.json" in done.stderr


@pytest.mark.parametrize("trainer", ["tightfit", "llamafactory"])
def test_a_data_set_by_name_that_is_there_does_not_stop_the_start(trainer: str) -> None:
    """The file is there; `dataset_info.json:NAME` is our word for an entry of it, and no file."""
    Path("lf.yaml").write_text(FILE)
    listed("data")
    assert main(["plan", "lf.yaml", *ON, "--for", trainer]) == 0
    script = Path("made/launch.sh").read_text()
    asked = next(line for line in script.splitlines() if line.startswith("data="))
    assert Path(asked.removeprefix("data=")).is_file()


@pytest.mark.thorough
def test_several_data_sets_stay_for_llamafactory_and_are_left_aside_by_our_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("lf.yaml").write_text(FILE.replace("mine", "mine,other"))
    assert main(["plan", "lf.yaml", *ON]) == 0
    assert "Left aside" not in capsys.readouterr().out
    assert yaml.safe_load(Path("made/llamafactory.yaml").read_text())["dataset"] == "[Easy Dataset] mine,other"
    assert not Path("made/dataset_info.json").exists()
    assert "data=" not in Path("made/launch.sh").read_text()
    assert main(["plan", "lf.yaml", *ON, "--for", "tightfit"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Left aside from lf.yaml: dataset." in said
    assert "No data is named" in said


@pytest.mark.thorough
def test_whose_trainer_a_llamafactory_file_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE)
    assert main(["plan", "lf.yaml", *ON]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The plan is for LLaMA-Factory, whose file lf.yaml is: --for tightfit plans for our worker." in said
    assert not Path("made/worker.json").exists()
    assert main(["train", "--plan", "made"]) == 2
    assert "is for another trainer: start it with bash" in capsys.readouterr().err
    for words in (("--for", "tightfit"), ("--launcher", "torchrun")):
        assert main(["plan", "lf.yaml", *ON, *words]) == 0
        assert "The plan is for LLaMA-Factory" not in " ".join(capsys.readouterr().out.split())
        assert Path("made/worker.json").exists()
        shutil.rmtree("made")


def test_training_with_a_data_set_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lf.yaml").write_text(FILE.replace("Qwen/Qwen1.5-0.5B", "tiny_llama").replace("lora", "full"))
    assert main(["train", "lf.yaml", "--dry-run"]) == 2
    assert "there is no data at data/dataset_info.json:[Easy Dataset] mine" in capsys.readouterr().err
