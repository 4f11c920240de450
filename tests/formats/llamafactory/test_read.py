"""Existing LLaMA-Factory files: what they would train, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tightfit.formats.deepspeed import read as deepspeed_file
from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.formats.llamafactory.read import LlamaFactorySettings, check_deepspeed, settings_from, to_levers
from tightfit.job import training as training_arguments
from tightfit.job.text import read_job_text
from tightfit.types import Checkpointing, ConfigError, Levers, Lora

# The shape of LLaMA-Factory's own example for LoRA under ZeRO-3.
EXAMPLE = """
### model
model_name_or_path: deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj, v_proj
deepspeed: ds_z3_config.json

### dataset
dataset: identity,alpaca_en_demo
template: deepseekr1
cutoff_len: 4096
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/lora
logging_steps: 10
plot_loss: true
overwrite_output_dir: true

### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
flash_attn: fa2
ddp_timeout: 180000000
"""
ZERO3 = """{"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto",
"gradient_clipping": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}"""


def read(values: dict[Any, Any] | str | None = None, **keys: object) -> LlamaFactorySettings:
    """The settings of a small file called train.yaml, which at least names a model."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        said = {"model_name_or_path": "some/model", **keys} if values is None else values
        path.write_text(said if isinstance(said, str) else yaml.safe_dump(said), encoding="utf-8")
        return settings_from(read_job_text(path))


def refused(values: dict[Any, Any] | str | None = None, **keys: object) -> str:
    """The one line that the user gets."""
    with pytest.raises(ConfigError) as caught:
        read(values, **keys)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# --- what the file means ------------------------------------------------------------------------


def test_the_usual_file(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(EXAMPLE)
    (tmp_path / "ds_z3_config.json").write_text(ZERO3)
    said = settings_from(read_job_text(tmp_path / "train.yaml"))
    assert said.model == "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    assert said.levers.lora == Lora(rank=16, targets=("q_proj", "v_proj"), dtype="fp32")
    assert said.deepspeed == tmp_path / "ds_z3_config.json"
    assert said.ignored == ()
    assert said.because + said.computing_because == ()

    levers = to_levers(said, 64, Levers().deepspeed_version)
    deepspeed = read_deepspeed(said.deepspeed, hidden_size=5120)
    check_deepspeed(said, deepspeed)
    levers = deepspeed_file.to_levers(deepspeed, levers, world=8)
    assert (levers.method, levers.engine, levers.precision) == ("lora", "zero3", "bf16")
    assert (levers.sequence, levers.micro_batch, levers.accumulation) == (4096, 2, 4)
    assert (levers.attention, levers.dataloader_workers) == ("flash", 4)
    assert levers.buckets.reduce_bucket == 5120 * 5120


def test_what_is_not_said_is_llamafactorys_default() -> None:
    said, levers = read(), read().levers
    assert (levers.method, levers.lora) == ("lora", Lora(rank=8, targets=None, dtype="fp32"))
    assert (levers.sequence, levers.micro_batch, levers.accumulation) == (2048, 8, 1)
    assert (levers.optimizer, levers.attention, levers.loss) == ("adamw", "sdpa", "plain")
    assert levers.checkpointing == Checkpointing(layers=None)
    assert (levers.precision, levers.master_weights, said.max_grad_norm) == ("bf16", True, 1.0)
    assert (levers.dataloader_workers, said.deepspeed) == (0, None)
    assert any("taken as bf16" in str(sentence) for sentence in said.because)
    assert any("priced as zero0" in str(sentence) for sentence in said.computing_because)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"finetuning_type": "full"}, "method", "full"),
        ({"finetuning_type": "full"}, "lora", None),
        ({"finetuning_type": "full"}, "precision", "fp32"),
        ({"finetuning_type": "full", "fp16": True}, "precision", "fp16"),
        ({"pure_bf16": True}, "master_weights", False),
        ({"pure_bf16": True}, "precision", "bf16"),
        ({"pure_bf16": True}, "lora", Lora(dtype="bf16")),
        ({"lora_target": ["q_proj", "k_proj"]}, "lora", Lora(targets=("q_proj", "k_proj"), dtype="fp32")),
        ({"lora_target": "all"}, "lora", Lora(dtype="fp32")),
        ({"neat_packing": True}, "packed", True),
        ({"packing": True}, "packed", False),
        ({"lora_dropout": 0.05}, "lora", Lora(dtype="fp32", dropout=0.05)),
        ({"quantization_bit": 4}, "method", "qlora"),
        ({"optim": "adamw_bnb_8bit"}, "optimizer", "adamw8bit"),
        ({"optim": "adamw_8bit"}, "optimizer", "adamw8bit"),
        ({"optim": "paged_adamw_8bit"}, "optimizer", "paged_adamw8bit"),
        ({"optim": "adafactor"}, "optimizer", "adafactor"),
        ({"optim": "sgd"}, "optimizer", "sgd"),
        ({"flash_attn": "disabled"}, "attention", "eager"),
        ({"flash_attn": False}, "attention", "eager"),
        ({"flash_attn": True}, "attention", "flash"),
        ({"flash_attn": "auto"}, "attention", "sdpa"),
        ({"enable_liger_kernel": True}, "loss", "fused"),
        ({"use_liger_kernel": True}, "loss", "fused"),
        ({"disable_gradient_checkpointing": True}, "checkpointing", Checkpointing(layers=0)),
        ({"gradient_checkpointing": True}, "checkpointing", Checkpointing(layers=None)),
        ({"use_unsloth_gc": True}, "checkpointing", Checkpointing(layers=None, offload=True)),
        ({"max_grad_norm": "1e-1"}, "max_grad_norm", 0.1),
        ({"cutoff_len": "4e3"}, "sequence", 4000),
        ({"cutoff_len": None}, "sequence", 2048),
    ],
)
def test_keys(keys: dict[str, Any], field: str, value: object) -> None:
    said = read(None, **keys)
    assert getattr(said if field == "max_grad_norm" else said.levers, field) == value


