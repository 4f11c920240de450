"""`tightfit run` around the launchers: `deepspeed` and `accelerate launch`, as they start ranks on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ports import reserve_port

ASSETS = Path(__file__).parents[1] / "assets"
HF = ("--max_steps", "6", "--save_steps", "2", "--output_dir", "out", "--report_to", "none", "--use_cpu", "True")
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "machine_rank": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": True,
}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tightfit", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=900)


def attempts(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "tightfit-run-1/attempts").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.slow
def test_deepspeeds_launcher_with_two_ranks_goes_on_with_its_json_changed(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    launch = ("deepspeed", "--num_gpus", "2", "--master_port", reserve_port(), str(ASSETS / "ds_script.py"))
    done = run(tmp_path, "--", *launch, "--deepspeed_config", "ds.json", "--oom_above", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "finished: 2 steps before, micro batch 2, stage 1" in done.stdout
    made = json.loads((tmp_path / "ds.tightfit-2.json").read_text(encoding="utf-8"))
    assert made == {**config, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    first, second = attempts(tmp_path)
    assert (first["cause"]["kind"], first["state"], second["state"]) == ("device-oom", "failed", "done")


@pytest.mark.slow
def test_accelerate_launch_goes_on_from_the_trainers_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(ACCELERATE), encoding="utf-8")
    launch = ("accelerate", "launch", "--config_file", "acc.yaml", str(ASSETS / "hf_trainer.py"))
    words = ("--per_device_train_batch_size", "8", "--oom_above", "4")
    done = run(tmp_path, "--", *launch, *HF, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "finished at step 6, batch 4" in done.stdout
    assert "it goes on from checkpoint-2" in done.stderr
    first, second = attempts(tmp_path)
    assert (first["kept_step"], second["state"]) == (2, "done")
    assert yaml.safe_load((tmp_path / "acc.yaml").read_text(encoding="utf-8")) == ACCELERATE


@pytest.mark.slow
def test_accelerate_launch_of_deepspeed_gets_another_stage(tmp_path: Path) -> None:
    """Two ranks of DeepSpeed from accelerate's own YAML; without a checkpoint the stage may change."""
    block = {"zero_stage": 1, "gradient_accumulation_steps": 1}
    config = {**ACCELERATE, "distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": block}
    config |= {"use_cpu": False, "main_process_port": int(reserve_port())}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    launch = ("accelerate", "launch", "--config_file", "acc.yaml", str(ASSETS / "hf_trainer.py"))
    words = ("--per_device_train_batch_size", "1", "--gradient_checkpointing", "True", "--need_stage", "2")
    done = run(tmp_path, "--", *launch, *HF, *words, "--oom_at", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "finished at step 6, batch 1" in done.stdout
    made = yaml.safe_load((tmp_path / "acc.tightfit-2.yaml").read_text(encoding="utf-8"))
    assert made["deepspeed_config"]["zero_stage"] == 2
    assert yaml.safe_load((tmp_path / "acc.yaml").read_text(encoding="utf-8")) == config
