"""Files of trainers that lint does not know are declined in one sentence, and TRL's are TrainingArguments with more."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tightfit.formats.lint import examine
from tightfit.inputs.spelling import find_slip
from tightfit.types import ConfigError

AXOLOTL = "base_model datasets sequence_len micro_batch_size num_epochs optimizer lr_scheduler output_dir learning_rate"
FOREIGN = {
    "Axolotl": AXOLOTL,
    "LLaMA-Factory v1": "model model_class dist_config train_dataset micro_batch_size cutoff_len output_dir",
    "ms-swift": "model tuner_type dataset target_modules split_dataset_ratio output_dir num_train_epochs deepspeed",
    "open-instruct": "model_name_or_path dataset_mixer with_tracking checkpointing_steps output_dir max_seq_length",
    "Megatron": "num_layers hidden_size num_attention_heads tensor_model_parallel_size train_iters micro_batch_size",
    "torchtune": "tokenizer model checkpointer loss metric_logger batch_size epochs optimizer",
}


def write(path: Path, keys: str, **values: object) -> Path:
    path.write_text(yaml.safe_dump(dict.fromkeys(keys.split(), 1) | values), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", list(FOREIGN))
def test_another_trainers_file_is_declined_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"is a config of {name}, which lint does not know"):
        examine(write(tmp_path / "x.yaml", FOREIGN[name]))


def test_a_kind_that_is_named_is_believed(tmp_path: Path) -> None:
    assert examine(write(tmp_path / "x.yaml", AXOLOTL), kind="llamafactory").kind == "llamafactory"


@pytest.mark.parametrize(
    "keys",
    ["output_dir learning_rate engine_of_mine pipeline rollout judge_model", "max_new_tokens temperature stream"],
)
def test_a_file_of_keys_that_nobody_knows_is_declined(tmp_path: Path, keys: str) -> None:
    with pytest.raises(ConfigError, match="is of no config that lint knows"):
        examine(write(tmp_path / "x.yaml", keys))


def test_a_llamafactory_file_with_another_trainers_names_is_still_one(tmp_path: Path) -> None:
    keys = "finetuning_type template base_model micro_batch_size num_epochs sequence_len dataset output_dir"
    report = examine(write(tmp_path / "x.yaml", keys, finetuning_type="lora", template="qwen"))
    fixes = {finding.place: str(finding.fix) for finding in report.findings}
    assert report.kind == "llamafactory"
    assert fixes["base_model"] == "write model_name_or_path"


def test_trls_fields_are_no_slips(tmp_path: Path) -> None:
    keys = (
        "model_name_or_path dataset_name use_peft lora_r lora_target_modules attn_implementation max_length output_dir"
    )
    report = examine(write(tmp_path / "x.yaml", keys, learning_rate="2e-5", max_lenght=1))
    assert report.kind == "huggingface"
    assert {finding.place for finding in report.findings} == {"learning_rate", "max_lenght"}


def test_what_llamafactory_hands_on_to_megatron_is_no_slip(tmp_path: Path) -> None:
    keys = "model_name_or_path stage finetuning_type dataset template do_train output_dir"
    megatron = "tensor_model_parallel_size sequence_parallel use_distributed_optimizer overlap_grad_reduce"
    values = {"stage": "sft", "finetuning_type": "full", "template": "qwen", "do_train": True}
    report = examine(write(tmp_path / "x.yaml", f"{keys} {megatron}", **values))
    assert not [finding for finding in report.findings if finding.rule in ("lf-foreign", "lf-unknown")]


@pytest.mark.parametrize(
    ("word", "known", "right"),
    [
        ("learning_rat", "learning_rate", True),
        ("per_device_train_batchsize", "per_device_train_batch_size", True),
        ("zero_optimisation", "zero_optimization", True),
        ("otuput_dir", "output_dir", True),
        ("cutoff_length", "cutoff_len", True),
        ("wandb_project", "swanlab_project", False),
        ("kernel_config", "liger_kernel_config", False),
        ("special_tokens", "add_special_tokens", False),
        ("use_qlora", "use_rslora", False),
    ],
)
def test_only_a_slip_of_the_fingers_is_corrected(word: str, known: str, right: bool) -> None:
    assert find_slip(word, [known]) == (known if right else None)
