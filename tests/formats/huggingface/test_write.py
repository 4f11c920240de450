"""TrainingArguments files: parsed by transformers itself, and agreeing with the DeepSpeed file beside them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import warm_desk
from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.huggingface.write import training_args_json, training_args_notes
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Evaluation, Job, Saving
from tightfit.planner.plan import Plan
from tightfit.planner.trainers import LIGER_UNDER_THE_TRAINER
from tightfit.types import Checkpointing, ConfigError, Levers

MakePlan = Callable[..., Plan]

NEW = Target()
OLD = Target(transformers_version="4.40.2")
DEEPSPEED = "deepspeed.json"

# The file as the Trainer would parse it, but for `use_cpu`: there may be no GPU here.
ASK = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import HfArgumentParser, TrainingArguments
parser = HfArgumentParser(TrainingArguments)
answers = []
for path in json.loads(sys.argv[1]):
    os.chdir(os.path.dirname(path))
    values = json.load(open(path)) | {"use_cpu": True}
    json.dump(values, open("checked.json", "w"))
    try:
        (args,) = parser.parse_json_file("checked.json")
        answer = {"micro": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps,
                  "bf16": args.bf16, "fp16": args.fp16, "optim": args.optim.value, "lr": args.learning_rate,
                  "recompute": args.gradient_checkpointing, "warmup": args.get_warmup_steps(1000), "seed": args.seed}
        if args.deepspeed:
            answer["mismatches"] = args.hf_deepspeed_config.mismatches
            answer["stage"] = args.deepspeed_plugin.zero_stage
        else:
            answer["fsdp"] = args.fsdp_plugin_args
            if args.fsdp_plugin_args["activation_checkpointing"]:  # as the Trainer makes it under `accelerate launch`
                os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = "true"
                plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
                answer["moved"] = plugin.activation_checkpointing_offload
                del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        answers.append(answer)
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
print("FOUND " + json.dumps(answers))
"""


