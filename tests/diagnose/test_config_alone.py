"""What the memory model says of a config or a plan that has no log yet, and beside a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_logs import CORPUS

from tightfit.cli import main

GIB = 2**30
EXAMPLES = Path(__file__).parents[2] / "examples"
OOM = CORPUS / "oom-logits--eight-ranks-and-a-watchdog.log"
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: full
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["diagnose", *words])
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), err


def as_tree(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["diagnose", *words, "--json"])
    tree = json.loads(capsys.readouterr().out)
    assert isinstance(tree, dict)
    return tree


def job(gpus: str, engine: str) -> str:
    Path("job.yaml").write_text(f"model: 7b_mamba\nhardware: {{gpus: {gpus}}}\nlevers: {{engine: {engine}}}\n")
    return "job.yaml"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.parent.name, marks=[] if "gb" in path.parent.name else [pytest.mark.slow])
        for path in sorted(EXAMPLES.glob("*/job.yaml"))
    ],
)
def test_a_job_without_an_engine_is_judged_by_its_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "--config", str(EXAMPLES / name / "job.yaml"))
    assert (code, err) == (0, "")
    assert "it fits. It is priced as `tightfit train` would plan it." in out


@pytest.mark.thorough
def test_a_job_that_no_plan_makes_fit(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("model: llama-3.1-8b\nhardware: {gpus: 1xRTX4090, host_ram: 32GB}\n")
    code, out, _ = said(capsys, "--config", "job.yaml")
    assert code == 1
    assert "will run out of memory" in out


def test_a_job_that_will_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "--config", job("6x32GB", "zero2"))
    assert (code, err) == (1, "")
    assert out.startswith("The training in job.yaml will run out of memory on a GPU, in the optimizer step at the late")
    assert "Predicted for each of the 6 GPUs: " in out
    assert "it does not fit; most goes to weights." in out
    assert "levers: {engine: zero3}" in out


def test_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    tree = as_tree(capsys, "--config", job("6x32GB", "zero2"))
    told = tree["predicted"]
    assert (tree["verdict"]["id"], tree["verdict"]["phase"], told["fits"]) == ("device-oom", told["phase"], False)
    assert told["blame"] == told["components"][0][0] == "weights"
    assert told["bytes"] == sum(size for _, size in told["components"])
    assert told["required_bytes"] > 32 * GIB


def test_a_job_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--config", job("8x80GB", "zero3"))
    assert code == 0
    assert out.startswith("Predicted for each of the 8 GPUs: ")
    assert out.endswith("it fits.")
    tree = as_tree(capsys, "--config", "job.yaml")
    assert (tree["verdict"], tree["predicted"]["fits"]) == (None, True)


def test_another_trainers_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(LLAMA_FACTORY)
    tree = as_tree(capsys, "--config", "x.yaml", "--gpus", "1x24GB")
    assert (tree["verdict"]["id"], tree["predicted"]["fits"]) == ("device-oom", False)
    assert as_tree(capsys, "--config", "x.yaml")["predicted"]["fits"] is None


def test_a_deepspeed_file_needs_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text(json.dumps(DEEPSPEED))
    code, _, err = said(capsys, "--config", "ds.json")
    assert (code, err) == (2, "tightfit: ds.json does not say which model it trains: add --model\n")
    tree = as_tree(capsys, "--config", "ds.json", "--model", "7b_mamba", "--gpus", "4x24GB")
    assert tree["predicted"]["phase"] in ("init", "forward", "loss", "backward", "step")


def test_training_arguments_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"output_dir": "out", "per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True}
    Path("args.json").write_text(json.dumps(arguments))
    told = as_tree(capsys, "--config", "args.json", "--model", "Qwen/Qwen2.5-7B")["predicted"]
    less = {**arguments, "per_device_train_batch_size": 1}
    Path("args.json").write_text(json.dumps(less))
    assert as_tree(capsys, "--config", "args.json", "--model", "Qwen/Qwen2.5-7B")["predicted"]["bytes"] <= told["bytes"]


def test_a_model_that_is_not_here_is_not_asked_for_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(LLAMA_FACTORY.replace("Qwen/Qwen2.5-7B", "nobody/kiwi-7b"))
    code, _, err = said(capsys, "--config", "x.yaml")
    assert code == 2
    assert err.startswith("tightfit: the model nobody/kiwi-7b is not on this machine")
    assert err.count("\n") == 1


@pytest.mark.thorough
def test_beside_a_log_the_phase_that_failed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(LLAMA_FACTORY)
    tree = as_tree(capsys, str(OOM), "--config", "x.yaml")
    assert (tree["verdict"]["id"], tree["predicted"]["phase"]) == ("oom-logits", "loss")
    Path("x.yaml").write_text(LLAMA_FACTORY.replace("Qwen/Qwen2.5-7B", "nobody/kiwi-7b"))
    assert "predicted" not in as_tree(capsys, str(OOM), "--config", "x.yaml")


@pytest.mark.thorough
def test_a_run_that_has_a_plan_and_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny_mamba", "--gpus", "2x8GB", "--write", "run/plan"]) == 0
    capsys.readouterr()
    code, out, _ = said(capsys, "run")
    assert code == 0
    assert out.startswith("Predicted for ")
    tree = as_tree(capsys, "run")
    assert (tree["verdict"], tree["predicted"]["fits"]) == (None, None)


def test_what_goes_with_a_config_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, str(OOM), "--gpus", "4x24GB")
    assert (code, err) == (2, "tightfit: --gpus goes with --config: it says what the config does not\n")
    assert said(capsys)[0] == 2