def test_yaml_words_for_off() -> None:
    assert read("model_name_or_path: m\nflash_attn: off\n").levers.attention == "eager"


def test_freeze_trains_the_uppermost_layers() -> None:
    said = read(finetuning_type="freeze", freeze_trainable_layers=3)
    assert to_levers(said, 32, "0.19.8").frozen_layers == 29
    assert to_levers(said, 2, "0.19.8").frozen_layers == 0
    assert to_levers(read(finetuning_type="freeze"), 32, "0.19.8").frozen_layers == 30
    assert to_levers(read(), 32, "0.19.8").frozen_layers == 0
    assert any("head" in str(sentence) for sentence in said.because)


def test_levers_of_a_yaml_alone_are_unsharded() -> None:
    levers = to_levers(read(max_grad_norm=0.0), 32, "0.16.4")
    assert (levers.engine, levers.offload_param, levers.offload_optimizer) == ("zero0", "none", "none")
    assert levers.deepspeed_version == "0.16.4"
    assert not levers.gradient_clipping


def test_the_switch_that_llamafactory_does_not_look_at() -> None:
    said = read(gradient_checkpointing=False)
    assert said.levers.checkpointing == Checkpointing(layers=None)
    assert any("has no effect" in str(sentence) for sentence in said.computing_because)


def test_unknown_keys_that_resemble_nothing_are_kept() -> None:
    assert read(wholly_new_feature=1, zzz=2).ignored == ("wholly_new_feature", "zzz")


def test_the_deepspeed_file_is_sought_here_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "ds.json").write_text("{}")
    path = beside / "train.yaml"
    path.write_text("model_name_or_path: m\ndeepspeed: ds.json\n")
    monkeypatch.chdir(here)
    assert settings_from(read_job_text(path)).deepspeed == here / "ds.json"
    (here / "ds.json").unlink()
    assert settings_from(read_job_text(path)).deepspeed == beside / "ds.json"
    (beside / "ds.json").unlink()
    with pytest.raises(ConfigError, match=r"names 'ds\.json', which is neither in this folder nor beside the YAML"):
        settings_from(read_job_text(path))


@pytest.mark.parametrize("key", ["upcast_layernorm", "resize_vocab"])
def test_small_things_are_said(key: str) -> None:
    assert any(
        f"{key} in train.yaml is not priced yet" in str(sentence) for sentence in read(None, **{key: True}).because
    )


