"""The worker as a process: what it refuses, what it proves, what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import Ran, edit, run_ranks, write_plan
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import warm_desk

pytestmark = pytest.mark.thorough

SMALL = {"model": "tiny_llama", "seq": 64, "effective_batch": 4, "max_steps": 2, "data": "shipped:text"}


def test_a_plan_for_two_ranks_is_not_started_alone(tmp_path: Path) -> None:
    folder = write_plan(tmp_path, 2, **SMALL, engine="zero2")
    worker = warm_desk.Process(str(folder / "worker.json"), worker=True)
    _, said = worker.communicate()
    worker.kill()
    assert (worker.returncode, said.count("\n")) == (2, 1), said
    assert "2 ranks and this is a single process" in said
    assert "tightfit train --plan" in said


def test_an_unknown_schema_is_one_sentence(tmp_path: Path) -> None:
    folder = edit(write_plan(tmp_path, 1, **SMALL, engine="zero1"), schema=99)
    done = run_ranks(folder)
    assert (done.codes, done.stderr[0].count("\n")) == ([2], 1)
    assert "schema 99" in done.stderr[0]


def test_bad_data_is_said_once_and_every_rank_leaves(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"text": "one"}\n' * 16 + "{nothing\n")
    ran = run_ranks(write_plan(tmp_path, 2, **{**SMALL, "data": str(data)}, engine="fsdp2"))
    assert ran.codes == [2, 2]
    said = "".join(ran.stderr)
    assert said.count("tightfit:") == 1, said
    assert "line 17" in said
    record = json.loads((tmp_path / "run" / "errors" / "rank-0.json").read_text())
    assert record["kind"] == "user"
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero2", "fsdp2"))]
)
def test_a_training_proves_its_plan_and_leaves_the_model(tmp_path: Path, engine: str) -> None:
    flags = {**SMALL, "engine": engine, "precision": "fp32", "checkpointing": "layers:3", "micro_batch": 1}
    ran = run_ranks(edit(write_plan(tmp_path, 2, **flags), evaluation__split=0.02), draws=True)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    every_claim_of_the_plan_is_proved(ran, engine)
    the_saved_folder_is_the_trained_model(ran)
    a_checkpoint_is_a_hugging_face_folder(ran)


def every_claim_of_the_plan_is_proved(ran: Ran, engine: str) -> None:
    proofs = {each["name"]: each for each in ran.of("proof")}
    shards = set() if engine == "zero2" else {"weights"}
    assert set(proofs) == {"world", "parameters", "precision", "optimizer", "checkpointing"} | shards
    assert all(each["ok"] for each in proofs.values())
    assert "3 of 3 layers" in proofs["checkpointing"]["text"]
    assert [each["milestone"] for each in ran.of("memory")] == ["init", "forward", "backward", "step"]
    assert [each["step"] for each in ran.of("step")] == [1, 2]
    drawn = [Path(name) for each in ran.of("pictures") for name in each["files"]]
    assert [path.name for path in drawn] == ["loss.png", "memory.png"]
    assert all(path.is_file() for path in drawn)
    last = ran.events[-1]
    assert (last["event"], last["reason"]) == ("end", "finished")
    for name in ("loss", "grad_norm", "tokens_per_s", "step_s", "seconds_left", "epoch", "memory"):
        assert ran.of("step")[0][name] is not None


def the_saved_folder_is_the_trained_model(ran: Ran) -> None:
    """Plain transformers loads it, on the same words it gives the last evaluation's loss, and it speaks."""
    model = AutoModelForCausalLM.from_pretrained(ran.folder / "model", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(ran.folder / "model")
    assert sum(p.numel() for p in model.parameters()) == 853_120
    assert model.dtype == torch.float32
    asked = tokenizer("Once", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=4, do_sample=False).shape[1] > asked["input_ids"].shape[1]
    assert ran.of("eval")[-1]["loss"] == pytest.approx(ran.losses[-1], abs=0.5)
    saved = load_file(ran.folder / "model" / "model.safetensors")
    assert "lm_head.weight" not in saved, "a tied head is stored once"


def a_checkpoint_is_a_hugging_face_folder(ran: Ran) -> None:
    """As it lies, it loads with plain transformers and gives the logits of the model that was saved at the end."""
    last, ids = ran.folder / "checkpoints" / "step-00000002", torch.arange(24).view(1, -1)
    loaded = [AutoModelForCausalLM.from_pretrained(each, dtype="auto") for each in (last, ran.folder / "model")]
    assert torch.equal(*(model(ids).logits for model in loaded))
    assert AutoTokenizer.from_pretrained(last).encode("a word")


def test_a_plan_that_is_not_what_runs_is_refused(tmp_path: Path) -> None:
    """The DeepSpeed file says another stage than the plan: the proof fails, and nothing trains."""
    folder = write_plan(tmp_path, 2, **SMALL, engine="zero2")
    config = json.loads((folder / "deepspeed.json").read_text())
    config["zero_optimization"]["stage"] = 0
    (folder / "deepspeed.json").write_text(json.dumps(config))
    ran = run_ranks(folder)
    assert all(ran.codes)
    assert "optimizer is sharded" in "".join(ran.stderr)
    assert not ran.of("step")


UNCAST = "from tightfit.train import build\nbuild.cast_meta = lambda *_: None"


@pytest.mark.parametrize(
    ("engine", "planned"),
    [
        ("zero3", "fp32"),
        pytest.param("zero1", "fp32", marks=pytest.mark.slow),
        pytest.param("fsdp2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_another_precision_than_planned_is_refused(tmp_path: Path, engine: str, planned: str) -> None:
    """DeepSpeed's file says another than the plan, or FSDP2 is given a model that rests in 16 bits."""
    folder = write_plan(tmp_path, 2, **{**SMALL, "precision": planned}, engine=engine)
    if engine != "fsdp2":
        config = json.loads((folder / "deepspeed.json").read_text())
        config["bf16"]["enabled"] = True
        (folder / "deepspeed.json").write_text(json.dumps(config))
    ran = run_ranks(folder, first=UNCAST if engine == "fsdp2" else "")
    assert all(ran.codes)
    assert "trained weights rest in bf16 (plan: fp32)" in ran.stderr[0]
    assert not ran.of("step")


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero0", "zero2", "fsdp2"))]
)
def test_fp32_is_fp32_on_a_processor_without_fp16(tmp_path: Path, engine: str) -> None:
    """`zero.Init` would build a model in bf16 there, whatever dtype it is given."""
    ran = run_ranks(write_plan(tmp_path, 2, **SMALL, engine=engine, precision="fp32"), "--no-probe", fp16=False)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    proved = next(each for each in ran.of("proof") if each["name"] == "precision")
    assert proved["text"] == "trained weights rest in fp32 (plan: fp32), the optimizer works in fp32 (plan: fp32)"


WIDE_NORM = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
made = LlamaRMSNorm.__init__
def make(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.weight = nn.Parameter(self.weight.double())
LlamaRMSNorm.__init__ = make
"""


@pytest.mark.parametrize("engine", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_a_weight_of_another_precision_is_repaired_and_named(tmp_path: Path, engine: str) -> None:
    ran = run_ranks(write_plan(tmp_path, 2, **SMALL, engine=engine), "--no-probe", first=WIDE_NORM)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    said = [each["text"] for each in ran.of("warning")]
    assert "dtype repaired: model.norm.weight was float64 and is bfloat16" in said
    proved = next(each for each in ran.of("proof") if each["name"] == "precision")
    assert proved["text"] == "trained weights rest in bf16 (plan: bf16), the optimizer works in fp32 (plan: fp32)"


def test_an_adapter_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    from peft import PeftModel

    base = tmp_path / "base"
    made = run_ranks(write_plan(tmp_path / "full", 1, **{**SMALL, "max_steps": 1}, engine="zero1"), "--no-probe")
    (made.folder / "model").rename(base)
    flags = {**SMALL, "model": str(base), "method": "lora", "engine": "zero3", "precision": "fp32"}
    ran = run_ranks(write_plan(tmp_path / "lora", 2, **flags))
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ran.folder / "model")
    changed = [name for name, value in tuned.named_parameters() if "lora_B" in name and value.abs().max() > 0]
    assert changed, "the adapter has learnt nothing"
    config = json.loads((ran.folder / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    last = ran.folder / "checkpoints" / "step-00000002"
    assert (last / "adapter_config.json").exists()
    assert not (last / "model.safetensors").exists()
    saved, model = (folder / "adapter_model.safetensors" for folder in (last, ran.folder / "model"))
    assert saved.read_bytes() == model.read_bytes()


def test_a_finished_run_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    done = run_ranks(write_plan(tmp_path, 1, **SMALL, engine="fsdp2"))
    assert (done.codes, done.stderr[0].count("\n")) == ([2], 1)
    assert "holds a finished run" in done.stderr[0]


def test_the_time_limit_stops_and_saves(tmp_path: Path) -> None:
    folder = edit(write_plan(tmp_path, 1, **{**SMALL, "max_steps": 5000}, engine="fsdp2"), timeout_s=1)
    ran = run_ranks(folder)
    assert ran.codes == [4], ran.stderr
    assert ran.events[-1]["reason"] == "timeout"
    done = len(ran.of("step"))
    assert 0 < done < 5000
    assert (ran.folder / "checkpoints" / f"step-{done:08d}" / "model.safetensors").exists()
    assert not (ran.folder / "model").exists()


@pytest.mark.parametrize("engine", [pytest.param("zero2", marks=pytest.mark.slow), "fsdp2"])
def test_a_rehearsal_is_one_process_that_poses_as_many(tmp_path: Path, engine: str) -> None:
    folder = write_plan(tmp_path, 4, **SMALL, engine=engine)
    ran = run_ranks(folder, "--rehearse", "--steps", "2", world=1)
    assert ran.codes == [0], ran.stderr
    share = next(each["text"] for each in ran.of("proof") if each["name"] == "optimizer")
    assert "(25%)" in share
    assert len(ran.of("step")) == 2
    assert not (ran.folder / "model").exists()
