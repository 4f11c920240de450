"""What can be said of an engine whose layers rest on the host, and what cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightfit.cli import main
from tightfit.inputs.flags import flags_from_levers, levers_from_flags
from tightfit.inputs.layouts import check_layout, find_stream_obstacle
from tightfit.job.file import job_from_flags, levers_of, model_of, pinned, read_job
from tightfit.model.load import load_model
from tightfit.types import ConfigError, Levers

STREAMING = {"engine": "stream"}
ADAPTERS = {**STREAMING, "method": "lora"}


@pytest.mark.parametrize(
    ("flags", "why", "fix"),
    [
        ({"resident": 2}, "inputs.layout-needs-engine", "needs --engine stream"),
        ({"states": "bf16"}, "inputs.layout-needs-engine", "needs --engine stream"),
        ({**STREAMING, "resident": 33}, "inputs.keeps-too-many", "use 32 or fewer"),
        ({**STREAMING, "offload_param": "cpu"}, "inputs.layouts-apart", "choose one of them"),
        ({**STREAMING, "offload_optimizer": "cpu"}, "inputs.layouts-apart", "choose one of them"),
        ({**ADAPTERS, "offload_optimizer": "nvme"}, "inputs.layouts-apart", "choose one of them"),
        ({**STREAMING, "offload_param": "nvme"}, "inputs.nvme-needs-engine", "stream reads nothing from NVMe"),
        ({**STREAMING, "sequence_parallel": 2}, "inputs.layouts-apart", "choose one of them"),
        ({**STREAMING, "tensor_parallel": 2}, "inputs.layout-needs-engine", "needs --engine fsdp2"),
        ({**STREAMING, "pipeline_parallel": 2}, "inputs.layout-needs-engine", "needs --engine fsdp2"),
        ({**STREAMING, "compress": "powersgd"}, "inputs.layout-needs-engine", "needs --engine ddp"),
        ({**STREAMING, "optimizer": "adamw8bit"}, "inputs.layouts-apart", "choose one of them"),
        ({**ADAPTERS, "optimizer": "adafactor"}, "inputs.layouts-apart", "choose one of them"),
        ({**STREAMING, "precision": "fp16", "master_weights": False}, "inputs.layouts-apart", "choose one of them"),
        ({**ADAPTERS, "states": "8bit"}, "inputs.states-of-adapters", "stay on the GPU, in fp32"),
    ],
)
def test_what_does_not_go_with_it_is_one_sentence(flags: dict[str, Any], why: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        levers_from_flags(flags, load_model("llama-3.1-8b"), world=8)
    assert raised.value.said.id == why
    assert str(raised.value.said).endswith(fix)


def test_one_machine_and_our_own_worker() -> None:
    levers = Levers(engine="stream")
    assert find_stream_obstacle(levers) is None
    assert "2 nodes" in str(find_stream_obstacle(levers, nodes=2))
    with pytest.raises(ConfigError, match="tightfit's own trainer"):
        check_layout(Levers(engine="stream", trainer="llamafactory"), load_model("llama-3.1-8b"))


def test_what_goes_with_it() -> None:
    shape = load_model("llama-3.1-8b")
    for flags in (
        {"states": "8bit", "resident": 32},
        {"master_weights": False},
        {"offload_optimizer": "nvme", "states": "bf16"},
        {"precision": "fp16", "checkpointing": "full+offload"},
        {"method": "qlora", "optimizer": "adamw8bit"},
        {"compile": "layers", "checkpointing": "select:mlp+offload", "loss": "fused"},
        {"frozen_layers": 4},
    ):
        levers = levers_from_flags({**STREAMING, **flags}, shape, world=4)
        assert levers.streams
        assert levers_from_flags(flags_from_levers(levers), shape) == levers


def test_auto_leaves_the_number_to_us(tmp_path: Path) -> None:
    shape = load_model("tiny_llama")
    assert levers_from_flags({**STREAMING, "resident": "AUTO"}, shape).resident == 0
    for word, pins in (("auto", {"engine"}), ("1", {"engine", "resident"})):
        path = tmp_path / f"{word}.yaml"
        path.write_text(f"model: tiny_llama\nlevers: {{engine: stream, resident: {word}}}\n", encoding="utf-8")
        job = read_job(path).job
        assert pinned(job) == pins
        assert levers_of(job, model_of(job)).resident == (word == "1")


def test_a_wrong_number_names_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny_llama\nlevers: {engine: stream, resident: some}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="a whole number of at least 0, or auto"):
        read_job(path)
    assert main(["estimate", "--model", "tiny_llama", "--engine", "stream", "--resident", "some"]) == 2
    assert "--resident takes a whole number or auto, not 'some'" in capsys.readouterr().err
    assert main(["estimate", "--model", "tiny_llama", "--seq", "some"]) == 2
    assert "--seq takes a whole number, not 'some'" in capsys.readouterr().err


def test_adapters_are_not_asked_for_an_nvme_that_they_cannot_use(tmp_path: Path) -> None:
    flags = {"model": "tiny_llama", **ADAPTERS, "offload_optimizer": "nvme"}
    with pytest.raises(ConfigError, match="--engine stream cannot be combined with --offload-optimizer nvme"):
        job_from_flags(flags)
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: tiny_llama\nmethod: lora\nlevers: {engine: stream, offload_optimizer: nvme}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"job.yaml.*cannot be combined with levers.offload_optimizer nvme"):
        read_job(path)
    with pytest.raises(ConfigError, match="no NVMe is there"):
        job_from_flags({**flags, "method": "full"})


@pytest.mark.parametrize("said", ["states: bf16", "levers: {resident: 1}"])
def test_a_job_that_names_what_is_its_own_names_the_engine(said: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: tiny_llama\n{said}\n", encoding="utf-8")
    job = read_job(path).job
    assert levers_of(job, model_of(job)).streams
