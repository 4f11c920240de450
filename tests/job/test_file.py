"""Job files and flags → Job, and what is computed from it; or one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.inputs.flags import LEVERS, spelt, words_of
from tightfit.job import Adapters, Data, Evaluation, Job, Limits, Machine, Saving
from tightfit.job.fields import COSTLY, FREE_LEVERS, job_fields
from tightfit.job.file import (
    JOB_FLAGS,
    JobFile,
    dump_job,
    hardware_of,
    job_from_flags,
    levers_of,
    model_of,
    pinned,
    read_job,
    timeout_s,
)
from tightfit.model.load import load_model
from tightfit.types import Buckets, Checkpointing, ConfigError, HardwareError, Levers, Lora, ModelError, UserError

DATA = Path(__file__).parents[1] / "data"
LLAMA = load_model("tiny_llama")
GIB = 2**30


def read(folder: Path, text: str, name: str = "job.yaml") -> JobFile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_job(path)


def refusal(folder: Path, text: str, name: str = "job.yaml") -> str:
    """The sentence that a file is refused with."""
    with pytest.raises(UserError) as caught:
        read(folder, text, name)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "pydantic" not in sentence
    return sentence


# --- what is read -------------------------------------------------------------------------------

EVERYTHING = """
model: qwen2.5-7b
method: qlora
lora: {rank: 16, alpha: 32, dropout: 0.1, targets: [q_proj, v_proj], dtype: fp32}
sequence: 4096
effective_batch: 64
precision: fp16
optimizer: adamw8bit
master_weights: false
frozen_layers: 0
data: {path: chats.jsonl, format: sharegpt, template: qwen, packing: true, samples: 5000}
max_samples: 4000
learning_rate: 0.0002
schedule: linear
warmup: 100
epochs: 2.5
weight_decay: 0.1
clip: 0
seed: 7
evaluation: {split: 0.1, every_steps: 50}
saving: {folder: runs/a, every_steps: null, keep: 1}
timeout: 1h30m
hardware: {gpus: 4x24GB, host_ram: 1TB, nvme: 2TB, nvme_path: /mnt/nvme, gpu_ids: [0, 2], network: 8x400Gb, link: pcie3}
limits: {margin: 0.1, gpu_memory: 20GB, host_ram: 500GB, allow: [lora-rank, shorter-seq]}
levers: {engine: zero3, offload_param: nvme, checkpointing: "layers:3", micro_batch: 2, reduce_bucket: 50000000}
tier: minimal
trust_remote_code: true
"""

EVERYTHING_MEANS = Job(
    model="qwen2.5-7b",
    method="qlora",
    lora=Adapters(rank=16, alpha=32.0, dropout=0.1, targets=("q_proj", "v_proj"), dtype="fp32"),
    sequence=4096,
    effective_batch=64,
    precision="fp16",
    optimizer="adamw8bit",
    master_weights=False,
    data=Data(path="chats.jsonl", format="sharegpt", template="qwen", packing=True, samples=5000),
    max_samples=4000,
    learning_rate=2e-4,
    schedule="linear",
    warmup=100.0,
    epochs=2.5,
    weight_decay=0.1,
    clip=0.0,
    seed=7,
    evaluation=Evaluation(split=0.1, every_steps=50),
    saving=Saving(folder="runs/a", every_steps=None, keep_last=1),
    timeout="1h30m",
    hardware=Machine(
        gpus="4x24GB",
        host_ram="1TB",
        nvme="2TB",
        nvme_path="/mnt/nvme",
        gpu_ids=(0, 2),
        network="8x400Gb",
        link="pcie3",
    ),
    limits=Limits(margin=0.1, gpu_memory="20GB", host_ram="500GB", allow=("lora-rank", "shorter-seq")),
    levers={
        "engine": "zero3",
        "offload_param": "nvme",
        "checkpointing": "layers:3",
        "micro_batch": 2,
        "reduce_bucket": 50_000_000,
    },
    tier="minimal",
    trust_remote_code=True,
)


def test_the_least_is_a_model(tmp_path: Path) -> None:
    assert read(tmp_path, "model: tiny_llama") == JobFile(job=Job(model="tiny_llama"), explicit=frozenset({"model"}))


def test_every_field_arrives(tmp_path: Path) -> None:
    read_back = read(tmp_path, EVERYTHING)
    assert read_back.job == EVERYTHING_MEANS
    assert read_back.said == ()


def test_json_is_read_too(tmp_path: Path) -> None:
    text = json.dumps(yaml.safe_load(EVERYTHING))
    assert read(tmp_path, text, "job.json").job == EVERYTHING_MEANS


def test_a_number_that_yaml_reads_as_text_is_taken_and_said(tmp_path: Path) -> None:
    found = read(tmp_path, "model: tiny_llama\nlearning_rate: 1e-4\nlevers: {reduce_bucket: 5e8}")
    assert found.job.learning_rate == 1e-4
    assert found.job.levers == {"reduce_bucket": 500_000_000}
    assert tuple(map(str, found.said)) == (
        "learning_rate in job.yaml: '1e-4' is text to YAML and was taken as 0.0001.",
        "levers.reduce_bucket in job.yaml: '5e8' is text to YAML and was taken as 500000000.",
    )


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("precision: FP16", Job(model="m", precision="fp16")),
        ("method: QLoRA", Job(model="m", method="qlora")),
        ("levers: {compile: off}", Job(model="m", levers={"compile": "off"})),  # a switch to YAML
        ("optimizer: Paged-AdamW8bit", Job(model="m", optimizer="paged_adamw8bit")),
        ("lora: {targets: 'q_proj, v_proj'}\nmethod: lora", None),
        ("lora: {targets: [all]}", Job(model="m")),
        ("hardware: {gpu_ids: '0,3'}", Job(model="m", hardware=Machine(gpu_ids=(0, 3)))),
        ("hardware: {gpu_ids: 1}", Job(model="m", hardware=Machine(gpu_ids=(1,)))),
        ("limits: {allow: quantize}", Job(model="m", limits=Limits(allow=("quantize",)))),
        ("limits: {margin: 5%}", Job(model="m", limits=Limits(margin=0.05))),
        ("sequence: 1.0e+3", Job(model="m", sequence=1000)),
        ("levers: {checkpointing: Layers:2}", Job(model="m", levers={"checkpointing": "layers:2"})),
        ("hardware:", Job(model="m")),
        ("hardware: {gpus: This}", Job(model="m", hardware=Machine(gpus="This"))),
    ],
)
def test_ways_to_write_the_same(tmp_path: Path, line: str, job: Job | None) -> None:
    expected = job or Job(model="m", method="lora", lora=Adapters(targets=("q_proj", "v_proj")))
    assert read(tmp_path, f"model: m\n{line}").job == expected


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    text = "model: m\nepochs: 3\nmax_steps: 10\nlora: {rank: 4}\nevaluation: {every_steps: 5}"
    steps, lora, evaluation = map(str, read(tmp_path, text).said)
    assert "max_steps in job.yaml wins over epochs" in steps
    assert "lora in job.yaml is without effect" in lora
    assert "evaluation.every_steps in job.yaml is without effect" in evaluation


def test_adapters_that_may_come_to_matter_are_not_idle(tmp_path: Path) -> None:
    assert read(tmp_path, "model: m\nlora: {rank: 4}\nlimits: {allow: [lora]}").said == ()


def test_a_block_of_shape_fields(tmp_path: Path) -> None:
    block = "model: {family: mamba, vocab_size: 512, d_model: 128, n_layers: 4, d_state: 16}"
    shape = model_of(read(tmp_path, block).job)
    assert shape.parameters == load_model("tiny_mamba").parameters
    assert shape.name == "mamba 128×4"


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "job.yaml is empty: the least is one line, `model: llama-3.1-8b` say"),
        ("# nothing but a comment", "job.yaml is empty: the least is one line, `model: llama-3.1-8b` say"),
        ("- model", 'job.yaml is no job file: it should be lines of `field: value`, not ["model"]'),
        ("model: m\nlora: [1, 2", "job.yaml is not YAML: write a comma there, or close the bracket, in line 2"),
        ("model: m\nmodel: n", "'model' stands twice in job.yaml, again in line 2: keep one"),
        ("model: m\nlora:\n  rank: 1\n  rank: 2", "'rank' stands twice in job.yaml, again in line 4: keep one"),
        (
            "model: m\nx: !!python/object/apply:os.getcwd []",
            "job.yaml is not YAML: leave out the tag that begins with !, in line 2",
        ),
        ("seed: !!int ''", "job.yaml is not YAML: leave out the tag, !!int say, before what it cannot be"),
        ("a: &a\n  b: *a", "job.yaml holds more than any job has: look for YAML anchors that name each other"),
        (
            "learning_rate: .inf",
            "learning_rate in job.yaml has inf, which no job can have: write a plain number or text",
        ),
        (
            "sequence: 3",
            "job.yaml names no model: add `model:` with a preset (`tightfit models`), a Hugging Face id or a folder",
        ),
        ("model:", "model in job.yaml must be a name or a block of shape fields, not null"),
        (
            "model_name_or_path: x",
            "job.yaml is no job file but a LLaMA-Factory config, which `tightfit estimate FILE` reads",
        ),
    ],
)
def test_files_that_are_no_jobs(tmp_path: Path, text: str, sentence: str) -> None:
    assert refusal(tmp_path, text) == sentence


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("lerning_rate: 1", "unknown field 'lerning_rate' in job.yaml; did you mean 'learning_rate'?"),
        ("lora: {rnk: 4}", "unknown field 'lora.rnk' in job.yaml; did you mean 'lora.rank'?"),
        ("rank: 4", "unknown field 'rank' in job.yaml; did you mean 'lora.rank'?"),
        (
            "lora.rank: 4",
            "unknown field 'lora.rank' in job.yaml; a field of a block stands inside it: write lora: {rank: …}",
        ),
        ("cutoff_len: 4", "unknown field 'cutoff_len' in job.yaml; did you mean 'sequence'?"),
        ("lora: {zz: 4}", "unknown field 'lora.zz' in job.yaml; lora takes rank, alpha, dropout, targets or dtype"),
        ("zzz: 4", "unknown field 'zzz' in job.yaml; `tightfit schema --table` lists the fields there are"),
        ("sequence: 0", "sequence in job.yaml must be a whole number of at least 1, not 0"),
        ("sequence: 1.5", "sequence in job.yaml must be a whole number of at least 1, not 1.5"),
        ("sequence: true", "sequence in job.yaml must be a whole number of at least 1, not true"),
        ("sequence: long", "sequence in job.yaml must be a whole number of at least 1, not 'long'"),
        (
            "sequence:",
            "sequence in job.yaml must be a whole number of at least 1, not null: leave it out for the default",
        ),
        ("effective_batch: 0", "effective_batch in job.yaml must be a whole number of at least 1, not 0"),
        ("lora: {rank: 0}", "lora.rank in job.yaml must be a whole number of at least 1, not 0"),
        ("lora: {dropout: 1}", "lora.dropout in job.yaml must be a number from 0 to below 1, not 1"),
        ("lora: {targets: []}", "lora.targets in job.yaml must be a list of names or `all`, not []"),
        ("lora: 8", "lora in job.yaml must be a block of fields, not 8"),
        ("evaluation: {split: 1.0}", "evaluation.split in job.yaml must be a number from 0 to below 1, not 1.0"),
        ("limits: {margin: 0.9}", "limits.margin in job.yaml must be a number from 0 to below 0.9, not 0.9"),
        ("limits: {margin: true}", "limits.margin in job.yaml must be a number from 0 to below 0.9, not true"),
        ("epochs: 0", "epochs in job.yaml must be a number above 0, not 0"),
        ("max_steps: 0", "max_steps in job.yaml must be a whole number of at least 1, not 0"),
        ("optimizer: adam", "optimizer in job.yaml knows no 'adam'; did you mean 'adamw'?"),
        (
            "schedule: no",
            "schedule in job.yaml must be cosine, linear, constant or constant_with_warmup, not false: "
            "YAML reads yes, no, on and off so, put it in quotes",
        ),
        (
            "data: {packing: 'false'}",
            "data.packing in job.yaml must be true or false, not 'false': write it without quotes",
        ),
        ("limits: {allow: [lora, quantise]}", "limits.allow in job.yaml knows no 'quantise'; did you mean 'quantize'?"),
        ("tier: stage4", "tier in job.yaml knows no 'stage4'; did you mean 'stage3'?"),
        ("saving: {folder: ' '}", "saving.folder in job.yaml must be text, not ' '"),
        ("timeout: 3600", "timeout in job.yaml must be a time such as 12h, not 3600"),
        ("timeout: soon", "timeout in job.yaml: 'soon' is no time: write 12h, 90m or 1h30m"),
        ("hardware: {host_ram: 256}", "hardware.host_ram in job.yaml must be a size such as 256GB, not 256"),
        (
            "hardware: {host_ram: 0GB}",
            "hardware.host_ram in job.yaml: A size of '0GB' holds nothing: write something like 512GB.",
        ),
        (
            "limits: {host_ram: 0GB}",
            "limits.host_ram in job.yaml: A size of '0GB' holds nothing: write something like 512GB.",
        ),
        (
            "hardware: {network: 400}",
            "hardware.network in job.yaml must be a network such as 400Gb or 8x400Gb, not 400",
        ),
        (
            "hardware: {link: nvlnk}",
            "hardware.link in job.yaml: 'nvlnk' is not a link between GPUs: did you mean nvlink?",
        ),
        ("network: 400Gb", "unknown field 'network' in job.yaml; did you mean 'hardware.network'?"),
        ("hardware: {gpus: 8}", "hardware.gpus in job.yaml must be a word such as 6x32GB, not 8"),
        (
            "hardware: {gpus: 8xA100}",
            "hardware.gpus in job.yaml: A100 comes with 40GB or 80GB: write A100-80GB, say.",
        ),
        ("hardware: {gpu_ids: [1, 1]}", "hardware.gpu_ids in job.yaml is [1, 1] and names a GPU twice: name each once"),
        ("hardware: {gpu_ids: [-1]}", None),
        (
            "hardware: {host_ram: 1TB}\nlimits: {host_ram: 2TB}",
            "limits.host_ram in job.yaml is 2TB, more than the 1TB of hardware.host_ram: lower it or leave it out",
        ),
        ("levers: {engine: zero9}", "levers.engine in job.yaml knows no 'zero9'; did you mean 'zero3'?"),
        (
            "levers: {seq: 512}",
            "levers.seq in job.yaml changes the result of the training, so it is no free lever: write it as sequence",
        ),
        ("levers: {acum: 1}", "unknown field 'levers.acum' in job.yaml; did you mean 'levers.accum'?"),
        ("levers: {micro_batch: 0}", "levers.micro_batch in job.yaml must be a whole number of at least 1, not 0"),
        ("levers: {checkpointing: half}", None),
        (
            "levers: {deepspeed_version: 0.14}",
            "levers.deepspeed_version in job.yaml must be a version in quotes such as '0.16.4', not 0.14",
        ),
        (
            "levers: {offload_param: nvme}",
            "levers.offload_param in job.yaml is nvme, but no NVMe is there: add hardware.nvme, 2TB say",
        ),
        (
            "effective_batch: 10\nlevers: {micro_batch: 2, accum: 2}",
            "effective_batch in job.yaml is 10, which levers.micro_batch 2 × levers.accum 2 does not divide: "
            "make it a multiple of 4",
        ),
    ],
)
def test_fields_that_are_wrong(tmp_path: Path, line: str, sentence: str | None) -> None:
    said = refusal(tmp_path, f"model: m\n{line}")
    assert said == sentence or (sentence is None and "job.yaml" in said)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, sentence in {
        tmp_path / "gone.yaml": "no such file or directory",
        tmp_path: "is a directory",
        binary: "binary.yaml is not a job file: it is not even text in UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            read_job(path)


def test_json_that_is_none(tmp_path: Path) -> None:
    assert refusal(tmp_path, '{"model": "m",\n "seed": }', "job.json").endswith(
        "write the value that is missing, in line 2"
    )
    assert refusal(tmp_path, '{"model": 1, "model": 2}', "j.json") == "'model' stands twice in j.json: keep one"
    assert "nest its blocks less deeply" in refusal(tmp_path, '{"a":' * 20_000, "j.json")


def test_a_model_block_that_is_wrong(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, "model: {family: mamba, vocab_size: 9, d_model: 8, n_layers: 1, d_stat: 3}")
    assert sentence.startswith("job.yaml: model 'mamba 8×1': 'd_stat' is no shape field of a mamba")
    with pytest.raises(ModelError):
        read(tmp_path, "model: {d_model: 8}")


@pytest.mark.parametrize("lever", COSTLY)
def test_no_costly_lever_is_free(tmp_path: Path, lever: str) -> None:
    sentence = refusal(tmp_path, f"model: m\nlevers: {{{lever}: 1}}")
    assert sentence.endswith(f"write it as {COSTLY[lever]}")
    assert COSTLY[lever] in job_fields()


TREES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(
            st.sampled_from([name.rpartition(".")[2] for name in job_fields()] + ["training", "num_gpus"])
            | st.text(max_size=4),
            inside,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@pytest.mark.thorough
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(st.sampled_from([*job_fields(), "training", "model_type", "preset"]), TREES, max_size=5))
def test_whatever_stands_in_a_file_it_is_a_job_or_a_sentence(tmp_path: Path, tree: dict[str, Any]) -> None:
    nested: dict[str, Any] = {"model": "tiny_llama"}
    for name, value in tree.items():
        block, _, key = name.rpartition(".")
        inside = nested.setdefault(block, {}) if block else nested
        if isinstance(inside, dict):
            inside[key] = value
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(nested), encoding="utf-8")
    try:
        job = read_job(path).job
    except UserError:
        return
    assert job_from_flags({}, job) == job


@pytest.mark.thorough
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="model:ay \n\t-[]{}&*!?|>'\"#%@`,0123.eE_é\x00", max_size=60))
def test_any_text_at_all_is_a_job_or_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        read_job(path)


# --- the other form -----------------------------------------------------------------------------


def test_a_training_scripts_file_loads_as_it_is() -> None:
    found = read_job(DATA / "config_7b_mamba.yaml")
    assert found.job == Job(
        model={
            "family": "mamba",
            "vocab_size": 50257,
            "max_seq_length": 4096,
            "d_model": 4864,
            "n_layers": 45,
            "d_state": 16,
            "d_conv": 4,
            "expand": 2,
        },
        sequence=4096,
        effective_batch=32,
        learning_rate=1e-4,
        max_steps=200_000,
    )
    assert found.num_gpus == 4
    assert model_of(found.job).parameters == load_model("7b_mamba").parameters
    batch, gpus, rate = map(str, found.said)
    assert "1 × training.gradient_accumulation_steps 8 × 4 GPUs" in batch
    assert "4 GPUs of this machine" in gpus
    assert "training.learning_rate in config_7b_mamba.yaml: '1e-4' is text to YAML" in rate


def test_without_a_number_of_gpus_the_batch_stays_as_it_is() -> None:
    found = read_job(DATA / "config_persona.json")
    assert found.job == Job(
        model="gemma-3-27b", learning_rate=1e-5, warmup=100.0, levers={"micro_batch": 1, "accum": 4}
    )
    assert "does not say on how many GPUs" in str(found.said[0])


def test_other_fields_of_such_files(tmp_path: Path) -> None:
    text = """
