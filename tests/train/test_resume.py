"""A run that was cut off goes on as if nothing had happened: the losses that follow are the same bits.

Two CPU ranks, the same engine and number of ranks before and after; another engine or number is test_crossing's. The
first run goes to its end and keeps a checkpoint of the middle; the second finds that one alone. Dropout is on where
adapters train, so random numbers count too. The largest batch is tried first in the second alone, and leaves nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from plain import write_examples
from running import Ran, edit, run_ranks, write_plan

pytestmark = pytest.mark.thorough

STEPS, MIDDLE = 4, 2
FULL: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "bf16",
    "seq": 64,
    "effective_batch": 4,
    "micro_batch": 1,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
}
WAYS: dict[str, dict[str, Any]] = {
    "zero0": {"engine": "zero0"},
    "zero1 fp32": {"engine": "zero1", "precision": "fp32"},
    "zero2": {"engine": "zero2"},
    "zero2 fp16": {"engine": "zero2", "precision": "fp16"},
    "zero3": {"engine": "zero3"},
    "zero3 offloaded": {"engine": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2 offloaded": {"engine": "fsdp2", "offload_param": "cpu"},
    "fsdp2 8 bits": {"engine": "fsdp2", "optimizer": "adamw8bit"},
    "zero0 adafactor fp32": {"engine": "zero0", "precision": "fp32", "optimizer": "adafactor"},
    "zero3 lora": {"engine": "zero3", "method": "lora"},
    "fsdp2 qlora": {"engine": "fsdp2", "method": "qlora"},
    "zero2 mamba": {"engine": "zero2", "model": "tiny_mamba", "seq": 32},
    "stream": {"engine": "stream", "resident": 1},
    "stream fp16": {"engine": "stream", "precision": "fp16"},
    "stream bf16 moments": {"engine": "stream", "states": "bf16"},
    "stream 8-bit moments": {"engine": "stream", "states": "8bit"},
    "stream without copies": {"engine": "stream", "master_weights": False},
    "stream lora": {"engine": "stream", "method": "lora", "resident": 2},
    "stream qlora": {"engine": "stream", "method": "qlora", "resident": 1},
}
QUICKLY = ("fsdp2", "stream")
"""What `make test` has of it."""


def cut_off(run: Path, step: int) -> None:
    """Leave the run's folder as a crash some time after that step would have."""
    shutil.rmtree(run / "model")
    (run / "events.jsonl").unlink()
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def run_well(folder: Path, *options: str) -> Ran:
    ran = run_ranks(folder, *options)
    assert ran.codes == [0] * len(ran.codes), "\n".join(ran.stderr)
    return ran


def write(folder: Path, **flags: Any) -> Path:
    data = write_examples(folder / "examples.jsonl")
    plan = write_plan(folder, 2, **{**FULL, "data": str(data), **flags})
    if flags.get("method") in ("lora", "qlora"):
        edit(plan, lora__dropout=0.1)
    return edit(plan, saving__every_steps=MIDDLE, saving__keep_last=9)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICKLY else [pytest.mark.slow]) for way in WAYS])
def test_losses_go_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    plan = write(tmp_path, **WAYS[way])
    whole = run_well(plan, "--no-probe")
    if way == "fsdp2":
        the_end_that_was_cut_off(plan, whole)
    cut_off(whole.folder, MIDDLE)
    rest = run_well(plan)
    assert rest.of("resumed")[0]["step"] == MIDDLE
    assert [each["step"] for each in rest.of("step")] == [*range(MIDDLE + 1, STEPS + 1)]
    assert rest.losses == whole.losses[MIDDLE:]
    assert whole.losses[-1] < whole.losses[0] - 0.05


def the_end_that_was_cut_off(plan: Path, whole: Ran) -> None:
    """All steps are done and saved, and only the model is missing."""
    before = (whole.folder / "model" / "model.safetensors").read_bytes()
    cut_off(whole.folder, STEPS)
    rest = run_well(plan, "--no-probe")
    assert rest.of("step") == []
    assert (rest.folder / "model" / "model.safetensors").read_bytes() == before
    cut_off(whole.folder, STEPS)
    fewer = run_ranks(edit(plan, training__max_steps=STEPS - 1))
    assert fewer.codes == [2, 2]
    assert f"is {STEPS} steps into the training, and the job ends after {STEPS - 1}" in "\n".join(fewer.stderr)
    assert not [each for each in fewer.of("progress") if each["what"] == "weights"], "said before anything is loaded"
    edit(plan, training__max_steps=STEPS)
    (whole.folder / "model").mkdir()
