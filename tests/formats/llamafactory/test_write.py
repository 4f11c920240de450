"""LLaMA-Factory's YAML: keys that its releases know, numbers that YAML reads as numbers, and the plan's levers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.llamafactory.read import check_deepspeed, settings_from, to_levers
from tightfit.formats.llamafactory.write import (
    TRANSFORMERS_LIMITS,
    dataset_info_json,
    llamafactory_notes,
    llamafactory_yaml,
    template_of,
)
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.inputs.versions import release as parse_release
from tightfit.job import Adapters, Data, Evaluation, Job, Saving
from tightfit.job.text import read_job_text
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.planner.plan import Plan
from tightfit.types import Buckets, Checkpointing, ConfigError, Levers, Lora

MakePlan = Callable[..., Plan]

RELEASES = ("0.9.2", "0.9.3", "0.9.4", "0.9.5")
OLD_DEEPSPEED = "0.16.4"

OWN_KEYS = frozenset(
    """model_name_or_path trust_remote_code flash_attn quantization_bit quantization_method quantization_type
    double_quantization disable_gradient_checkpointing use_unsloth_gc enable_liger_kernel stage finetuning_type
    pure_bf16 lora_rank lora_alpha lora_dropout lora_target dataset dataset_dir template cutoff_len packing neat_packing
    max_samples val_size""".split()
)
"""LLaMA-Factory's own keys that we write; every release from 0.9.2 to 0.9.5 has them all."""

TRAINER_KEYS = frozenset(
    """do_train do_eval optim learning_rate lr_scheduler_type weight_decay max_grad_norm per_device_train_batch_size
    gradient_accumulation_steps warmup_ratio warmup_steps num_train_epochs max_steps seed bf16 fp16 deepspeed
    ddp_timeout use_cpu per_device_eval_batch_size prediction_loss_only eval_strategy eval_steps output_dir
    logging_steps report_to save_strategy save_steps save_total_limit dataloader_num_workers""".split()
)
"""transformers' keys that we write; every transformers that those releases accept has them all."""

FULL_JOB = Job(
    model="qwen2.5-7b",
    method="qlora",
    lora=Adapters(rank=16, alpha=24, dropout=0.05),
    data=Data(path="data/train.jsonl", packing=True, format="sharegpt"),
    max_samples=1000,
    max_steps=300,
    warmup=20,
    evaluation=Evaluation(split=0.1, every_steps=50),
    saving=Saving(folder="saves/a", every_steps=100, keep_last=3),
)


@pytest.fixture
def plan_of(make_plan: MakePlan) -> MakePlan:
    def make(levers: Levers, gpus: str = "4x80GB", **job: Any) -> Plan:
        return make_plan(levers, parse_hardware(gpus), Job(**({"model": "qwen2.5-7b"} | job)))

    return make


def target_of(release: str = "0.9.5") -> Target:
    return Target(llamafactory_version=release, deepspeed_version=OLD_DEEPSPEED)


def values(plan: Plan, target: Target | None = None) -> dict[str, Any]:
    read = yaml.safe_load(llamafactory_yaml(plan, target or target_of(), "deepspeed.json"))
    assert isinstance(read, dict)
    return read


def on_cpu(plan: Plan) -> Plan:
    assert plan.chosen is not None
    hardware = replace(plan.hardware, gpu=replace(plan.hardware.gpu, vendor="cpu", name="CPU"))
    return replace(plan, hardware=hardware, chosen=replace(plan.chosen, hardware=hardware))