def ask(paths: list[Path]) -> list[dict[str, Any]]:
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = warm_desk.python(ASK, json.dumps([str(path) for path in paths]), env=env, ranks=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    return found


def write_pair(plan: Plan, folder: Path) -> Path:
    folder.mkdir()
    assert plan.chosen
    name = None
    if plan.chosen.levers.engine != "fsdp2":
        name = DEEPSPEED
        (folder / name).write_text(deepspeed_json(plan, NEW))
    path = folder / "training_args.json"
    path.write_text(training_args_json(plan, NEW, name))
    return path


def expected(plan: Plan) -> dict[str, object]:
    assert plan.chosen
    levers = plan.chosen.levers
    sharded = levers.engine == "fsdp2"
    fused = levers.offload_optimizer == "none"
    optim = {"adamw": "adamw_torch_fused" if fused else "adamw_torch", "adamw8bit": "adamw_bnb_8bit"}
    optim["paged_adamw8bit"] = "paged_adamw_8bit"
    common: dict[str, object] = {
        "micro": levers.micro_batch,
        "accumulation": levers.accumulation,
        "bf16": levers.precision == "bf16",
        "fp16": levers.precision == "fp16",
        "optim": optim.get(levers.optimizer, levers.optimizer),
        "warmup": 30,
        "recompute": levers.checkpointing.layers != 0 and not sharded,
        "lr": 1e-5 if levers.method == "full" else 1e-4,
        "seed": 42,
    }
    if not sharded:
        return common | {"stage": int(levers.engine[-1])}
    if levers.checkpointing.layers != 0:
        common["moved"] = True
    return common | {
        "fsdp": {
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_cls_names_to_wrap": "LlamaDecoderLayer",
            "cpu_ram_efficient_loading": levers.method != "qlora",
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": levers.checkpointing.layers != 0,
            "reshard_after_forward": True,
        }
        | ({"cpu_offload": True} if levers.offload_param == "cpu" else {})
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the [train] extra")
def test_transformers_takes_the_whole_grid(plans: tuple[Plan, ...], tmp_path: Path) -> None:
    paths = [write_pair(plan, tmp_path / str(number)) for number, plan in enumerate(plans)]
    misspelt = write_pair(plans[0], tmp_path / "misspelt")
    misspelt.write_text(misspelt.read_text().replace('"warmup_steps"', '"warmup_step"'))
    changed = write_pair(plans[0], tmp_path / "changed")
    changed.write_text(changed.read_text().replace('"max_grad_norm": 1.0', '"max_grad_norm": 0.5'))
    *answers, refused, differing = ask([*paths, misspelt, changed])
    assert "warmup_step" in refused["error"]
    assert "gradient_clipping" in differing["mismatches"][0]
    for plan, answer in zip(plans, answers, strict=True):
        assert plan.chosen
        mismatches = answer.pop("mismatches", [])
        # one process parses, so what the file says about all of them is what differs, and nothing else
        assert all("train_batch_size" in each and plan.chosen.world > 1 for each in mismatches), mismatches
        assert {name: answer[name] == value for name, value in expected(plan).items()} == dict.fromkeys(
            expected(plan), True
        ), answer


# --- names that changed -------------------------------------------------------------------------


def read(plan: Plan, version: str, file: str | None = DEEPSPEED) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(training_args_json(plan, Target(transformers_version=version), file))
    return values


RENAMED = (
    ("4.40.2", "evaluation_strategy", "eval_strategy"),
    ("4.41.0", "eval_strategy", "evaluation_strategy"),
    ("4.57.1", "save_safetensors", None),
    ("5.0.0", None, "save_safetensors"),
    ("5.1.0", "group_by_length", "train_sampling_strategy"),
    ("5.2", "train_sampling_strategy", "group_by_length"),
    ("4.57.1", "warmup_ratio", None),
    ("5.0.0", "warmup_steps", "warmup_ratio"),
    ("4.44.2", None, "use_liger_kernel"),
    ("4.45.0", "use_liger_kernel", None),
    ("4.46.1", None, "average_tokens_across_devices"),
)


@pytest.mark.parametrize(("version", "there", "gone"), RENAMED)
def test_names_follow_the_version(make_plan: MakePlan, version: str, there: str | None, gone: str | None) -> None:
    values = read(make_plan(Levers()), version)
    assert there is None or there in values
    assert gone is None or gone not in values


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.40.2", "4.46.3", "4.51.3", "4.57.1", "5.2.0", "5.12.0"])
def test_every_name_is_a_field_of_that_release(plans: tuple[Plan, ...], version: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    done = subprocess.run([*pip, f"transformers=={version}"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"transformers {version} cannot be fetched here: {done.stderr.strip()[-200:]}")
    fields = fields_of(next(tmp_path.glob("*.whl")))
    assert "per_device_train_batch_size" in fields
    for plan in plans[::5]:
        assert plan.chosen
        file = None if plan.chosen.levers.engine == "fsdp2" else DEEPSPEED
        assert set(read(plan, version, file)) <= fields


def fields_of(wheel: Path) -> set[str]:
    """The fields of a wheel's TrainingArguments, read without importing it."""
    tree = ast.parse(zipfile.ZipFile(wheel).read("transformers/training_args.py"))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    return {ast.unparse(line.target) for line in owner.body if isinstance(line, ast.AnnAssign)}


@pytest.mark.parametrize(
    ("version", "warmup", "ratio", "steps"),
    [
        ("4.46.3", 0.1, 0.1, 0),
        ("4.46.3", 20, 0.0, 20),
        ("5.22.2", 0.1, None, 0.1),
        ("5.22.2", 20, None, 20),
        ("5.22.2", 0, None, 0),
    ],
)
def test_warm_up(make_plan: MakePlan, version: str, warmup: float, ratio: float | None, steps: float) -> None:
    values = read(make_plan(Levers(), job=Job(model="tiny_llama", warmup=warmup)), version)
    assert (values.get("warmup_ratio"), values["warmup_steps"]) == (ratio, steps)
    assert isinstance(values["warmup_steps"], int) == (warmup >= 1 or version == "4.46.3" or warmup == 0)


@pytest.mark.parametrize(
    ("version", "fsdp"),
    [("4.57.1", None), ("5.0.0", "full_shard auto_wrap offload"), ("5.10.1", True), ("5.22.2", True)],
)
def test_fsdp2_follows_the_version(make_plan: MakePlan, version: str, fsdp: object) -> None:
    plan = make_plan(Levers(engine="fsdp2", offload_optimizer="cpu", offload_param="cpu"))
    values = read(plan, version, None)
    assert values.get("fsdp") == fsdp
    if fsdp is not None:
        assert values["fsdp_config"]["version"] == 2
        assert values["fsdp_config"].get("cpu_offload") is (True if fsdp is True else None)
    told = any(
        "accelerate launch" in str(note) for note in training_args_notes(plan, Target(transformers_version=version))
    )
    assert told == (fsdp is None)


@pytest.mark.parametrize(("version", "named"), [("4.39.3", "too old"), ("6.0", "unknown")])
def test_versions_out_of_range(make_plan: MakePlan, version: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(make_plan(Levers()), version)


def test_a_newer_release_is_written_as_the_newest_known_and_says_so(make_plan: MakePlan) -> None:
    plan = make_plan(Levers())
    assert read(plan, "5.40.0") == read(plan, "5.22.2")
    assert any("newer" in str(note) for note in training_args_notes(plan, Target(transformers_version="5.40.0")))
    assert training_args_notes(plan, NEW) == ()


# --- what the job says --------------------------------------------------------------------------


def test_the_jobs_numbers(make_plan: MakePlan) -> None:
    job = Job(
        model="tiny_llama",
        learning_rate=2e-4,
        schedule="linear",
        epochs=3,
        weight_decay=0.01,
        clip=0.3,
        seed=7,
        evaluation=Evaluation(split=0.1, every_steps=50),
        saving=Saving(folder="runs/a", every_steps=200, keep_last=4),
    )
    values = read(make_plan(Levers(dataloader_workers=3), job=job), "5.22.2")
    assert (
        values
        | {
            "learning_rate": 2e-4,
            "lr_scheduler_type": "linear",
            "num_train_epochs": 3.0,
            "max_steps": -1,
            "weight_decay": 0.01,
            "max_grad_norm": 0.3,
            "seed": 7,
            "eval_strategy": "steps",
            "eval_steps": 50,
            "do_eval": True,
            "output_dir": "runs/a",
            "save_strategy": "steps",
            "save_steps": 200,
            "save_total_limit": 4,
            "dataloader_num_workers": 3,
        }
        == values
    )


def test_nothing_is_saved_or_judged_on_the_way_unless_asked(make_plan: MakePlan) -> None:
    job = Job(model="tiny_llama", max_steps=100, saving=Saving(every_steps=None), evaluation=Evaluation(split=0.1))
    values = read(make_plan(Levers(), job=job), "5.22.2")
    assert (values["save_strategy"], values["eval_strategy"], values["do_eval"]) == ("no", "no", True)
    assert values["max_steps"] == 100
    assert not {"save_steps", "eval_steps"} & set(values)


def test_the_fused_loss_is_ligers(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(loss="fused"))
    assert read(plan, "5.22.2")["use_liger_kernel"] is True
    assert any("liger-kernel" in str(note) for note in training_args_notes(plan, NEW))
    assert any("plain" in str(note) for note in training_args_notes(plan, OLD))


@pytest.mark.parametrize("model_type", ["mamba", "gpt2", "granite"])
def test_liger_is_off_for_models_whose_loss_it_does_not_fuse(make_plan: MakePlan, model_type: str) -> None:
    job = Job(model="qwen1.5-0.5b")
    plan = make_plan(Levers(loss="fused", micro_batch=4), job=job)
    assert plan.chosen
    other = replace(plan, chosen=replace(plan.chosen, shape=replace(plan.shape, model_type=model_type)))
    assert read(other, "5.22.2")["use_liger_kernel"] is False
    notes = training_args_notes(other, NEW)
    assert any(f"no fused loss for {model_type}" in str(note) for note in notes)
    plain = make_plan(Levers(micro_batch=4), job=job).chosen
    assert plain
    assert any(f"needs {plain.footprint.gpu.required_bytes / 2**30:.1f} GiB" in str(note) for note in notes)


@pytest.mark.slow
def test_the_families_are_those_whose_loss_liger_fuses(tmp_path: Path) -> None:
    from tightfit.model.families import FAMILIES

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    done = subprocess.run([*pip, "liger-kernel==0.8.5"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"liger-kernel cannot be fetched here: {done.stderr.strip()[-200:]}")
    tree = ast.parse(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).read("liger_kernel/transformers/monkey_patch.py"))
    fused = set()
    table: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            usual = dict(zip([each.arg for each in node.args.args][::-1], node.args.defaults[::-1], strict=False))
            if ast.unparse(usual.get("fused_linear_cross_entropy", ast.Constant(False))) == "True":
                fused.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN":
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            table = {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key}
    assert {kind for kind in FAMILIES if table.get(kind) in fused} == LIGER_UNDER_THE_TRAINER


def test_liger_on_a_dcu_was_never_run(make_plan: MakePlan) -> None:
    for gpus, told in (("2xK100-64GB", True), ("2xA100-80GB", False)):
        notes = training_args_notes(make_plan(Levers(loss="fused"), parse_hardware(gpus)), NEW)
        assert any("never ran" in str(note) for note in notes) == told


def test_a_mamba_needs_what_the_trainers_own_scan_needs(make_plan: MakePlan) -> None:
    job = Job(model="3b_mamba")
    ours = make_plan(Levers(engine="zero3", scan="tightfit"), job=job)
    notes = training_args_notes(ours, NEW)
    assert any("tightfit's scan" in str(note) and "causal-conv1d" in str(note) for note in notes)
    (needs,) = [str(note) for note in notes if "As the Trainer runs it" in str(note)]
    for scan, words in (("official", "with the official kernels"), ("torch", "on the plain path")):
        way = make_plan(Levers(engine="zero3", scan=scan), job=job).chosen
        assert way
        assert f"{way.footprint.gpu.required_bytes / 2**30:.1f} GiB {words}" in needs
    assert "on the plain path, which does not fit" in needs
    assert not any(
        "scan" in str(note) or "needs" in str(note) for note in training_args_notes(make_plan(Levers()), NEW)
    )


def test_layer_inputs_on_the_host_under_fsdp2_come_from_accelerate(make_plan: MakePlan) -> None:
    moved = make_plan(Levers(engine="fsdp2", sequence=8192, checkpointing=Checkpointing(layers=None, offload=True)))
    stayed = make_plan(Levers(engine="fsdp2", sequence=8192)).chosen
    assert stayed
    (note,) = training_args_notes(moved, NEW)
    assert "accelerate launch --config_file accelerate.yaml" in str(note)
    assert f"Started otherwise, a GPU needs {stayed.footprint.gpu.required_bytes / 2**30:.1f} GiB" in str(note)
    assert training_args_notes(make_plan(Levers(engine="fsdp2")), NEW) == ()


def test_what_the_trainer_cannot_do_is_said(make_plan: MakePlan) -> None:
    some = make_plan(Levers(checkpointing=Checkpointing(layers=1)), job=Job(model="tiny_llama", timeout="2h"))
    assert read(some, "5.22.2")["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    notes = training_args_notes(some, NEW)
    assert any("all or none" in str(note) for note in notes)
    assert any("2h" in str(note) for note in notes)
    moved = make_plan(Levers(checkpointing=Checkpointing(layers=None, offload=True)))
    assert any("on the host" in str(note) for note in training_args_notes(moved, NEW))
    (note,) = training_args_notes(make_plan(Levers(trains="embeddings")), NEW)
    assert "trains the embeddings alone" in str(note)


def test_a_cpu_plan_trains_on_the_cpu(make_plan: MakePlan) -> None:
    hardware = parse_hardware("2x24GB")
    plan = make_plan(Levers(), replace(hardware, gpu=replace(hardware.gpu, vendor="cpu")))
    assert read(plan, "5.22.2")["use_cpu"] is True
    assert "use_cpu" not in read(make_plan(Levers()), "5.22.2")


def test_the_deepspeed_file_belongs_to_deepspeeds_engines(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="fsdp2"):
        training_args_json(make_plan(Levers(engine="fsdp2")), NEW, DEEPSPEED)
    with pytest.raises(ConfigError, match="zero2"):
        training_args_json(make_plan(Levers(engine="zero2")), NEW, None)


def test_the_same_plan_gives_the_same_bytes(make_plan: MakePlan) -> None:
    first, again = (training_args_json(make_plan(Levers()), NEW, DEEPSPEED) for _ in range(2))
    assert first == again
    assert first.endswith("}\n")


def test_samples_that_the_plan_leaves_out_must_be_filtered_before(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2", sequence=512))
    assert plan.chosen is not None
    skipping = replace(plan, chosen=replace(plan.chosen, skips_long=True))
    assert any("longer than 512 tokens" in str(note) for note in training_args_notes(skipping, Target()))
    assert not any("longer than" in str(note) for note in training_args_notes(plan, Target()))
