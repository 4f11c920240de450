"""Every command of the README is one that works: run, in its order, in a folder with a small job."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import warm_desk

sys.path.insert(0, str(Path(__file__).parent))

from test_docs import README, mentioned

pytestmark = pytest.mark.thorough

JOB = """model: tiny_mamba
data: {path: "shipped:text"}
sequence: 64
precision: fp32
effective_batch: 8
max_steps: 4
saving: {every_steps: 2}
"""
LLAMAFACTORY = """model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
do_train: true
finetuning_type: lora
dataset: mine
template: qwen
cutoff_len: 256
output_dir: saves
bf16: true
"""
ENDS = {f"tightfit {verb}": "--help" for verb in ("ui", "train", "run", "measure")} | {"tightfit watch": "--once"}
"""Verbs that were only named, with the flag that lets them end."""
TORCH = ("tightfit train", "tightfit export")
"""Verbs whose work is done by processes that load torch."""
NEEDS_A_GPU = {"tightfit rehearse": "GPU"}
"""Commands that a machine without GPUs answers with a sentence, and a word of it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    (tmp_path / "x.yaml").write_text(LLAMAFACTORY, encoding="utf-8")
    trainer = tmp_path / "bin" / "llamafactory-cli"
    trainer.parent.mkdir()
    trainer.write_text(f"#!{sys.executable}\nprint('trained')\n", encoding="utf-8")
    trainer.chmod(0o755)
    return tmp_path


def test_its_commands_in_its_order(folder: Path) -> None:
    surroundings = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    commands = mentioned(README.read_text(encoding="utf-8"))
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(command)[1:]
        begins = " ".join(["tightfit", *words[:1]])
        if len(words) == 1 and begins in ENDS:
            words.append(ENDS[begins])
        done = warm_desk.run(*words, cwd=folder, env=surroundings, ranks=begins in TORCH)
        if begins in NEEDS_A_GPU and done.returncode == 2:
            assert NEEDS_A_GPU[begins] in done.stderr, command
            continue
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert (folder / "plans/first/worker.json").exists()
    assert json.loads((folder / "output/run.json").read_text(encoding="utf-8"))["state"] == "done"
    assert (folder / "model/model.safetensors").exists()
