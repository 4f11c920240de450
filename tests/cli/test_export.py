"""`tightfit export` as a user runs it: real adapters, real checkpoints, real folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from small_adapters import adapter_of, base_of, loaded

import warm_desk
from tightfit.cli.export import export
from tightfit.types import UserError

pytestmark = pytest.mark.thorough


def test_a_run_and_its_default_place(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    run = tmp_path / "run"
    (run / "plan").mkdir(parents=True)
    (run / "plan" / "worker.json").write_text('{"schema": 1, "levers": {"method": "qlora"}}', encoding="utf-8")
    adapter_of(run / "model", base, {"target_modules": ["q_proj"]})
    done = warm_desk.run("export", str(run), "--dtype", "bf16", ranks=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert f"the adapter, merged: {run / 'export'}" in said
    assert "the base was quantised while the adapter was trained" in said
    assert all(tensor.dtype == torch.bfloat16 for tensor in loaded(run / "export").values())


def test_a_whole_model_in_another_dtype_and_as_json(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "qwen2")
    told = json.loads(warm_desk.run("export", str(base), "--dtype", "fp16", "--json", ranks=True).stdout)
    assert (told["kind"], told["dtype"], told["folder"]) == ("model", "fp16", str(tmp_path / "base-export"))
    theirs = loaded(base)
    ours = loaded(tmp_path / "base-export")
    assert all(torch.equal(ours[name], tensor.half()) for name, tensor in theirs.items())


# --- DeepSpeed checkpoints -----------------------------------------------------------------------

TRAIN = """
import sys, json, torch, deepspeed
folder, stage, base = sys.argv[1], int(sys.argv[2]), sys.argv[3]
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(base)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
          "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
ids = torch.arange(32).unsqueeze(0)
for _ in range(2):
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
engine.save_checkpoint(folder)
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    print("SUM", sum(p.detach().double().sum().item() for p in model.parameters()))
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, float]:
    """A checkpoint of real DeepSpeed on two CPU ranks, and the sum of its weights."""
    base = base_of(tmp_path / "base", "qwen2")
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "ckpt"), str(request.param), str(base)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sums = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("SUM")]
    return tmp_path / "ckpt", sums[0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [2, pytest.param(3, marks=pytest.mark.slow)], indirect=True)
def test_a_deepspeed_checkpoint_of_another_program(tmp_path: Path, checkpoint: tuple[Path, float]) -> None:
    folder, total = checkpoint
    with pytest.raises(UserError, match=r"pickles and can run any program .* --trust-pickle"):
        export([str(folder), "--to", str(tmp_path / "out")])
    with pytest.raises(UserError, match="--config"):
        export([str(folder), "--to", str(tmp_path / "out"), "--trust-pickle"])
    words = [str(folder), "--to", str(tmp_path / "out"), "--trust-pickle", "--config", str(tmp_path / "base")]
    assert warm_desk.run("export", *words, ranks=True).returncode == 0
    state = loaded(tmp_path / "out")
    del state["lm_head.weight"]  # tied
    assert sum(tensor.double().sum().item() for tensor in state.values()) == pytest.approx(total, abs=1e-4)
    other = base_of(tmp_path / "other", "qwen2", intermediate_size=96)
    with pytest.raises(UserError, match=r"in the weights and .* in the config"):
        export([*words[:2], str(tmp_path / "out2"), "--trust-pickle", "--config", str(other)])
    assert not (tmp_path / "out2").exists()


# --- what can be wrong ---------------------------------------------------------------------------


def problem(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        export(words)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folders_that_are_nothing(tmp_path: Path) -> None:
    assert "there is no folder" in problem(str(tmp_path / "nothing"))
    assert "is no run, model, adapter or DeepSpeed checkpoint" in problem(str(tmp_path))
    (tmp_path / "plan").mkdir()
    assert "has saved no model yet" in problem(str(tmp_path))


def test_an_output_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("", encoding="utf-8")
    assert "exists and is not empty: name another folder with --to" in problem(
        str(tmp_path), "--to", str(tmp_path / "out")
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_flags_that_make_no_sense(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    assert "--dtype knows no 'int8'" in problem(str(base), "--dtype", "int8")
    assert "there is nothing to merge" in problem(str(base), "--merge")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        export(["--help"])
    assert left.value.code == 0
    assert "tightfit export runs/my-lora --to my-model" in capsys.readouterr().out


def test_a_run_that_has_not_ended_names_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=rf"has no model yet: name its newest checkpoint, {checkpoint}, or let it end"):
        export([str(tmp_path / "run"), "--to", str(tmp_path / "model")])