preset: 1b_mamba
num_gpus: 2
training:
  num_epochs: 3
  max_steps: -1
  weight_decay: 0.1
  warmup_steps: 200
  lr_scheduler_type: linear
  save_steps: 1000
  save_total_limit: 3
  eval_steps: 500
  seed: 9
  max_grad_norm: 0.5
  max_length: 512
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 4
  output_dir: checkpoints
  logging_steps: 10
evaluation: {split: 0.1}
"""
    found = read(tmp_path, text)
    assert found.job == Job(
        model="1b_mamba",
        sequence=512,
        precision="fp16",
        epochs=3.0,
        weight_decay=0.1,
        warmup=200.0,
        schedule="linear",
        seed=9,
        clip=0.5,
        saving=Saving(folder="checkpoints", every_steps=1000, keep_last=3),
        evaluation=Evaluation(split=0.1, every_steps=500),
        logging_steps=10,
        levers={"dataloader_workers": 4, "checkpointing": "full"},
    )


NOTE_001 = """{
  "per_device_train_batch_size": 1,    // smaller is less
  "gradient_accumulation_steps": 16,   // makes up for it
  "max_seq_length": 1024,
  "dataloader_num_workers": 0,
  "save_total_limit": 1,
  "fp16": true,
  "evaluation_strategy": "steps",
  "eval_strategy": "steps",
  "save_strategy": "steps",            # the same
  "deepspeed_stage": 3,
  "cpu_offload": true,
  "lora_r": 16,
  "lora_target_modules": "q_proj,k_proj,v_proj,o_proj",
  "lora_alpha": 8,
}"""


def test_the_arguments_of_a_trainer_with_comments(tmp_path: Path) -> None:
    """As the second note keeps them; `tightfit lint` has always read them."""
    path = tmp_path / "args.json"
    path.write_text(NOTE_001, encoding="utf-8")
    found = read_job(path, model="qwen1.5-1.8b")
    assert found.job == Job(
        model="qwen1.5-1.8b",
        method="lora",
        lora=Adapters(rank=16, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
        sequence=1024,
        precision="fp16",
        saving=Saving(keep_last=1),
        levers={
            **{"engine": "zero3", "offload_optimizer": "cpu", "micro_batch": 1, "accum": 16, "dataloader_workers": 0}
        },
    )
    aside = "Left aside from args.json, since no job has it: evaluation_strategy, eval_strategy, save_strategy."
    assert aside in map(str, found.said)
    more = '{"num_train_epochs": 2, "optim": "adamw_bnb_8bit", "warmup_steps": 0, "warmup_ratio": 0.1, "max_steps": -1}'
    path.write_text(more, encoding="utf-8")
    job = read_job(path, model="qwen1.5-1.8b").job
    assert (job.epochs, job.optimizer, job.warmup, job.max_steps) == (2, "adamw8bit", 0.1, None)
    path.write_text('{"per_device_train_batch_size": 1, "learning_rat": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown field 'learning_rat' in args\.json; did you mean 'learning_rate'"):
        read_job(path, model="qwen1.5-1.8b")


@pytest.mark.parametrize(
    ("hardware", "batch"),
    [("gpus: 6x32GB", 12), ("gpus: 2x8xA100-80GB", 32), ("gpus: 8x24GB, gpu_ids: [1, 3]", 4), ("gpu_ids: '0,1,2'", 6)],
)
def test_the_batch_counts_the_gpus_that_are_named(tmp_path: Path, hardware: str, batch: int) -> None:
    text = f"model: m\ntraining: {{batch_size: 2}}\nhardware: {{{hardware}}}"
    assert read(tmp_path, text).job.effective_batch == batch


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            "training: {bach_size: 1}",
            "unknown field 'training.bach_size' in job.yaml; did you mean 'training.batch_size'?",
        ),
        ("training: {learning_rate: fast}", "training.learning_rate in job.yaml must be a number above 0, not 'fast'"),
        ("training: {batch_size: 0}", "training.batch_size in job.yaml must be at least 1, not 0"),
        ("training: {lr: 1}\nlearning_rate: 1", "learning_rate and training.lr in job.yaml say the same thing"),
        ("training: {lr: 1, learning_rate: 1}", "training.lr and training.learning_rate in job.yaml say the same"),
        ("training: {batch_size: 1}\neffective_batch: 1", "effective_batch and training.batch_size in job.yaml"),
        ("training: {fp16: true, bf16: true}", "training.fp16 and training.bf16 in job.yaml are both true"),
        ("training: {save_steps: 0}", "training.save_steps in job.yaml must be a whole number of at least 1, not 0"),
        ("training: 3", "training in job.yaml must be a block of fields such as batch_size, not 3"),
        ("num_gpus: 0", "num_gpus in job.yaml must be at least 1, not 0"),
        ("num_gpus: true", "num_gpus in job.yaml must be a whole number, not true"),
        ("num_gpu: 3", "unknown field 'num_gpu' in job.yaml; did you mean 'num_gpus'?"),
        ("training: {batch_size: 1}\nhardware: {gpus: 4xRTX4091}", "hardware.gpus in job.yaml: We know no card"),
    ],
)
def test_such_files_when_they_are_wrong(tmp_path: Path, lines: str, sentence: str) -> None:
    assert refusal(tmp_path, f"model: m\n{lines}").startswith(sentence)


# --- flags --------------------------------------------------------------------------------------


def test_flags_alone_are_a_job() -> None:
    job = job_from_flags(
        {
            "model": "tiny_llama",
            "method": "LoRA",
            "seq": 512,
            "lora_rank": 4,
            "lora_targets": "q_proj,v_proj",
            "adapter_dtype": "fp32",
            "effective_batch": 16,
            "gpus": "4x24GB",
            "gpu_ids": "0,1",
            "host_ram": "256GB",
            "nvme": "1TB",
            "network": "400Gb",
            "link": "50GB/s",
            "margin": "0.1",
            "allow": "shorter-seq,quantize",
            "max_steps": "100",
            "samples": 1000,
            "tier": "auto",
            "learning_rate": "1e-4",
            "engine": "zero2",
            "reduce_bucket": "5e7",
            "precision": None,
        }
    )
    assert job == Job(
        model="tiny_llama",
        method="lora",
        sequence=512,
        lora=Adapters(rank=4, targets=("q_proj", "v_proj"), dtype="fp32"),
        effective_batch=16,
        hardware=Machine(gpus="4x24GB", gpu_ids=(0, 1), host_ram="256GB", nvme="1TB", network="400Gb", link="50GB/s"),
        limits=Limits(margin=0.1, allow=("shorter-seq", "quantize")),
        max_steps=100,
        data=Data(samples=1000),
        tier="auto",
        learning_rate=1e-4,
        levers={"engine": "zero2", "reduce_bucket": 50_000_000},
    )


def test_a_flag_wins_over_the_file() -> None:
    job = job_from_flags({"seq": 1024, "gpus": "8x80GB", "engine": "fsdp2", "master_weights": True}, EVERYTHING_MEANS)
    machine = replace(EVERYTHING_MEANS.hardware, gpus="8x80GB")
    levers = {**EVERYTHING_MEANS.levers, "engine": "fsdp2"}
    assert job == replace(EVERYTHING_MEANS, sequence=1024, hardware=machine, levers=levers, master_weights=True)


def test_epochs_as_a_flag_overrule_the_files_steps() -> None:
    assert job_from_flags({"epochs": 2}, Job(model="m", max_steps=9)) == Job(model="m", epochs=2.0)
    assert job_from_flags({"max_steps": 9}, Job(model="m", epochs=2.0)) == Job(model="m", max_steps=9)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "say which model: --model with a preset"),
        ({"effective_batch": 0}, "--effective-batch must be a whole number of at least 1, not 0"),
        ({"seq": "long"}, "--seq must be a whole number of at least 1, not 'long'"),
        ({"margin": "nan"}, "--margin must be a number from 0 to below 0.9, not 'nan'"),
        ({"allow": "quantise"}, "--allow knows no 'quantise'; did you mean 'quantize'?"),
        ({"gpus": "4xRTX4091"}, "--gpus: We know no card 'RTX4091'"),
        ({"network": "fast"}, "--network: 'fast' is not a network"),
        ({"host_ram": "0GB"}, "--host-ram: A size of '0GB' holds nothing"),
        ({"lora_rank": 4}, "--lora-rank needs --method lora or qlora"),
        ({"engine": "zero9"}, "--engine knows no 'zero9'; did you mean 'zero3'?"),
        ({"offload_optimizer": "nvme"}, "--offload-optimizer is nvme, but no NVMe is there: say how much with --nvme"),
        ({"effective_batch": 10, "micro_batch": 4}, "--effective-batch is 10, which --micro-batch 4 does not divide"),
        ({"gpu_ids": "a"}, "--gpu-ids must be a list of whole numbers of at least 0"),
        ({"batch": 4}, "no job has --batch"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        job_from_flags(({"model": "m"} | flags) if flags else {})
    assert str(caught.value).startswith(sentence)


def test_every_flag_has_its_field() -> None:
    short = {"saving.every"}  # for every_steps and every_minutes
    assert set(JOB_FLAGS.values()) <= set(job_fields()) | short
    assert {name for name in JOB_FLAGS if JOB_FLAGS[name].startswith("levers.")} == set(FREE_LEVERS)
    for flag, lever in LEVERS.items():
        takes = job_fields()[JOB_FLAGS[flag]].takes
        assert not words_of(lever) or takes.words == words_of(lever), flag


# --- dumping ------------------------------------------------------------------------------------


def test_only_what_differs_is_dumped() -> None:
    assert dump_job(Job(model="m")) == {"model": "m"}
    assert dump_job(Job(model="m", limits=Limits(margin=0.1), saving=Saving(every_steps=None))) == {
        "model": "m",
        "saving": {"every_steps": None},
        "limits": {"margin": 0.1},
    }


def test_a_dumped_job_reads_back(tmp_path: Path) -> None:
    dumped = dump_job(EVERYTHING_MEANS)
    assert read(tmp_path, json.dumps(dumped), "job.json").job == EVERYTHING_MEANS
    assert read(tmp_path, yaml.safe_dump(dumped)).job == EVERYTHING_MEANS


COUNTS = st.integers(1, 10**6)
JOBS = st.builds(
    Job,
    model=st.sampled_from(
        ["tiny_llama", {"family": "mamba", "vocab_size": 9, "d_model": 8, "n_layers": 1, "expand": 2}]
    ),
    method=st.sampled_from(["full", "lora", "qlora"]),
    sequence=COUNTS,
    effective_batch=st.none() | COUNTS,
    learning_rate=st.none() | st.floats(1e-9, 1),
    warmup=st.floats(0, 1000),
    epochs=st.none() | st.floats(0.01, 100),
    max_steps=st.none() | COUNTS,
    seed=st.integers(0, 2**32 - 1),
    lora=st.builds(
        Adapters,
        rank=st.integers(1, 65_536),
        alpha=st.none() | st.floats(0.1, 1000),
        dropout=st.floats(0, 0.99),
        targets=st.just("all") | st.lists(st.sampled_from(["q_proj", "v_proj"]), min_size=1).map(tuple),
    ),
    data=st.builds(Data, path=st.none() | st.text("ab/. é", min_size=1).filter(str.strip), packing=st.booleans()),
    saving=st.builds(Saving, every_steps=st.none() | COUNTS, keep_last=COUNTS, keep_every=st.none() | COUNTS),
    hardware=st.builds(
        Machine,
        gpus=st.none() | st.sampled_from(["4x24GB", "this", "2x8xH100"]),
        gpu_ids=st.none() | st.sets(st.integers(0, 7), min_size=1).map(tuple),
    ),
    limits=st.builds(Limits, margin=st.floats(0, 0.89), allow=st.sampled_from([(), ("lora",), ("quantize", "lora")])),
    levers=st.fixed_dictionaries(
        {}, optional={"engine": st.sampled_from(words_of(LEVERS["engine"])), "loss": st.just("fused")}
    ),
)


@pytest.mark.thorough
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=JOBS)
def test_any_job_survives_its_file(tmp_path: Path, job: Job) -> None:
    assert read(tmp_path, yaml.safe_dump(dump_job(job), allow_unicode=True)).job == job


# --- levers -------------------------------------------------------------------------------------


def test_a_plain_job_has_the_usual_levers() -> None:
    assert levers_of(Job(model="m"), LLAMA) == Levers()
    assert pinned(Job(model="m")) == frozenset()


def test_the_users_part_of_the_levers() -> None:
    job = Job(
        model="m",
        method="qlora",
        lora=Adapters(rank=4, targets=("q_proj",), dtype="fp32", dropout=0.1),
        data=Data(packing=True),
        sequence=512,
        precision="fp16",
        optimizer="sgd",
        master_weights=False,
        clip=0.0,
        levers={
            "engine": "zero2",
            "accum": 3,
            "checkpointing": "layers:2",
            "prefetch_bucket": 7,
            "deepspeed_version": "0.14.2",
        },
    )
    assert levers_of(job, LLAMA) == Levers(
        method="qlora",
        lora=Lora(rank=4, targets=("q_proj",), dtype="fp32", dropout=0.1),
        sequence=512,
        precision="fp16",
        optimizer="sgd",
        master_weights=False,
        gradient_clipping=False,
        packed=True,
        engine="zero2",
        accumulation=3,
        checkpointing=Checkpointing(layers=2),
        buckets=Buckets(prefetch_bucket=7),
        deepspeed_version="0.14.2",
    )
    assert pinned(job) == {"engine", "accumulation", "checkpointing", "buckets", "deepspeed_version"}


def test_every_pin_is_a_lever() -> None:
    job = Job(model="m", levers=dict.fromkeys(FREE_LEVERS, 1))
    assert all(hasattr(Levers(), name) for name in pinned(job))


def test_an_offload_may_be_pinned_without_an_engine() -> None:
    job = Job(model="m", levers={"offload_optimizer": "cpu"})
    assert levers_of(job, LLAMA).offload_optimizer == "cpu"
    assert pinned(job) == {"offload_optimizer"}


def test_adapters_of_a_full_training_do_not_matter() -> None:
    assert levers_of(Job(model="m", lora=Adapters(rank=64)), LLAMA) == Levers()


@pytest.mark.parametrize(
    ("job", "flags", "fields"),
    [
        (
            Job(model="m", frozen_layers=9),
            "--frozen-layers 9 is more than the 4 layers of tiny_llama",
            "job.yaml: frozen_layers 9 is more than the 4 layers of tiny_llama",
        ),
        (
            Job(model="m", method="qlora", trains="embeddings"),
            "--trains embeddings is for --method full: qlora trains adapters and nothing else",
            "job.yaml: trains embeddings is for method full: qlora trains adapters and nothing else",
        ),
        (
            Job(model="m", levers={"engine": "zero0", "offload_optimizer": "cpu"}),
            "--offload-optimizer cpu needs --engine zero1, zero2 or zero3, not zero0",
            "job.yaml: levers.offload_optimizer cpu needs levers.engine zero1, zero2 or zero3, not zero0",
        ),
        (
            Job(model="m", levers={"deepspeed_version": "new"}),
            "--deepspeed-version takes a version such as 0.19.8, not 'new'",
            "job.yaml: levers.deepspeed_version takes a version such as 0.19.8, not 'new'",
        ),
    ],
)
def test_contradictions_name_what_the_user_wrote(job: Job, flags: str, fields: str) -> None:
    with pytest.raises(ConfigError) as caught:
        levers_of(job, LLAMA)
    assert str(caught.value) == flags
    with pytest.raises(ConfigError) as caught:
        levers_of(job, LLAMA, file="job.yaml")
    assert str(caught.value) == fields


# --- hardware -----------------------------------------------------------------------------------


def machine(limits: Limits | None = None, num_gpus: int | None = None, **fields: Any) -> Any:
    return hardware_of(Job(model="m", hardware=Machine(**fields), limits=limits or Limits()), num_gpus)


def test_the_named_cards() -> None:
    found = machine(gpus="2x8xA100-80GB", host_ram="1TB", nvme="2TB")
    assert (found.nodes, found.gpus_per_node) == (2, 8)
    assert (found.host_ram_bytes, found.nvme_bytes) == (1024 * GIB, 2048 * GIB)


def test_this_machine_without_a_word() -> None:
    assert machine() == machine(gpus="this")
    assert machine(host_ram="8GB").host_ram_bytes == 8 * GIB


def test_what_joins_the_machines() -> None:
    found = machine(gpus="2x8xH100", network="8x400Gb", link="pcie5")
    assert (found.network_bytes_per_s, found.gpu.link, found.link_given) == (400e9, "pcie5", True)
    here = machine(network="25Gb", link="pcie3")
    assert (here.network_bytes_per_s, here.gpu.link) == (25e9 / 8, "pcie3")
    two, four = (machine(gpus="4xRTX3090", num_gpus=count, link="nvlink") for count in (2, 4))
    assert (two.gpu.link, four.gpu.link) == ("nvlink", "pcie4"), "a bridge joins two"


def test_some_gpus_of_every_node() -> None:
    by_id = machine(gpus="2x8xH100", gpu_ids=(4, 5, 6))
    assert (by_id.world, str(by_id.because[-1])) == (6, "GPUs used of each node: number 4, 5, 6 of 8.")
    by_count = machine(gpus="2x8xH100", num_gpus=2)
    assert (by_count.world, str(by_count.because[-1])) == (4, "GPUs used of each node: 2 of 8.")
    assert machine(gpus="8x24GB", num_gpus=8) == machine(gpus="8x24GB")


def test_limits_are_caps() -> None:
    found = machine(Limits(gpu_memory="20GB", host_ram="100GB"), gpus="4x24GB", host_ram="256GB")
    assert (found.gpu.memory_bytes, found.host_ram_bytes) == (20 * GIB, 100 * GIB)
    assert tuple(map(str, found.because)) == (
        "limits.gpu_memory leaves 20GB of each 24GB card.",
        "limits.host_ram leaves 100GB of each node's RAM.",
    )


def test_limits_never_give_more() -> None:
    found = machine(Limits(gpu_memory="80GB"), gpus="4x24GB")
    assert found.gpu.memory_bytes == 24 * GIB
    assert "changes nothing" in str(found.because[-1])


def test_a_limit_stands_for_ram_that_nobody_named() -> None:
    assert machine(Limits(host_ram="64GB"), gpus="4x24GB").host_ram_bytes == 64 * GIB


@pytest.mark.parametrize(
    ("fields", "num_gpus", "sentence"),
    [
        ({"gpus": "4x24GB", "gpu_ids": (0, 4)}, None, "gpu_ids has 4, but the GPUs of a node are 0 to 3"),
        ({"gpus": "4x24GB"}, 8, "num_gpus is 8, but a node has 4 × 24GB card: name the cards, 8x24GB say"),
        (
            {"gpus": "4x24GB", "gpu_ids": (0, 1)},
            3,
            "gpu_ids names 2 GPUs and num_gpus is 3: leave one of them out",
        ),
    ],
)
def test_gpus_that_are_not_there(fields: dict[str, Any], num_gpus: int | None, sentence: str) -> None:
    with pytest.raises((HardwareError, ConfigError)) as caught:
        machine(num_gpus=num_gpus, **fields)
    assert str(caught.value) == sentence


# --- times, and what is loaded ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12h", 43_200), ("90m", 5_400), ("3600s", 3_600), ("1h30m", 5_400), ("1.5h", 5_400), ("2d 1H", 176_400)],
)
def test_times(text: str, seconds: int) -> None:
    assert timeout_s(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "h", "0s", "-1h", "30m1h", "1h1h", "1h x", "1 hour", "9" * 40 + "d"])
def test_no_times(text: str) -> None:
    with pytest.raises(ConfigError, match="write 12h, 90m or 1h30m"):
        timeout_s(text)


@pytest.mark.thorough
def test_the_door_is_light_until_it_is_used() -> None:
    script = (
        "import sys, tightfit.job.file as door\n"
        "assert not {'pydantic', 'yaml', 'torch'} & set(sys.modules), 'loaded too early'\n"
        "door.job_from_flags({'model': 'tiny_llama'})\n"
        "assert 'pydantic' in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- what no job can hold -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1: 2", "1 in job.yaml is not a key"),
        ("data: {yes: 2}", "true in data in job.yaml is not a key"),
        ("model: {a: [{2: 3}]}", "2 in model.a in job.yaml is not a key"),
    ],
)
def test_a_key_is_text(tmp_path: Path, text: str, says: str) -> None:
    assert refusal(tmp_path, text).startswith(says)


@pytest.mark.parametrize(
    ("line", "flag", "most"),
    [
        ("effective_batch", "effective_batch", 1_000_000),
        ("sequence", "seq", 16_777_216),
        ("levers.micro_batch", "micro_batch", 65_536),
        ("levers.accum", "accum", 1_000_000),
        ("levers.reduce_bucket", "reduce_bucket", 100_000_000_000),
        ("levers.dataloader_workers", "dataloader_workers", 1_024),
    ],
)
def test_counts_end_somewhere(tmp_path: Path, line: str, flag: str, most: int) -> None:
    block, _, key = line.rpartition(".")
    text = "model: tiny_llama\n" + (f"{block}: {{{key}: %d}}" if block else f"{key}: %d")
    assert read(tmp_path, text % most).job
    assert refusal(tmp_path, text % (most + 1)) == f"{line} in job.yaml must be at most {most}, not {most + 1}"
    with pytest.raises(ConfigError, match=f"^{spelt(flag)} must be at most {most}, not {most + 1}$"):
        job_from_flags({"model": "tiny_llama", flag: most + 1})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("method: lora\nlora: {rank: 1000000000}", "lora.rank in job.yaml must be at most 65536"),
        ("method: lora\nlora: {alpha: 1e9}", "lora.alpha in job.yaml must be at most 1000000, not 1"),
        ("learning_rate: 5000", "learning_rate in job.yaml must be at most 10, not 5000"),
        ("weight_decay: 1000", "weight_decay in job.yaml must be at most 10, not 1000"),
        ("max_steps: 1e15", "max_steps in job.yaml must be at most 1000000000"),
        ("epochs: 1e9", "epochs in job.yaml must be at most 100000"),
        ("warmup: 1e12", "warmup in job.yaml must be at most 1000000000"),
        ("hardware: {host_ram: 9999999TB}", "hardware.host_ram in job.yaml: No machine has '9999999TB'"),
        ("hardware: {gpus: 1x999999GB}", "No card has '999999GB' of memory: write a size like 24GB, at most 16384GB"),
    ],
)
def test_what_no_training_has_is_refused_with_its_bound(tmp_path: Path, line: str, says: str) -> None:
    assert says in refusal(tmp_path, f"model: tiny_llama\n{line}")


def test_half_a_letter_is_a_sentence_whatever_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^the command line holds text that is no UTF-8"):
        job_from_flags({"model": "tiny_llama", "nvme_path": "/n\udcff"})
