"""The user's own LLaMA-Factory YAML, written back: only what the plan needs is changed, and each change is said."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tightfit
from tightfit.cli import main

pytestmark = pytest.mark.thorough

OFFICIAL = """### model
model_name_or_path: Qwen/Qwen2.5-7B  # the base
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target:
  - q_proj
  - v_proj

### dataset
dataset: identity,alpaca_en_demo
template: qwen
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_pin_memory: False

### output
output_dir: saves/qwen/lora/sft
logging_steps: 1
save_steps: 500
plot_loss: true
include_num_input_tokens_seen: true

### train
per_device_train_batch_size: 8
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 0
bf16: true
optim: adamw_torch
"""
ON = ("--gpus", "4xRTX4090", "--engine", "zero2", "--write", "made", "--force")
"""A search for the engine would take a second each time."""
COMPUTED = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "deepspeed", "enable_liger_kernel"),
    *("disable_gradient_checkpointing", "use_unsloth_gc"),
}
"""What a plan chooses."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("official.yaml").write_text(OFFICIAL)


def written(*words: str, file: str = "official.yaml") -> dict[str, Any]:
    assert main(["plan", file, *ON, *words]) == 0
    found = yaml.safe_load(Path("made/llamafactory.yaml").read_text())
    assert isinstance(found, dict)
    return found


def changed(found: dict[str, Any], before: str = OFFICIAL) -> set[str]:
    old = yaml.safe_load(before)
    return {key for key in {*old, *found} if old.get(key) != found.get(key)}


def test_only_what_the_plan_chooses_is_changed_and_each_change_is_said() -> None:
    found = written()
    assert changed(found) <= COMPUTED
    text = Path("made/llamafactory.yaml").read_text()
    head = [line for line in text.splitlines() if line.startswith("# tightfit: ")]
    for key in changed(found):
        assert any(f" {key} was" in line for line in head), key
    assert "# the base" in text, "comments stay"
    assert text.index("### model") < text.index("### dataset") < text.index("### train"), "and so does the order"
    batch = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]
    assert batch == 64


def test_what_was_written_is_read_and_written_again_without_a_change() -> None:
    written()
    first = Path("made/llamafactory.yaml").read_text()
    Path("again").mkdir()
    Path("again/llamafactory.yaml").write_text(first)
    Path("again/deepspeed.json").write_text(Path("made/deepspeed.json").read_text())
    found = written(file="again/llamafactory.yaml")
    assert changed(found, first) == set()
    assert Path("made/llamafactory.yaml").read_text().count("# tightfit: LLaMA-Factory") == 1


def test_a_flag_wins_and_is_said() -> None:
    found = written("--seq", "1024", "--epochs", "1", "--learning-rate", "2e-5")
    assert (found["cutoff_len"], found["num_train_epochs"], found["learning_rate"]) == (1024, 1.0, 2e-5)
    assert changed(found) <= COMPUTED | {"cutoff_len", "num_train_epochs", "learning_rate"}
    assert "cutoff_len was 2048: as you said." in Path("made/llamafactory.yaml").read_text()


def test_a_change_that_was_allowed_is_written_with_what_it_costs() -> None:
    Path("official.yaml").write_text(OFFICIAL.replace("Qwen2.5-7B", "Qwen2.5-32B"))
    found = written("--gpus", "1xRTX4090", "--host-ram", "16GB", "--allow", "quantize")
    assert found["quantization_bit"] == 4
    assert "quantization_bit was not there: " in Path("made/llamafactory.yaml").read_text()


def test_a_precision_that_deepspeed_needs_is_added() -> None:
    """Hugging Face's layer compares the two files, and refuses to start where they differ."""
    Path("official.yaml").write_text(OFFICIAL.replace("bf16: true\n", ""))
    assert written()["bf16"] is True


def test_lists_and_keys_without_a_value_are_replaced_whole() -> None:
    Path("official.yaml").write_text(OFFICIAL.replace("cutoff_len: 2048", "cutoff_len:"))
    found = written("--seq", "1024", "--lora-targets", "all")
    assert (found["cutoff_len"], found["lora_target"]) == (1024, "all")
    assert changed(found) <= COMPUTED | {"cutoff_len", "lora_target"}


def test_kernels_that_the_file_names_stay() -> None:
    Path("official.yaml").write_text(OFFICIAL + "flash_attn: fa2\nenable_liger_kernel: true\n")
    found = written()
    assert (found["flash_attn"], found["enable_liger_kernel"]) == ("fa2", True)


def test_an_optimizer_whose_copies_would_not_fit_makes_way() -> None:
    full = OFFICIAL.replace("finetuning_type: lora", "finetuning_type: full").replace("Qwen2.5-7B", "Qwen1.5-1.8B")
    Path("official.yaml").write_text(full)
    assert written("--gpus", "1x140GB")["optim"] == "adamw_torch"
    found = written("--gpus", "1x46GB", "--engine", "zero1")
    assert found["optim"] == "adamw_torch_fused"
    assert "optim was adamw_torch: adamw_torch would take" in Path("made/llamafactory.yaml").read_text()


@pytest.mark.parametrize("tier", ["deepspeed", "standard", "optimized"])
def test_a_tier_keeps_the_files_own_batch(tier: str) -> None:
    Path("official.yaml").write_text(OFFICIAL.replace("Qwen2.5-7B", "Qwen1.5-0.5B"))
    found = written("--tier", tier, "--engine", "zero3")
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 64
    assert found["cutoff_len"] == 2048


def test_our_own_worker_trains_it_as_the_file_says() -> None:
    """Where LLaMA-Factory has other defaults than we: no warm-up, a linear schedule, 5e-5, three epochs."""
    bare = OFFICIAL
    for line in ("learning_rate: 1.0e-4\n", "num_train_epochs: 3.0\n", "lr_scheduler_type: cosine\n"):
        bare = bare.replace(line, "")
    Path("official.yaml").write_text(bare)
    job = tightfit.plan("official.yaml", gpus="4xRTX4090", engine="zero2", trainer="tightfit").plan.job
    assert (job.warmup, job.schedule, job.learning_rate, job.epochs) == (0, "linear", 5e-5, 3.0)
    Path("official.yaml").write_text(bare.replace("warmup_steps: 0", "warmup_steps: 0\nwarmup_ratio: 0.1"))
    assert tightfit.plan("official.yaml", gpus="4xRTX4090", engine="zero2", trainer="tightfit").plan.job.warmup == 0.1


def test_python_writes_the_same_file() -> None:
    found = written()
    tightfit.plan("official.yaml", gpus="4xRTX4090", engine="zero2").write("python")
    assert yaml.safe_load(Path("python/llamafactory.yaml").read_text()) == found


def test_the_script_does_not_ask_for_data_of_ours() -> None:
    written()
    done = subprocess.run(["bash", "made/launch.sh"], capture_output=True, text=True, check=False)
    assert "no data" not in done.stderr
