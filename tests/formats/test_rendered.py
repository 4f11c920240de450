"""What tightfit itself writes has nothing for lint to find: the two are made from the same knowledge of the tools."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tightfit.formats.lint import examine
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Data, Job, Machine
from tightfit.job.file import read_job
from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.planner.plan import Plan, Way
from tightfit.types import ConfigError, Levers, Lora, Pace, Trainer

LORA = Lora(rank=8)
WAYS = [
    ("1x24GB", Levers(engine="zero0", method="qlora", lora=LORA)),
    ("2x32GB", Levers(engine="zero1", method="lora", lora=LORA, precision="fp16", micro_batch=2, accumulation=4)),
    ("4x24GB", Levers(engine="zero2", offload_optimizer="cpu")),
    ("8x64GB", Levers(engine="zero3", method="lora", lora=LORA)),
    ("6x32GB", Levers(engine="zero3", offload_optimizer="nvme", offload_param="cpu")),
    ("2x4x80GB", Levers(engine="zero3", offload_optimizer="cpu", offload_param="cpu")),
    ("2x24GB", Levers(engine="zero2", optimizer="adafactor")),
    ("2x24GB", Levers(engine="fsdp2", method="lora", lora=LORA)),
]
CONFIGS = {
    "deepspeed.json": "deepspeed",
    "accelerate.yaml": "accelerate",
    "llamafactory.yaml": "llamafactory",
    "training_args.json": "huggingface",
}


def plan_of(levers: Levers, gpus: str, trainer: Trainer = "tightfit") -> Plan:
    hardware, shape = parse_hardware(gpus), load_model("qwen2.5-7b")
    job = Job(
        model="qwen2.5-7b",
        method=levers.method,
        trainer=trainer,
        data=Data(path="data.json", template="qwen"),
        hardware=Machine(nvme_path="/nvme"),
    )
    way = Way(
        shape=shape,
        levers=levers,
        hardware=hardware,
        footprint=estimate(shape, levers, hardware.world, hardware),
        pace=Pace(step_s=1.0, tokens_per_s=1.0, causes={}),
        fits=True,
        gpu_limit_bytes=hardware.gpu.memory_bytes,
    )
    return Plan(
        job=job,
        shape=shape,
        hardware=hardware,
        effective_batch=way.effective_batch,
        chosen=way,
        alternatives=(),
        considered=1,
        search_s=0.0,
        because=(),
    )


@pytest.mark.parametrize("deepspeed", ["0.14.2", "0.19.8"])
@pytest.mark.parametrize(("gpus", "levers"), WAYS, ids=[f"{levers.engine}-{gpus}" for gpus, levers in WAYS])
@pytest.mark.parametrize("trainer", get_args(Trainer))
def test_rendered_files_are_clean(tmp_path: Path, gpus: str, levers: Levers, deepspeed: str, trainer: Trainer) -> None:
    plan = plan_of(levers, gpus, trainer)
    target = Target(deepspeed_version=deepspeed, launcher="accelerate" if trainer == "tightfit" else None)
    if levers.is_fsdp2 and trainer == "llamafactory":
        with pytest.raises(ConfigError, match="cannot start FSDP2"):
            render(plan, target)
        return
    files = render(plan, target)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    seen = [name for name in CONFIGS if name in files]
    assert {
        {"tightfit": "accelerate.yaml", "llamafactory": "llamafactory.yaml"}.get(trainer, "training_args.json")
    } <= set(seen)
    for name in seen:
        report = examine(tmp_path / name, target, world=plan.hardware.world)
        assert report.kind == CONFIGS[name]
        assert [finding for finding in report.findings if finding.severity != "note"] == []


def test_the_workers_config_is_generated_and_nothing_to_lint(tmp_path: Path) -> None:
    gpus, levers = WAYS[0]
    path = tmp_path / "worker.json"
    path.write_text(render(plan_of(levers, gpus), Target())["worker.json"], encoding="utf-8")
    (found,) = examine(path).findings
    assert (found.rule, found.severity) == ("job-generated", "note")
    assert "`tightfit plan --write`" in str(found.what)
    with pytest.raises(ConfigError, match="is no job file but the config of our worker"):
        read_job(path)


def test_the_deepspeed_is_the_one_that_llamafactory_asks_for(tmp_path: Path) -> None:
    """0.9.5 wants 0.18.4 at most, which refuses keys that DeepSpeed has since; alone, the file is as good as any."""
    path = tmp_path / "deepspeed.json"
    path.write_text('{"zero_optimization": {"stage": 2, "compute_grad_norm": true, "parameter_alignment": false}}')

    def refused(file: Path) -> set[str]:
        return {finding.place for finding in examine(file).findings if finding.rule == "ds-too-new"}

    assert refused(path) == set()
    yaml = tmp_path / "llamafactory.yaml"
    yaml.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: a\n"
        "template: qwen\noutput_dir: out\ndeepspeed: deepspeed.json\n"
    )
    both = {"zero_optimization.compute_grad_norm", "zero_optimization.parameter_alignment"}
    assert refused(path) == both
    assert refused(yaml) == both
