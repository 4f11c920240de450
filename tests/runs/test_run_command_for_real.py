"""`tightfit run` with real trainers: Hugging Face's Trainer, DeepSpeed on two CPU ranks, LLaMA-Factory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import warm_desk
from ports import reserve_port

ASSETS = Path(__file__).parents[1] / "assets"
HF = ("--max_steps", "8", "--save_steps", "2", "--output_dir", "out", "--report_to", "none", "--use_cpu", "True")


def run(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = [str(path)] if path is not None else []
    env = {
        **os.environ,
        "PATH": os.pathsep.join([*places, os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
    }
    return warm_desk.run("run", *words, cwd=folder, env=env, timeout=540, ranks=True)


def attempts(folder: Path) -> list[dict[str, object]]:
    files = sorted((folder / "tightfit-run-1/attempts").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


# --- Hugging Face's Trainer ---------------------------------------------------------------------


@pytest.mark.thorough
def test_a_trainer_script_goes_on_with_smaller_micro_batches(tmp_path: Path) -> None:
    script = str(ASSETS / "hf_trainer.py")
    words = (*HF, "--per_device_train_batch_size", "8", "--oom_above", "4")
    done = run(tmp_path, "--", sys.executable, script, *words)
    assert done.returncode == 0, done.stderr
    assert "finished at step 8, batch 4" in done.stdout
    assert "it goes on from checkpoint-2" in done.stderr
    first, second = attempts(tmp_path)
    assert (first["state"], first["last_step"], first["kept_step"]) == ("failed", 3, 2)
    assert (second["state"], second["effective_batch"]) == ("done", first["effective_batch"])
    state = json.loads((tmp_path / "out/checkpoint-8/trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 8


@pytest.mark.slow
def test_a_trainer_script_that_was_ended_from_outside_goes_on(tmp_path: Path) -> None:
    script = str(ASSETS / "hf_trainer.py")
    done = run(tmp_path, "--", sys.executable, script, *HF, "--die_once", "died", "--oom_at", "5")
    assert done.returncode == 0, done.stderr
    assert "--resume_from_checkpoint out/checkpoint-4" in done.stderr
    assert [each["state"] for each in attempts(tmp_path)] == ["failed", "done"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bug_in_a_trainer_script_ends_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--", sys.executable, str(ASSETS / "hf_trainer.py"), *HF, "--bug_at", "3")
    assert done.returncode == 1
    assert "KeyError: 'labels_of_the_user'" in done.stderr
    assert len(attempts(tmp_path)) == 1


@pytest.mark.slow
def test_another_zero_stage_is_refused_where_a_checkpoint_would_be_lost(tmp_path: Path) -> None:
    """Nothing but the engine is left to change, and its checkpoint cannot be gone on from."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    script = str(ASSETS / "hf_trainer.py")
    launch = ("torchrun", "--nproc_per_node", "1", "--master_port", reserve_port())
    words = ("--per_device_train_batch_size", "1", "--gradient_checkpointing", "True", "--oom_above", "0")
    done = run(tmp_path, "--", *launch, script, *HF, *words, "--deepspeed", "ds.json")
    assert done.returncode == 1
    assert "ZeRO stage 1 → 2" in done.stderr
    assert "cannot go on from checkpoint-2 with its optimizer" in done.stderr
    assert len(attempts(tmp_path)) == 1
    assert not list(tmp_path.glob("*.tightfit-*"))


