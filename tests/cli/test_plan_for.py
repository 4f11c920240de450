"""`tightfit plan --for`: a plan is for the trainer that will run it, and the file that it writes reproduces it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tightfit
from tightfit.cli import main
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.types import ConfigError

QUESTIONS = {
    "32B LoRA on 4 RTX 4090": {"model": "qwen2.5-32b", "method": "lora", "gpus": "4xRTX4090", "host_ram": "256GB"},
    "7B LoRA on one RTX 4090": {"model": "qwen2.5-7b", "method": "lora", "gpus": "1xRTX4090", "seq": 4096},
    "32B LoRA on 8 A100": {"model": "qwen2.5-32b", "method": "lora", "gpus": "8xA100-80GB", "seq": 8192},
    "32B LoRA on 8 DCUs": {"model": "qwen2.5-32b", "method": "lora", "gpus": "8xK100-64GB", "engine": "zero3"},
    "32B QLoRA on 2 RTX 4090": {"model": "qwen2.5-32b", "method": "qlora", "gpus": "2xRTX4090"},
    "7B QLoRA on 12 GB": {"model": "qwen2.5-7b", "method": "qlora", "gpus": "1x12GB"},
    "8B LoRA, packed": {"model": "llama-3.1-8b", "method": "lora", "gpus": "2x24GB", "packing": True},
}


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def check_written(found: tightfit.api.Planned, gpus: str, folder: Path, **ram: str) -> None:
    """What LLaMA-Factory would start from these files holds what the plan says, byte for byte."""
    assert found.chosen is not None
    files = [path.name for path in found.write(folder)]
    assert "llamafactory.yaml" in files
    assert "worker.json" not in files
    way = found.chosen
    back = tightfit.estimate(folder / "llamafactory.yaml", gpus=gpus, world=way.world, **ram)
    assert back.footprint.gpu == way.footprint.gpu
    assert back.footprint.host == way.footprint.host
    assert way.levers.checkpointing.layers in (None, 0)
    assert way.levers.engine != "fsdp2"
    launch = (folder / "launch.sh").read_text()
    assert "exec llamafactory-cli train llamafactory.yaml" in launch


@pytest.mark.thorough
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_file_that_is_written_reproduces_the_plan(question: dict[str, str], tmp_path: Path) -> None:
    batch = 4 if "8x" not in question["gpus"] else 8
    found = tightfit.plan(trainer="llamafactory", effective_batch=batch, **question)
    if question["method"] != "full" and found.chosen:
        assert found.chosen.levers.lora is not None
        assert found.chosen.levers.lora.dtype == "fp32"
    assert found.fits, found.because
    ram = {"host_ram": question["host_ram"]} if "host_ram" in question else {}
    check_written(found, question["gpus"], tmp_path, **ram)


MODELS = tuple(name for name in PRESETS if checkpoint_of(name) and "mamba" not in name)
METHODS = ("full", "lora", "qlora")
CARDS = ("1x16GB", "2xRTX4090", "8xA100-80GB", "8xK100-64GB", "2xV100-32GB")


def check_preset(model: str, method: str, gpus: str, folder: Path) -> bool:
    """Whether it fits; only then there is something to check."""
    found = tightfit.plan(trainer="llamafactory", model=model, method=method, gpus=gpus, host_ram="512GB")
    if found.fits:
        check_written(found, gpus, folder, host_ram="512GB")
    return found.fits


EACH = [(model, method) for model in MODELS for method in METHODS]
QUICK = [("qwen1.5-1.8b", "full"), ("qwen1.5-1.8b", "lora"), ("qwen1.5-1.8b", "qlora")]
"""Each method, and models that fit the card that is theirs below."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "method"), [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in EACH]
)
def test_every_preset_on_a_size_of_card(model: str, method: str, tmp_path: Path) -> None:
    """Each model with each method, and each method on each size of card."""
    turn = MODELS.index(model) + 2 * METHODS.index(method)
    assert check_preset(model, method, CARDS[turn % len(CARDS)], tmp_path) or (model, method) not in QUICK


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_every_preset_on_every_size_of_card(model: str, method: str, tmp_path: Path) -> None:
    assert any([check_preset(model, method, gpus, tmp_path / gpus) for gpus in CARDS])