def written_keys(plan_of: MakePlan, release: str) -> set[str]:
    """Every key of a spread of plans that between them take every branch."""
    lora = Lora(rank=16)
    levers = (
        Levers(engine="zero3"),
        Levers(engine="zero2", master_weights=False, checkpointing=Checkpointing(layers=0)),
        Levers(engine="zero3", method="qlora", lora=lora, loss="fused", attention="flash"),
        Levers(engine="zero2", method="lora", lora=lora, checkpointing=Checkpointing(layers=None, offload=True)),
    )
    jobs = (FULL_JOB, Job(model="qwen2.5-7b", saving=Saving(every_steps=None), data=Data(format="text")))
    keys: set[str] = set()
    for lever in levers:
        for job in jobs:
            plan = replace(plan_of(lever), job=job)
            keys |= set(values(plan, target_of(release)))
            if lever.engine != "zero3":
                keys |= set(values(on_cpu(plan), target_of(release)))
    return keys


# --- keys and templates, against LLaMA-Factory itself ---------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("release", RELEASES)
def test_only_known_keys_are_written(plan_of: MakePlan, release: str) -> None:
    assert written_keys(plan_of, release) == OWN_KEYS | TRAINER_KEYS


def wheel(requirement: str, folder: Path) -> zipfile.ZipFile:
    name, _, version = requirement.partition("==")
    found = list(folder.glob(f"{name}-{version}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(folder.glob(f"{name}-{version}-*.whl"))
        if not found:
            pytest.skip(f"{requirement} cannot be had: {done.stderr.strip()[-200:]}")
    return zipfile.ZipFile(found[0])


def fields_of(package: zipfile.ZipFile, prefix: str) -> set[str]:
    """The fields of every dataclass in the files under a path."""
    sources = [package.read(name).decode() for name in package.namelist() if re.fullmatch(prefix, name)]
    assert sources
    return {
        statement.target.id
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_released_classes_have_these_keys(release: str, request: pytest.FixtureRequest) -> None:
    folder = request.config.cache.mkdir("llamafactory")
    with wheel(f"llamafactory=={release}", folder) as package:
        arguments = r"llamafactory/hparams/(model|data|finetuning|generating|training)_args\.py"
        assert fields_of(package, arguments) >= OWN_KEYS
        needed = package.read(f"llamafactory-{release}.dist-info/METADATA").decode()
    limits = re.findall(r"^Requires-Dist: transformers\b.*<=([\d.]+)", needed, flags=re.MULTILINE)
    newest = TRANSFORMERS_LIMITS[parse_release(release)]
    assert newest == max(limits, key=lambda limit: tuple(map(int, limit.split("."))))
    with wheel(f"transformers=={newest}", folder) as package:
        assert fields_of(package, r"transformers/training_args(_seq2seq)?\.py") >= TRAINER_KEYS


FAMILIES = {
    "qwen2": r"Qwen/Qwen2(\.5)?-[\d.]+B(-Instruct)?",
    "qwen2_moe": r"Qwen/Qwen2-57B-A14B(-Instruct)?",
    "qwen3": r"Qwen/Qwen3-[\d.]+B(-Base|-Instruct-2507)?",
    "qwen3_moe": r"Qwen/Qwen3-\d+B-A\d+B(-Instruct-2507)?",
    "llama": r"meta-llama/(Meta-)?Llama-[23].*|deepseek-ai/(DeepSeek-R1-Distill-Llama.*|deepseek-(llm|coder).*base)"
    r"|01-ai/Yi-\d+B(-Chat)?|HuggingFaceTB/SmolLM.*",
    "gemma": r"google/gemma-\d+b(-it)?",
    "gemma2": r"google/gemma-2-\d+b(-it)?",
    "gemma3_text": r"google/gemma-3-\d+b(-it|-pt)?",
    "mistral": r"mistralai/Mistral-7B.*v0\.[13]|mistralai/Mistral-Nemo.*|mistralai/Mistral-Small-24B.*",
    "mixtral": r"mistralai/Mixtral-.*",
    "phi3": r"microsoft/(Phi-3-(mini|medium).*|phi-4|Phi-4-mini-instruct)",
    "granite": r"ibm-granite/granite-3\.[0-3]-[28]b-(base|instruct)",
    "falcon": r"tiiuae/falcon-(7b|40b)(-instruct)?",
}
"""Models of each type, by their names on the hub."""


def registered(package: zipfile.ZipFile) -> dict[str, str | None]:
    """The template that a release gives to each model that it lists."""
    found: dict[str, str | None] = {}
    for node in ast.walk(ast.parse(package.read("llamafactory/extras/constants.py").decode())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_model_group":
            told = {word.arg: word.value for word in node.keywords}
            template = told.get("template")
            models = told["models"]
            assert isinstance(models, ast.Dict)
            for places in models.values:
                assert isinstance(places, ast.Dict)
                name = places.values[0]
                assert isinstance(name, ast.Constant)
                found[str(name.value)] = str(template.value) if isinstance(template, ast.Constant) else None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_templates_are_those_of_the_release(plan_of: MakePlan, release: str, request: pytest.FixtureRequest) -> None:
    with wheel(f"llamafactory=={release}", request.config.cache.mkdir("llamafactory")) as package:
        templates = registered(package)
        names = re.findall(
            r'register_template\(\s*name="([^"]+)"', package.read("llamafactory/data/template.py").decode()
        )
    at = tuple(map(int, release.split(".")))
    shape = plan_of(Levers(engine="zero2")).shape
    seen = 0
    for kind, pattern in FAMILIES.items():
        for model, template in templates.items():
            if re.fullmatch(pattern, model) and "Vision" not in model:
                seen += 1
                ours = template_of(model, replace(shape, model_type=kind), at)
                assert ours == template, f"{model} ({kind}) in {release}"
                assert ours in names
    assert seen > 60


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_fused_loss_is_for_the_families_of_the_release(
    plan_of: MakePlan, release: str, request: pytest.FixtureRequest
) -> None:
    with wheel(f"llamafactory=={release}", request.config.cache.mkdir("llamafactory")) as package:
        source = package.read("llamafactory/model/model_utils/liger_kernel.py").decode()
    compared = re.findall(r"model_type (?:==|in) (.*):", source)
    # Liger patches Granite, but takes its loss from whole logits.
    theirs = {name for line in compared for name in re.findall(r'"(\w+)"', line)} - {"granite"}
    plan = plan_of(Levers(engine="zero2", loss="fused"))
    assert plan.chosen is not None
    for kind in theirs | {"gpt2", "gpt_neox", "stablelm", "gemma3_text", "granite", "olmo2", "qwen3"}:
        other = replace(plan, chosen=replace(plan.chosen, shape=replace(plan.shape, model_type=kind, name="a/b")))
        if kind in theirs:
            assert values(other, target_of(release))["enable_liger_kernel"] is True
        else:
            with pytest.raises(ConfigError):
                values(other, target_of(release))


@pytest.mark.parametrize(
    ("release", "template"), [("0.9.2", "deepseek3"), ("0.9.3", "deepseekr1"), ("0.9.5", "deepseekr1")]
)
def test_the_template_of_a_distilled_deepseek_moved(plan_of: MakePlan, release: str, template: str) -> None:
    plan = plan_of(Levers(engine="zero3", method="lora", lora=Lora()), "8xK100-64GB", model="qwen2.5-32b")
    named = replace(plan, job=replace(plan.job, model="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"))
    read = values(named, Target(llamafactory_version=release, deepspeed_version="0.14.2"))
    assert read["model_name_or_path"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    assert read["template"] == template


def test_a_template_of_the_job_wins_unless_the_release_lacks_it(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2"), data=Data(template="alpaca"))
    assert values(plan)["template"] == "alpaca"
    plan = plan_of(Levers(engine="zero2"), data=Data(template="deepseekr1"))
    with pytest.raises(ConfigError, match=r"deepseekr1 is not in LLaMA-Factory 0\.9\.2: there it is qwen"):
        values(plan, target_of("0.9.2"))


def test_a_family_without_a_template_gets_the_tokenizers_own(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2"))
    assert plan.chosen is not None
    shape = replace(plan.shape, model_type="gpt2")
    plan = replace(plan, shape=shape, chosen=replace(plan.chosen, shape=shape), job=replace(plan.job, model="gpt2"))
    text = llamafactory_yaml(plan, target_of(), "deepspeed.json")
    assert "template" not in yaml.safe_load(text)
    assert "# Note: no template is named: LLaMA-Factory parses the tokenizer's own." in text


# --- the plan, read back ------------------------------------------------------------------------


@pytest.mark.thorough
def test_our_own_reader_finds_the_levers_again(plan_of: MakePlan, grid: tuple[Levers, ...], tmp_path: Path) -> None:
    read = 0
    for levers in grid[::2]:  # still every engine, precision and method
        plan = plan_of(levers)
        try:
            text = llamafactory_yaml(plan, target_of(), "deepspeed.json")
            deepspeed = deepspeed_json(plan, target_of())
        except ConfigError:
            adapters_in_fp32 = levers.precision == "fp32" and levers.method != "full"
            swapped = "nvme" in (levers.offload_optimizer, levers.offload_param)  # and the job names no folder
            assert levers.engine == "fsdp2" or adapters_in_fp32 or swapped, levers
            continue
        read += 1
        folder = tmp_path / str(read)
        folder.mkdir()
        (folder / "llamafactory.yaml").write_text(text, encoding="utf-8")
        (folder / "deepspeed.json").write_text(deepspeed, encoding="utf-8")
        settings = settings_from(read_job_text(folder / "llamafactory.yaml"))
        assert settings.ignored == ()
        check_deepspeed(settings, read_deepspeed(folder / "deepspeed.json", hidden_size=3584))
        found = to_levers(settings, 28, levers.deepspeed_version)
        layers = None if levers.checkpointing.layers else levers.checkpointing.layers
        wanted = replace(
            levers,
            engine="zero0",
            offload_optimizer="none",
            offload_param="none",
            checkpointing=Checkpointing(layers=layers),
            lora=levers.lora and replace(levers.lora, dtype="fp32"),
            trainer="llamafactory",
            padded=True,
            buckets=Buckets(),  # which are the DeepSpeed file's
        )
        assert found == wanted
    assert read > 30


def test_numbers_are_numbers(plan_of: MakePlan) -> None:
    read = values(plan_of(Levers(engine="zero3"), learning_rate=1e-5, weight_decay=1e-7))
    assert (read["learning_rate"], read["weight_decay"]) == (1e-5, 1e-7)
    assert read["eval_strategy"] == "no"
    assert read["save_strategy"] == "steps"
    assert isinstance(read["seed"], int)


def test_a_qlora_job_in_full(plan_of: MakePlan) -> None:
    lora = Lora(rank=16, targets=("q_proj", "v_proj"))
    levers = Levers(engine="zero2", method="qlora", lora=lora, micro_batch=2, accumulation=8, sequence=512)
    read = values(replace(plan_of(levers), job=FULL_JOB))
    expected = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "quantization_bit": 4,
        "quantization_method": "bnb",
        "double_quantization": True,
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 24,
        "lora_dropout": 0.05,
        "lora_target": "q_proj,v_proj",
        "cutoff_len": 512,
        "packing": True,
        "neat_packing": True,
        "max_samples": 1000,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "warmup_steps": 20,
        "max_steps": 300,
        "val_size": 0.1,
        "eval_steps": 50,
        "save_steps": 100,
        "save_total_limit": 3,
        "output_dir": "saves/a",
        "deepspeed": "deepspeed.json",
    }
    assert {key: read[key] for key in expected} == expected
    assert "num_train_epochs" not in read


def test_the_same_plan_gives_the_same_bytes(plan_of: MakePlan) -> None:
    levers = Levers(engine="zero3", loss="fused")
    first, second = (llamafactory_yaml(plan_of(levers), target_of(), "deepspeed.json") for _ in range(2))
    assert first == second


# --- what differs is said -----------------------------------------------------------------------


def test_some_layers_become_all_layers_and_the_file_says_so(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero3", checkpointing=Checkpointing(layers=10)), timeout="12h")
    text = llamafactory_yaml(plan, target_of(), "deepspeed.json")
    assert yaml.safe_load(text)["disable_gradient_checkpointing"] is False
    assert "recomputes some layers only (layers:10)" in text
    assert "does not stop after 12h" in text


def test_layer_inputs_on_the_host(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero3", checkpointing=Checkpointing(layers=None, offload=True)))
    assert values(plan)["use_unsloth_gc"] is True


def test_a_note_cannot_break_out_of_its_comment(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2"))
    assert plan.chosen is not None
    gpu = replace(plan.hardware.gpu, name="card\noutput_dir: /etc")
    way = replace(plan.chosen, hardware=replace(plan.hardware, gpu=gpu))
    assert values(replace(plan, chosen=way))["output_dir"] == "output"


@pytest.mark.parametrize(
    ("data", "entry"),
    [
        (Data(path="d/a.jsonl"), {"file_name": "d/a.jsonl", "formatting": "alpaca"}),
        (Data(path="./rows", format="sharegpt"), {"file_name": "./rows", "formatting": "sharegpt"}),
        (Data(path="tatsu-lab/alpaca"), {"hf_hub_url": "tatsu-lab/alpaca", "formatting": "alpaca"}),
        (Data(path="a.txt", format="text"), {"file_name": "a.txt", "columns": {"prompt": "text"}}),
        (Data(), {"file_name": "train.json", "formatting": "alpaca"}),
    ],
)
def test_the_data_is_found_through_dataset_info(plan_of: MakePlan, data: Data, entry: dict[str, Any]) -> None:
    plan = plan_of(Levers(engine="zero2"), data=data)
    assert json.loads(dataset_info_json(plan)) == {"train": entry}
    read = values(plan)
    assert (read["dataset"], read["dataset_dir"]) == ("train", ".")
    assert read["stage"] == ("pt" if data.format == "text" else "sft")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levers", "job", "release", "sentence"),
    [
        (Levers(engine="fsdp2"), {}, "0.9.5", "cannot start FSDP2"),
        (Levers(engine="zero3"), {"model": "tiny_mamba"}, "0.9.5", "no Mamba kernels"),
        (Levers(engine="zero3"), {"model": "tiny_llama"}, "0.9.5", "preset tiny_llama has none"),
        (Levers(engine="zero3"), {"model": "gemma-3-27b"}, "0.9.2", "0.9.3 is the first"),
        (Levers(engine="zero3", master_weights=False), {}, "0.9.5", "under ZeRO-3"),
        (Levers(engine="zero2", master_weights=False, precision="fp16"), {}, "0.9.5", "in fp16"),
        (Levers(engine="zero2", method="lora", lora=Lora(), precision="fp32"), {}, "0.9.5", "take bf16 for lora"),
        (Levers(engine="zero2", frozen_layers=4), {}, "0.9.5", "frozen_layers"),
        (Levers(engine="zero2", trains="embeddings"), {}, "0.9.5", "trains embeddings alone"),
        (Levers(engine="zero2"), {}, "0.8.3", "0.9.2 and later"),
        (Levers(engine="zero2"), {"timeout": "soon"}, "0.9.5", "is no time"),
    ],
)
def test_what_it_cannot_train_is_refused(
    plan_of: MakePlan, levers: Levers, job: dict[str, Any], release: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        values(plan_of(levers, **job), target_of(release))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_fp32_there_and_larger_ones_are_said(plan_of: MakePlan, method: Any) -> None:
    """It casts them up unless pure_bf16 is on; below ZeRO-3 DeepSpeed casts them down again, whatever was planned."""
    said = {}
    for engine in ("zero2", "zero3"):
        for dtype in ("bf16", "fp32"):
            levers = Levers(engine=engine, method=method, lora=Lora(rank=64, dtype=dtype))
            text = llamafactory_yaml(plan_of(levers), target_of(), "deepspeed.json")
            assert "pure_bf16" not in yaml.safe_load(text)
            said[engine, dtype] = "keeps adapters in fp32, the plan's are bf16: a GPU needs" in text
    assert said == {
        ("zero2", "bf16"): False,
        ("zero2", "fp32"): False,
        ("zero3", "bf16"): True,
        ("zero3", "fp32"): False,
    }


def test_samples_that_the_plan_leaves_out_are_cut_there(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2", sequence=512))
    assert plan.chosen is not None
    skipping = replace(plan, chosen=replace(plan.chosen, skips_long=True))
    sentence = "leaves out samples longer than 512 tokens, LLaMA-Factory cuts them: take them out of the data first"
    assert sentence in llamafactory_yaml(skipping, target_of(), "deepspeed.json")
    assert "leaves out" not in llamafactory_yaml(plan, target_of(), "deepspeed.json")


def test_zero3_on_the_cpu_is_refused(plan_of: MakePlan) -> None:
    assert values(on_cpu(plan_of(Levers(engine="zero2"))))["use_cpu"] is True
    with pytest.raises(ConfigError, match="without a GPU"):
        values(on_cpu(plan_of(Levers(engine="zero3"))))


def test_a_deepspeed_that_the_release_would_refuse_is_refused_here(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2"))
    with pytest.raises(ConfigError, match=r"0\.9\.4 refuses DeepSpeed 0\.19\.8: say --deepspeed-version 0\.16\.9"):
        values(plan, Target(llamafactory_version="0.9.4"))
    values(plan, Target(llamafactory_version="0.9.4", deepspeed_version="0.16.9"))
    values(plan, Target(llamafactory_version="0.9.5"))


def test_a_block_of_shape_fields_has_no_weights(plan_of: MakePlan) -> None:
    plan = plan_of(Levers(engine="zero2"))
    with pytest.raises(ConfigError, match="loads weights"):
        values(replace(plan, job=replace(plan.job, model={"hidden_size": 64})))


@pytest.mark.parametrize(("model", "name"), [("models/mine/config.json", "models/mine"), ("./mine", "./mine")])
def test_a_folder_of_ones_own(plan_of: MakePlan, model: str, name: str) -> None:
    plan = plan_of(Levers(engine="zero2"))
    assert values(replace(plan, job=replace(plan.job, model=model)))["model_name_or_path"] == name


@pytest.mark.parametrize("preset", [name for name in PRESETS if "mamba" not in name and not name.startswith("tiny")])
def test_presets_lead_to_the_checkpoints_that_they_describe(plan_of: MakePlan, preset: str) -> None:
    """Also in capitals, as `--model` takes them."""
    for word in (preset, preset.upper()):
        name = values(plan_of(Levers(engine="zero2"), model=word))["model_name_or_path"]
        assert name == checkpoint_of(preset)
        assert name in str(PRESETS[preset].source)


@pytest.mark.thorough
@pytest.mark.parametrize(("release", "template"), [("0.9.2", "deepseek3"), ("0.9.3", "deepseekr1")])
@pytest.mark.parametrize(
    "word", ["deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai/deepseek-r1-distill-qwen-32b"]
)
def test_a_known_id_keeps_its_name_and_its_template(plan_of: MakePlan, word: str, release: str, template: str) -> None:
    read = values(plan_of(Levers(engine="zero3", method="lora", lora=Lora()), model=word), target_of(release))
    assert read["model_name_or_path"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    assert read["template"] == template


def test_liger_on_a_dcu_was_never_run(plan_of: MakePlan) -> None:
    fused = Levers(engine="zero2", loss="fused")
    for gpus, told in (("8xK100-64GB", True), ("8xA100-80GB", False)):
        assert any("never ran" in str(note) for note in llamafactory_notes(plan_of(fused, gpus), target_of())) == told
    assert not any("Liger" in str(note) for note in llamafactory_notes(plan_of(Levers(), "8xK100-64GB"), target_of()))