# --- DeepSpeed, two ranks -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_a_deepspeed_script_goes_on_with_its_json_changed(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    launch = ("torchrun", "--nproc_per_node", "2", "--master_port", reserve_port(), str(ASSETS / "ds_script.py"))
    done = run(tmp_path, "--", *launch, "--deepspeed_config", "ds.json", "--oom_above", "2")
    assert done.returncode == 0, done.stderr
    assert "finished: 2 steps before, micro batch 2, stage 1" in done.stdout
    made = json.loads((tmp_path / "ds.tightfit-2.json").read_text(encoding="utf-8"))
    assert made == {**config, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert json.loads((tmp_path / "ds.json").read_text(encoding="utf-8")) == config


@pytest.mark.slow
def test_a_deepspeed_script_without_checkpoints_gets_another_stage(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    launch = ("torchrun", "--nproc_per_node", "2", "--master_port", reserve_port(), str(ASSETS / "ds_script.py"))
    faults = ("--need_stage", "2", "--oom_at", "0")
    done = run(tmp_path, "--", *launch, "--deepspeed_config", "ds.json", *faults)
    assert done.returncode == 0, done.stderr
    assert "finished: 0 steps before, micro batch 1, stage 2" in done.stdout


# --- LLaMA-Factory ------------------------------------------------------------------------------

NEEDS = (
    "transformers==5.6.0",
    "accelerate==1.11.0",
    "peft==0.18.1",
    "datasets==4.0.0",
    "trl==0.24.0",
    "tyro<0.9.0",
    "omegaconf",
    "fire",
    "einops",
)
RELEASE = "llamafactory==0.9.5"
YAML = """# note 003's job with a tiny Qwen
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
template: qwen
dataset: train
dataset_dir: .
cutoff_len: 256
learning_rate: 1e-4   # the guide's
max_steps: 6
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
save_steps: 2
output_dir: saves
bf16: true
report_to: none
use_cpu: true
"""
MODEL = """
import json
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained("model")
shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=2048)).save_pretrained("model")
rows = [{"instruction": f"count to {n}", "input": "", "output": " ".join(map(str, range(n)))} for n in range(1, 40)]
Path("train.json").write_text(json.dumps(rows))
Path("dataset_info.json").write_text(json.dumps({"train": {"file_name": "train.json"}}))
"""


@pytest.fixture
def llamafactory(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with LLaMA-Factory in it; torch and what else fits is shared with ours."""
    folder = request.config.cache.mkdir("llamafactory-environment")
    python, ready = folder / "bin/python", folder / "ready"
    if ready.exists() and ready.read_text(encoding="utf-8") == sys.version:
        return python
    venv.create(folder, clear=True, with_pip=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "shared.pth").write_text(f"{next(Path(sys.prefix, 'lib').glob('python3*/site-packages'))}\n")
    (site / "torchaudio.py").write_text('"""Sound is not trained on here."""\n')
    for words in (NEEDS, ("--no-deps", RELEASE)):
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"LLaMA-Factory cannot be had: {done.stderr.strip()[-200:]}")
    ready.write_text(sys.version, encoding="utf-8")
    return python


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="LLaMA-Factory 0.9.5 needs Python 3.11")
def test_llamafactory_from_smaller_batches_to_4_bit_weights(llamafactory: Path, tmp_path: Path) -> None:
    """It runs out of memory until its weights have 4 bits: first it resumes, then the adapter alone is carried."""
    subprocess.run([str(llamafactory), "-c", MODEL], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "x.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/llamafactory-cli"
    program.write_text(f"#!{llamafactory}\n{(ASSETS / 'llamafactory_faulty.py').read_text(encoding='utf-8')}")
    program.chmod(0o755)
    words = ("--gpus", "1x24GB", "--allow", "quantize", "--", "llamafactory-cli", "train", "x.yaml")
    done = run(tmp_path, *words, path=program.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Fits: needs" in done.stderr
    tried = attempts(tmp_path)
    assert [each["state"] for each in tried] == ["failed", "failed", "done"]
    second, third = (
        yaml.safe_load((tmp_path / f"x.tightfit-{number}.yaml").read_text(encoding="utf-8")) for number in (2, 3)
    )
    assert (second["per_device_train_batch_size"], second["gradient_accumulation_steps"]) == (1, 4)
    assert second["resume_from_checkpoint"] == "saves/checkpoint-2"
    assert third["quantization_bit"] == 4
    assert (third["adapter_name_or_path"], third["max_steps"]) == ("saves/checkpoint-2", 4)
    assert "resume_from_checkpoint" not in third
    assert "Loaded adapter(s): saves/checkpoint-2" in done.stdout + done.stderr
    assert (tmp_path / third["output_dir"] / "adapter_model.safetensors").is_file()
    assert (tmp_path / "x.yaml").read_text(encoding="utf-8") == YAML
