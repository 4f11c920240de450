"""One door for a question, whoever asks it: the file is opened once, and Python gets what the command line gets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import tightfit
from tightfit.cli import main
from tightfit.desk.request import Request, read_request
from tightfit.inputs import spelling
from tightfit.job import Data, Job, Limits, Machine
from tightfit.planner import Tiered

pytestmark = pytest.mark.thorough

JOB = "model: qwen1.5-0.5b\nsequence: 512\nhardware: {gpus: 2x24GB, host_ram: 64GB}\n"
STAGES = JOB + "stages: [{trains: embeddings, max_steps: 2}, {max_steps: 2}]\n"
LLAMAFACTORY = (
    "model_name_or_path: Qwen/Qwen1.5-0.5B\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    "dataset: alpaca_en_demo\ntemplate: qwen\ncutoff_len: 512\noutput_dir: saves\n"
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened, and each text parsed as YAML."""
    seen: Counter[str] = Counter()
    open_regular, get_single_node = spelling.open_regular, yaml.SafeLoader.get_single_node

    def count_file(path: Path) -> Any:
        seen[path.name] += 1
        return open_regular(path)

    def count_parse(loader: yaml.SafeLoader) -> Any:
        seen[loader.buffer.rstrip("\0")] += 1
        return get_single_node(loader)

    monkeypatch.setattr(spelling, "open_regular", count_file)
    monkeypatch.setattr(yaml.SafeLoader, "get_single_node", count_parse)
    return seen


@pytest.mark.parametrize("text", [JOB, STAGES, LLAMAFACTORY], ids=["job", "stages", "llamafactory"])
@pytest.mark.parametrize(
    "words", [("plan",), ("estimate", "--gpus", "2x24GB"), ("plan", "--write", "out"), ("train", "--dry-run")]
)
def test_a_file_is_opened_and_parsed_once(
    words: tuple[str, ...],
    text: str,
    opened: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("asked.yaml").write_text(text, encoding="utf-8")
    machine = () if text is not LLAMAFACTORY or words[0] == "estimate" else ("--gpus", "2x24GB", "--host-ram", "64GB")
    only = ("--only-stage", "1") if text is STAGES and words[0] == "estimate" else ()
    main([words[0], "asked.yaml", *words[1:], *machine, *only])
    capsys.readouterr()
    assert (opened["asked.yaml"], opened[text]) == (1, 1)


def test_what_was_not_said_is_not_there() -> None:
    assert read_request({}) == Request()
    asked = read_request({"model": "qwen1.5-0.5b", "seq": 512, "world": 2, "json": True, "max": "micro_batch"})
    assert asked == Request(flags={"model": "qwen1.5-0.5b", "seq": 512}, world=2, max="micro-batch")


CARDS = ("4xRTX2080Ti", "4xRTX4090")


@pytest.mark.parametrize("gpus", CARDS)
def test_a_job_from_python_is_planned_as_the_command_line_plans_it(
    gpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cards without bf16 compute in fp16, whoever asks."""
    flags = ["--model", "qwen1.5-1.8b", "--gpus", gpus, "--host-ram", "256GB", "--seq", "1024"]
    assert main(["plan", *flags, "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)
    job = Job(model="qwen1.5-1.8b", sequence=1024, hardware=Machine(gpus=gpus, host_ram="256GB"))
    made = tightfit.plan(job)
    assert made.chosen is not None
    assert made.chosen.levers.precision == ("fp16" if gpus == CARDS[0] else "bf16")
    assert made.report()["chosen"] == typed["chosen"]
    assert made.report()["because"] == typed["because"]


def test_a_job_from_python_may_have_a_tier_and_limits() -> None:
    machine = Machine(gpus="4x24GB", host_ram="256GB")
    made = tightfit.plan(Job(model="qwen1.5-1.8b", hardware=machine, tier="stage3", limits=Limits(margin=0.1)))
    assert isinstance(made.answer, Tiered)
    assert made.plan.job.limits.margin == 0.1
    assert made.plan.job.data == Data()