# --- against its DeepSpeed file -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "json", "message"),
    [
        (
            {"per_device_train_batch_size": 1},
            '{"train_micro_batch_size_per_gpu": 4}',
            "per_device_train_batch_size is 1 in train.yaml and train_micro_batch_size_per_gpu is 4 in ds.json: "
            "write auto in ds.json",
        ),
        (
            {},
            '{"gradient_accumulation_steps": 4}',
            "gradient_accumulation_steps is 1 in train.yaml and gradient_accumulation_steps is 4 in ds.json: "
            "write auto in ds.json",
        ),
        (
            {"bf16": True},
            '{"fp16": {"enabled": true}}',
            "the precision is bf16 in train.yaml and the precision is fp16 in ds.json: write auto in ds.json",
        ),
        (
            {"pure_bf16": True},
            '{"zero_optimization": {"stage": 3}}',
            "pure_bf16 in train.yaml does not go with ZeRO-3 in ds.json: take bf16",
        ),
    ],
)
def test_contradictions(tmp_path: Path, keys: dict[str, Any], json: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(json)
    deepspeed = read_deepspeed(tmp_path / "ds.json", hidden_size=64)
    with pytest.raises(ConfigError) as caught:
        check_deepspeed(read(None, **keys), deepspeed)
    assert str(caught.value) == message


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"lora_rnk": 8},
            "unknown key 'lora_rnk' in train.yaml; did you mean 'lora_rank'? (LLaMA-Factory would refuse it)",
        ),
        (
            {"finetuning_type": "oft"},
            "finetuning_type oft in train.yaml is not priced yet: lora, freeze and full are",
        ),
        (
            {"finetuning_type": "lroa"},
            "finetuning_type in train.yaml knows no 'lroa'; did you mean 'lora'?",
        ),
        ({"stage": "dpo"}, "stage dpo in train.yaml is not priced yet: pt and sft are"),
        ({"use_galore": True}, "use_galore in train.yaml is not priced yet: leave it out for the estimate"),
        (
            {"additional_target": "embed_tokens"},
            "additional_target in train.yaml is not priced yet: leave it out for the estimate",
        ),
        (
            {"quantization_bit": 8},
            "quantization_bit 8 by bnb in train.yaml is not priced yet: 4 by bnb is",
        ),
        (
            {"quantization_bit": 4, "finetuning_type": "full"},
            "quantization_bit in train.yaml goes with finetuning_type lora only, not full",
        ),
        ({"bf16": True, "fp16": True}, "fp16 and bf16 are both on in train.yaml: keep one"),
        ({"bf16": "true"}, "bf16 in train.yaml must be true or false, not 'true': write it without quotes"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size in train.yaml must be at least 1, not 0"),
        ({"cutoff_len": "long"}, "cutoff_len in train.yaml must be a whole number, not 'long'"),
        ({"lora_target": []}, "lora_target in train.yaml must be names with commas between them, not []"),
        ({"optim": "lion_8bit"}, "optim 'lion_8bit' in train.yaml is not priced yet; it takes adamw_torch"),
        ({"optim": "adamw_trch"}, "optim 'adamw_trch' in train.yaml is unknown; did you mean 'adamw_torch'?"),
        ({"flash_attn": "fa4"}, "flash_attn in train.yaml knows no 'fa4'; did you mean"),
        (
            {"disable_gradient_checkpointing": True, "gradient_checkpointing": True},
            "disable_gradient_checkpointing and gradient_checkpointing are both true in train.yaml: keep one",
        ),
        (
            {"finetuning_type": "freeze", "freeze_trainable_layers": -2},
            "freeze_trainable_layers -2 in train.yaml trains the lowest layers, which is not priced yet: "
            "a positive number trains the uppermost",
        ),
        (
            {"deepspeed": {"zero_optimization": {}}},
            "deepspeed in train.yaml is a block: put it into a JSON file and name that",
        ),
        (
            {"deepspeed": "nowhere.json"},
            "deepspeed in train.yaml names 'nowhere.json', which is neither in this folder nor beside the YAML",
        ),
    ],
)
def test_bad_values(keys: dict[str, Any], message: str) -> None:
    assert refused(None, **keys).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: sft", "train.yaml has no model_name_or_path: say which model to train"),
        ("", "train.yaml is empty: "),
        ("- a\n- b\n", "train.yaml is no job file: it should be lines of `field: value`"),
        ("a: b: c", "train.yaml is not YAML: "),
        ("a: [1", "train.yaml is not YAML: "),
        ("a: 1\nb: 2\na: 3\n", "'a' stands twice in train.yaml, again in line 3: keep one"),
        ("a: !!python/object/apply:os.getcwd []", "train.yaml is not YAML: "),
        ("on: 1\n", "true in train.yaml is not a key"),
        ("a: 2024-13-45", "train.yaml is not YAML (month must be in 1..12"),
        ("a: \x00", "train.yaml is not YAML: "),
        ("a: " + "[" * 600, "train.yaml is no job file: nest its blocks less deeply"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    assert refused(text).startswith(message)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml: no such file"):
        settings_from(read_job_text(tmp_path / "missing.yaml"))


# --- properties ---------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["all", "lora", "freeze", "sft", "1e-4", "fa2", "adamw_torch", "x", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=2),
    max_leaves=4,
)


def complaint(text: str) -> str:
    """What the user gets to hear; nothing if all is well."""
    try:
        to_levers(read(text), 32, "0.19.8")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@given(st.dictionaries(st.sampled_from(sorted(KNOWN)) | st.text(max_size=8) | st.booleans(), VALUES, max_size=5))
def test_any_mapping_is_read_or_refused_in_one_line(values: dict[Any, Any]) -> None:
    assert len(complaint(yaml.safe_dump({"model_name_or_path": "m", **values})).splitlines()) <= 1


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert len(complaint(text.encode("utf-8", "replace").decode()).splitlines()) <= 1


# --- transformers' own word ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_training_arguments_are_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert theirs == training_arguments.TRAINING_ARGUMENTS
    assert not theirs & training_arguments.OLDER_TRAINING_ARGUMENTS
    defaults = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    said, levers = read(), read().levers
    assert defaults["per_device_train_batch_size"] == levers.micro_batch
    assert defaults["gradient_accumulation_steps"] == levers.accumulation
    assert defaults["max_grad_norm"] == said.max_grad_norm
    assert training_arguments.OPTIMIZERS[str(defaults["optim"])] == levers.optimizer


@pytest.mark.filterwarnings("ignore")
def test_optimizers_are_transformers() -> None:
    arguments = pytest.importorskip("transformers.training_args")
    theirs = {name.value for name in arguments.OptimizerNames}
    older = {"adamw_hf", "adamw_apex_fused"}
    assert theirs == set(training_arguments.OPTIMIZERS) - older | training_arguments.UNPRICED_OPTIMIZERS
