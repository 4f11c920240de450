"""The terminal in Chinese: no sentence of ours is left in English.

A sentence is a run of four or more English words in small letters. Words in `code`, flags, paths, examples and what
stands in capitals are names, which are the same in both languages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import warm_desk
from tightfit.cli import VERBS

pytestmark = pytest.mark.thorough

NAMES = re.compile(
    r"`[^`]*`|--?[\w-]+(?:[ =][\w|+:.,-]+)?|\S*[/_.=<>|()\d]\S*|^  tightfit .*$|sudo .*$|https?:\S+", re.MULTILINE
)
ENGLISH = re.compile(r"\b[a-z]{2,}(?:,? [a-z]+){3,}\b")


def sentences_in(said: str) -> list[str]:
    """What is English in it. Lines that were wrapped are one."""
    plain = NAMES.sub("·", said)
    return list(ENGLISH.findall(re.sub(r"\s*\n\s+", " ", plain)))


def run(*words: str, cwd: Path | None = None) -> str:
    env = {**os.environ, "TIGHTFIT_LANG": "zh", "COLUMNS": "120"}
    done = warm_desk.run(*words, env=env, cwd=cwd, ranks=words[:2] == ("data", "preview"))  # which imports torch
    return done.stdout + done.stderr


def test_a_sentence_is_found() -> None:
    assert sentences_in("峰值在 backward 阶段，needs more than there is on") == ["needs more than there is on"]
    assert not sentences_in(
        "用 `tightfit plan with the same flags`，或 --max-attempts 3\n  tightfit run --allow a b c d e"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_is_chinese(verb: str) -> None:
    said = run(verb, "--help")
    assert "用法：" in said
    assert not sentences_in(said)


LOG = "step 3\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_batch_size": 7, "fp16": {"enabled": true}}'
OUTPUTS = (
    "estimate --model llama-3.1-8b --gpus 1xRTX4090",
    "estimate --model qwen2.5-7b --gpus 2x24GB --compare",
    "plan --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB",
    "plan --model qwen2.5-7b --method lora --gpus 2x24GB --tier all",
    "plan --model qwen2.5-7b --gpus 1x8GB --host-ram 16GB --effective-batch 1",
    "plan --model tiny_llama --gpus 1x24GB --max seq",
    "plan --model tiny_llama --gpus 1x24GB --write plan",
    "train --model tiny_mamba --seq 128 --max-steps 5 --dry-run",
    "train --check-memory",
    "run --dry-run -- bash train.sh",
    "run --dry-run --model tiny_llama --seq 512 --micro-batch 1 -- bash train.sh",
    "lint ds.json --world 2",
    "doctor",
    "diagnose train.log",
    "explain oom-logits",
    "explain list",
    "watch --once",
    "data preview --data shipped:dialogues --count 0",
    "checkpoints .",
    "export nowhere",
    "clean . --dry-run",
    "models",
    "models --gpus 2x24GB",
    "gpus",
    "schema --table",
    "rehearse --model tiny_llama --gpus 1x24GB",
    "ui --root nowhere",
    "completion nosuch",
)


@pytest.mark.parametrize("words", OUTPUTS)
def test_what_a_verb_says_is_chinese(words: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOG)
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    (tmp_path / "train.sh").write_text("true\n")
    said = run(*words.split(), cwd=tmp_path)
    is_chinese = bool(re.search("[\u4e00-\u9fff]", said)) and not sentences_in(said)
    assert is_chinese, sentences_in(said)
