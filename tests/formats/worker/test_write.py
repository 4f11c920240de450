"""The worker's config: everything resolved, in the words of the estimate flags, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.launch.script import slurm_sbatch
from tightfit.formats.target import Target
from tightfit.formats.worker.read import SCHEMA
from tightfit.formats.worker.write import worker_json
from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import levers_from_flags
from tightfit.inputs.versions import release
from tightfit.job import Adapters, Data, Evaluation, Job, Machine, Saving
from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.planner.plan import Plan
from tightfit.types import Buckets, ConfigError, Levers, Lora

MakePlan = Callable[..., Plan]


def config(plan: Plan) -> dict[str, Any]:
    parsed = json.loads(worker_json(plan))
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.thorough
def test_the_levers_give_the_promised_footprint_again(plans: tuple[Plan, ...]) -> None:
    for plan in plans:
        assert plan.chosen is not None
        read = config(plan)
        levers = levers_from_flags(read["levers"], plan.shape)
        levers = replace(levers, buckets=Buckets(**read["buckets"]))
        again = estimate(plan.shape, levers, read["world"]["ranks"], plan.chosen.hardware)
        assert again.gpu.required_bytes == read["predicted"]["gpu"]["required_bytes"]


def test_every_field_of_a_job_arrives(make_plan: MakePlan) -> None:
    job = Job(
        model="tiny_llama",
        method="lora",
        lora=Adapters(rank=16, alpha=24, dropout=0.05, targets=("q_proj", "v_proj"), dtype="fp32"),
        data=Data(path="données.jsonl", format="sharegpt", template="qwen", packing=True, samples=1000),
        max_samples=500,
        learning_rate=3e-4,
        schedule="linear",
        warmup=100,
        max_steps=2000,
        weight_decay=0.1,
        clip=0.5,
        seed=7,
        evaluation=Evaluation(split=0.1, every_steps=50),
        saving=Saving(folder="runs/a", every_steps=None, keep_last=3),
        timeout="1h30m",
        hardware=Machine(nvme_path="/nvme"),
        trust_remote_code=True,
    )
    lora = Lora(rank=16, targets=("q_proj", "v_proj"), dtype="fp32")
    read = config(make_plan(Levers(method="lora", engine="zero2", lora=lora), parse_hardware("2x4xRTX4090"), job))
    assert read["schema"] == SCHEMA
    assert read["model"]["source"] == "tiny_llama"
    assert read["model"]["trust_remote_code"] is True
    assert read["lora"] == {
        "rank": 16,
        "alpha": 24.0,
        "dropout": 0.05,
        "targets": ["q_proj", "v_proj"],
        "dtype": "fp32",
    }
    assert read["data"] == {
        "path": "données.jsonl",
        "format": "sharegpt",
        "template": "qwen",
        "packing": True,
        "samples": 1000,
        "tokenizer": None,
        "recipe": None,
        "ablation": None,
        "max_samples": 500,
        "overlong": "cut",
    }
    assert read["training"] == {
        "learning_rate": 3e-4,
        "schedule": "linear",
        "warmup": 100,
        "epochs": None,
        "max_steps": 2000,
        "weight_decay": 0.1,
        "clip": 0.5,
        "first_scale_power": None,
        "seed": 7,
    }
    assert read["evaluation"] == {"split": 0.1, "every_steps": 50}
    assert read["saving"] == {
        "folder": "runs/a",
        "every_steps": None,
        "every_minutes": None,
        "keep_last": 3,
        "keep_every": None,
        "async_save": True,
    }
    assert (read["timeout_s"], read["nvme_path"], read["effective_batch"]) == (5400, "/nvme", 8)
    assert (read["world"]["nodes"], read["world"]["gpus_per_node"], read["world"]["ranks"]) == (2, 4, 8)


@pytest.mark.parametrize(("method", "rate"), [("full", 1e-5), ("lora", 1e-4), ("qlora", 1e-4)])
def test_what_depends_on_the_method_is_resolved(make_plan: MakePlan, method: Any, rate: float) -> None:
    lora = None if method == "full" else Lora(rank=32)
    read = config(make_plan(Levers(method=method, engine="zero2", lora=lora)))
    assert read["training"]["learning_rate"] == rate
    assert read["training"]["epochs"] == 1.0
    assert (read["lora"] or {"alpha": None})["alpha"] == (None if lora is None else 64.0)


def test_a_tier_and_what_it_changes_arrive(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(precision="fp16"), job=Job(model="tiny_llama", tier="extreme"))
    assert plan.chosen is not None
    changed = replace(plan, chosen=replace(plan.chosen, changes=("fp16 instead of bf16",)))
    read = config(changed)
    assert (read["tier"], read["changes"]) == ("extreme", ["fp16 instead of bf16"])
    assert read["training"]["first_scale_power"] == 8
    read = config(make_plan(Levers(precision="fp16")))
    assert (read["tier"], read["changes"], read["training"]["first_scale_power"]) == (None, [], 12)


def test_fsdp2_has_no_deepspeed_file(make_plan: MakePlan) -> None:
    assert config(make_plan(Levers(engine="fsdp2")))["deepspeed"] is None
    assert config(make_plan(Levers(engine="zero2")))["deepspeed"] == "deepspeed.json"


def test_a_block_of_shape_fields_arrives_as_it_was_written(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2"))
    block = {"model_type": "mamba", "d_model": 4864, "n_layers": 45}
    assert config(replace(plan, job=replace(plan.job, model=block)))["model"]["source"] == block


def test_a_smaller_model_that_was_allowed_is_the_one_trained(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2"), parse_hardware("2x24GB"), Job(model="qwen2.5-7b"))
    assert plan.chosen is not None
    smaller = load_model("qwen1.5-0.5b")
    read = config(replace(plan, chosen=replace(plan.chosen, shape=smaller)))
    assert read["model"]["source"] == read["model"]["name"] == "qwen1.5-0.5b"


def test_the_same_plan_gives_the_same_bytes(make_plan: MakePlan) -> None:
    levers = Levers(engine="zero3", offload_optimizer="cpu")
    assert worker_json(make_plan(levers)) == worker_json(make_plan(levers))


def test_nothing_is_written_for_a_plan_that_does_not_fit(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="nothing that was allowed fits"):
        worker_json(replace(make_plan(Levers(engine="zero2")), chosen=None))


@pytest.mark.parametrize(("words", "seconds"), [(None, None), ("45 s", 45), ("1d12h", 129600), ("1.5h", 5400)])
def test_a_time_limit_is_read_as_the_job_file_reads_it(
    make_plan: MakePlan, words: str | None, seconds: int | None
) -> None:
    job = Job(model="tiny_llama", timeout=words)
    assert config(make_plan(Levers(engine="zero2"), job=job))["timeout_s"] == seconds


@pytest.mark.parametrize("words", ["30m1h", "1h1h", "12", "0s"])
def test_a_time_that_a_job_file_may_not_say_is_in_no_other_file(make_plan: MakePlan, words: str) -> None:
    plan = make_plan(Levers(engine="zero2"), job=Job(model="tiny_llama", timeout=words))
    for render in (worker_json, lambda plan: slurm_sbatch(plan, Target())):
        with pytest.raises(ConfigError, match="write 12h, 90m or 1h30m"):
            render(plan)


@pytest.mark.parametrize(("skips", "word"), [(True, "skip"), (False, "cut")])
def test_what_becomes_of_samples_that_are_too_long(make_plan: MakePlan, skips: bool, word: str) -> None:
    plan = make_plan(Levers(engine="zero2"))
    assert plan.chosen is not None
    read = config(replace(plan, chosen=replace(plan.chosen, skips_long=skips)))
    assert read["data"]["overlong"] == word


def test_without_clipping_every_file_says_so(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2", gradient_clipping=False))
    assert config(plan)["training"]["clip"] == 0.0
    assert json.loads(deepspeed_json(plan, Target()))["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.14.2+das.opt1.dtk25041", (0, 14, 2)), ("0.9.3.post1", (0, 9, 3)), ("5.10", (5, 10, 0)), (" 5 ", (5, 0, 0))],
)
def test_a_version_is_three_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers
    with pytest.raises(ConfigError, match="'new' is not a version: write its numbers"):
        release("new")