def test_a_plan_for_our_worker_brings_no_file_of_another_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LLaMA-Factory of the same levers would hold more than was promised."""
    ask(capsys, "--model", "qwen1.5-1.8b", "--method", "lora", "--gpus", "1x24GB", "--write", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {"worker.json", "deepspeed.json", "launch.sh", "PLAN.md"}
    assert "`--for llamafactory`" in (tmp_path / "PLAN.md").read_text()


def test_what_a_trainer_does_not_have_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--model", "qwen1.5-0.5b", "--gpus", "2x24GB")
    for words, fix in (
        (("--for", "llamafactory", "--checkpointing", "layers:3"), "--checkpointing full or none"),
        (("--for", "llamafactory", "--engine", "fsdp2"), "take a ZeRO engine"),
        (("--for", "llamafactory", "--method", "lora", "--adapter-dtype", "bf16"), "keeps adapters in fp32"),
        (("--for", "trainer", "--launcher", "deepspeed"), "leave --launcher out"),
        (("--for", "axolotl"), "--for"),
    ):
        assert main(["plan", *small, *words]) == 2
        assert fix in capsys.readouterr().err
    assert main(["plan", "--model", "7b_mamba", "--gpus", "8x80GB", "--for", "llamafactory"]) == 2
    assert "no Mamba kernels" in capsys.readouterr().err


@pytest.mark.thorough
def test_for_the_trainer_the_users_own_script_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "qwen2.5-7b", "--gpus", "4xRTX4090", "--host-ram", "256GB", "--for", "trainer")
    found = ask(capsys, *words, "--write", str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"training_args.json", "accelerate.yaml", "launch.sh"} <= names
    assert not {"worker.json", "llamafactory.yaml"} & names
    levers = found["chosen"]["levers"]  # type: ignore[index]
    assert levers["checkpointing"] in ("full", "none")
    assert "exec accelerate launch" in (tmp_path / "launch.sh").read_text()
    assert "tightfit.train" not in (tmp_path / "launch.sh").read_text()
    args = json.loads((tmp_path / "training_args.json").read_text())
    assert args["per_device_train_batch_size"] == levers["micro_batch"]
    assert args["gradient_checkpointing"] is (levers["engine"] != "fsdp2" and levers["checkpointing"] == "full")
    assert args["use_liger_kernel"] is (levers["loss"] == "fused")


@pytest.mark.thorough
def test_a_job_file_can_say_it_and_our_worker_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: qwen1.5-0.5b\ntrainer: llamafactory\nhardware: {gpus: 2x24GB}\n")
    assert ask(capsys, str(job))["trainer"] == "llamafactory"
    assert ask(capsys, str(job), "--for", "tightfit")["trainer"] == "tightfit"
    assert main(["train", str(job), "--dry-run"]) == 2
    assert "is for LLaMA-Factory" in capsys.readouterr().err


def test_from_python() -> None:
    found = tightfit.plan(trainer="llamafactory", model="qwen1.5-0.5b", gpus="2x24GB")
    assert found.plan.job.trainer == "llamafactory"
    assert found.report()["trainer"] == "llamafactory"
    with pytest.raises(ConfigError, match="trainer"):
        tightfit.plan(trainr="llamafactory", model="qwen1.5-0.5b", gpus="2x24GB")


def test_llamafactory_casts_what_trains_to_fp32_before_deepspeed_casts_it_back() -> None:
    """Full training of 7B on ZeRO-2: 28.4 GiB of fp32 weights at the start, where our worker has half of that."""
    gpus = {"gpus": "8x80GB", "engine": "zero2", "offload_optimizer": "cpu", "host_ram": "512GB"}
    ours, theirs = (tightfit.plan(model="qwen2.5-7b", trainer=name, **gpus) for name in ("tightfit", "llamafactory"))
    assert ours.chosen
    assert theirs.chosen
    wide = theirs.chosen.footprint.gpu.phases["init"].components["weights"]
    assert wide == 4 * theirs.plan.shape.parameters
    assert wide == 2 * ours.chosen.footprint.gpu.phases["init"].components["weights"]


def test_versions_follow_the_trainer(tmp_path: Path) -> None:
    """LLaMA-Factory 0.9.5 asks for DeepSpeed 0.18.4 at most."""
    found = tightfit.plan(trainer="llamafactory", model="qwen1.5-0.5b", gpus="2x24GB", engine="zero3")
    assert found.chosen
    assert found.chosen.levers.deepspeed_version == "0.18.4"
    found.write(tmp_path)
    zero = json.loads((tmp_path / "deepspeed.json").read_text())["zero_optimization"]
    assert not {"compute_grad_norm", "parameter_alignment"} & set(zero)
    assert "DeepSpeed 0.18.4" in (tmp_path / "PLAN.md").read_text()
