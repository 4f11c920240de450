"""`tightfit plan` as a user meets it: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm_desk
from tightfit.cli import main
from tightfit.cli.plan import parser
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import read_request
from tightfit.inputs.flags import spelt
from tightfit.job import Job
from tightfit.types import ConfigError

pytestmark = pytest.mark.thorough

HEAVY = {"torch", "deepspeed", "transformers", "peft", "accelerate", "numpy"}

SMALL = ("--model", "qwen1.5-0.5b", "--gpus", "2x24GB", "--host-ram", "64GB")
HOPELESS = ("--model", "llama-3.1-8b", "--gpus", "1xRTX4090", "--host-ram", "32GB", "--effective-batch", "1")

PROMISED = {
    "fits",
    "chosen",
    "alternatives",
    "considered",
    "search_s",
    "effective_batch",
    "hours",
    "because",
    "remedies",
    "gpus_needed",
    "unproven",
    "model",
    "hardware",
}


class Shell:
    """The command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *words: str) -> str:
        code = main(["plan", *words])
        out, err = self.capsys.readouterr()
        assert code == 0, err
        assert err == ""
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))

    def estimate(self, *words: str) -> Any:
        assert main(["estimate", *words, "--json"]) == 0
        return json.loads(self.capsys.readouterr().out)

    def refused(self, *words: str) -> str:
        code = main(["plan", *words])
        out, err = self.capsys.readouterr()
        assert code == 2, out
        assert out == ""
        assert err.startswith("tightfit: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(capsys)


def process(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return warm_desk.run("plan", *words, cwd=cwd, env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"} | env)


# --- the answer ---------------------------------------------------------------------------------


def test_help_fits_the_terminal_and_shows_an_example(shell: Shell) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0
    text = shell.capsys.readouterr().out
    assert "example:\n  tightfit plan " in text
    assert max(map(len, text.splitlines())) <= 80
    assert "checkpointing" in text
    assert "compute them again (full)" not in text, "a free lever has no default here: it is chosen"


def test_the_chosen_way_is_marked_and_explained(shell: Shell) -> None:
    lines = shell.run(*SMALL).splitlines()
    assert lines[0].startswith("qwen1.5-0.5b (464M), full, bf16, on 2 × 24GB cards: 8 × 2048 tokens per step")
    assert sum(line.startswith("→ ") for line in lines) == 2, "one row, and the legend"
    assert any(line.startswith("Levers: --engine ") for line in lines)
    reasons = lines[lines.index("Because:") :]
    assert any("No --effective-batch was named: 8 sequences per step" in line for line in reasons)
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)


def test_json_has_what_was_promised(shell: Shell) -> None:
    answer = shell.json(*SMALL)
    assert set(answer) >= PROMISED
    chosen = answer["chosen"]
    assert answer["fits"] is True
    assert set(chosen) >= {"levers", "footprint", "pace", "because", "changes"}
    assert set(chosen["footprint"]) == {"gpu", "host"}
    assert set(chosen["pace"]) >= {"step_s", "tokens_per_s", "causes"}
    assert sum(chosen["pace"]["causes"].values()) == pytest.approx(chosen["pace"]["step_s"])
    assert chosen["changes"] == []
    assert chosen["levers"]["world"] <= 2
    assert answer["considered"] >= len(answer["alternatives"])


FED_BACK = {
    "full": ("--model", "qwen2.5-7b", "--gpus", "8xRTX4090", "--host-ram", "256GB"),
    "nothing fits": HOPELESS,
    "mamba": ("--model", "7b_mamba", "--gpus", "6x32GB", "--nvme", "2TB", "--host-ram", "256GB"),
    "adapters": ("--model", "gemma-3-27b", "--method", "lora", "--lora-rank", "16", "--gpus", "4x24GB"),
    "4-bit": ("--model", "qwen1.5-1.8b", "--method", "qlora", "--lora-targets", "q_proj,v_proj", "--gpus", "1x4GB"),
    "an old DeepSpeed": ("--model", "qwen2.5-32b", "--method", "lora", "--gpus", "8xK100-64GB"),
    "several nodes": ("--model", "qwen2.5-7b", "--gpus", "2x8xA100-80GB", "--precision", "fp16"),
    "pure bf16": ("--model", "llama-3.1-8b", "--gpus", "2x24GB", "--no-master-weights", "--seq", "512"),
    "fewer GPUs": ("--model", "tiny_llama", "--gpus", "4x24GB", "--world", "2"),
}


SLOW = ("adapters", "an old DeepSpeed", "a smaller model", "the largest model", "tier extreme", "tier optimized")
"""Of which there is a like below, or above."""


def ways(asked: dict[str, tuple[str, ...]]) -> list[Any]:
    return [pytest.param(words, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, words in asked.items()]


@pytest.mark.parametrize("words", ways(FED_BACK))
def test_levers_fed_back_to_estimate_give_the_same_footprint(shell: Shell, words: tuple[str, ...]) -> None:
    answer = shell.json(*words)
    hardware = [
        word for flag, value in pairwise(words) if flag in ("--gpus", "--host-ram", "--nvme") for word in (flag, value)
    ]
    ways = [answer["chosen"]] if answer["fits"] else []
    ways += [*answer["alternatives"], *answer["remedies"]]
    assert len(ways) >= 2
    for way in ways:
        levers = dict(way["levers"])
        flags = [] if levers.pop("master_weights") else ["--no-master-weights"]
        flags += [word for name, value in levers.items() for word in (spelt(name), str(value))]
        again = shell.estimate("--model", way["model"], *hardware, *flags)
        assert again["levers"] == way["levers"]
        assert {"gpu": again["gpu"], "host": again["host"]} == way["footprint"]


PRINTED = {
    "a plan": ("--model", "qwen2.5-7b", "--gpus", "8xRTX4090", "--host-ram", "256GB", "--seq", "1024"),
    "what was allowed": (
        "--model",
        "llama-3.1-8b",
        "--gpus",
        "1x12GB",
        "--host-ram",
        "32GB",
        "--effective-batch",
        "1",
        "--allow",
        "lora,quantize",
    ),
    "a smaller model": ("--model", "7b_mamba", "--gpus", "1x24GB", "--host-ram", "32GB", "--allow", "smaller-model"),
    "an old DeepSpeed": ("--model", "qwen2.5-32b", "--method", "lora", "--gpus", "8xK100-64GB"),
    "a card without bf16": ("--model", "qwen1.5-0.5b", "--gpus", "2xV100-32GB", "--no-master-weights"),
    "fewer GPUs": ("--model", "qwen1.5-0.5b", "--gpus", "4x24GB", "--world", "2"),
    "the longest sequence": ("--model", "qwen1.5-0.5b", "--gpus", "1x8GB", "--host-ram", "64GB", "--max", "seq"),
    "the largest micro batch": ("--model", "qwen1.5-0.5b", "--gpus", "1x12GB", "--max", "micro-batch"),
    "the largest model": ("--gpus", "1xRTX4090", "--host-ram", "64GB", "--method", "qlora", "--max", "model"),
    **{
        f"tier {name}": ("--model", "qwen1.5-0.5b", "--gpus", "2x12GB", "--host-ram", "64GB", "--tier", name)
        for name in ("auto", "stage3", "fp16_safe", "extreme", "optimized", "quantized")
    },
}


@pytest.mark.parametrize("words", ways(PRINTED))
def test_the_line_of_levers_given_to_estimate_prices_the_same(shell: Shell, words: tuple[str, ...]) -> None:
    answer = shell.json(*words)
    assert answer["fits"], "or this shows nothing"
    lines = shell.run(*words).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Levers: "))
    printed = " ".join(lines[first : lines.index("", first)]).removeprefix("Levers: ").split()
    machine = [
        word for flag, value in pairwise(words) if flag in ("--gpus", "--host-ram", "--model") for word in (flag, value)
    ]
    again = shell.estimate(*machine, *printed)
    assert again["model"]["name"] == answer["chosen"]["model"]
    assert again["levers"] == answer["chosen"]["levers"]
    assert {"gpu": again["gpu"], "host": again["host"]} == answer["chosen"]["footprint"]


def test_a_lever_that_is_named_is_kept(shell: Shell) -> None:
    answer = shell.json(*SMALL, "--engine", "zero3", "--micro-batch", "2", "--checkpointing", "full")
    for way in (answer["chosen"], *answer["alternatives"]):
        levers = way["levers"]
        assert (levers["engine"], levers["micro_batch"], levers["checkpointing"]) == ("zero3", 2, "full")


LEARNS = (
    *("--warmup_steps", "100", "--lr_scheduler", "linear", "--weight_decay", "0.1", "--max_grad_norm", "0.5"),
    *("--lora_alpha", "48", "--seed", "7", "--save_steps", "50", "--logging_steps", "3"),
)
"""Flags of the notes, as the notes spell them."""


def test_how_it_learns_reaches_every_file(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    for trainer in ("tightfit", "llamafactory", "trainer"):
        shell.run(*SMALL, "--method", "lora", *LEARNS, "--for", trainer, "--write", str(out / trainer))
    worker = json.loads((out / "tightfit" / "worker.json").read_text())
    expected = {"schedule": "linear", "warmup": 100.0, "weight_decay": 0.1, "clip": 0.5, "seed": 7}
    assert expected.items() <= worker["training"].items()
    assert (worker["lora"]["alpha"], worker["saving"]["every_steps"], worker["logging_steps"]) == (48.0, 50, 3)
    theirs = {
        **{"lr_scheduler_type": "linear", "warmup_steps": 100, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 7},
        **{"save_steps": 50, "logging_steps": 3},
    }
    assert theirs.items() <= json.loads((out / "trainer" / "training_args.json").read_text()).items()
    factory = yaml.safe_load((out / "llamafactory" / "llamafactory.yaml").read_text())
    assert (theirs | {"lora_alpha": 48}).items() <= factory.items()


def test_a_warm_up_is_a_count_or_a_share(shell: Shell) -> None:
    assert plan_for(*SMALL, "--warmup-ratio", "0.1").warmup == 0.1
    assert plan_for(*SMALL, "--warmup-ratio", "10%").warmup == 0.1
    assert plan_for(*SMALL, "--warmup-steps", "1").warmup == 1
    assert plan_for(*SMALL, "--warmup-steps", "0").warmup == 0
    idle = shell.run(*SMALL, "--warmup-steps", "9", "--lr-scheduler", "constant")
    assert "--warmup-steps is without effect" in " ".join(idle.split())


def plan_for(*words: str) -> Job:
    return resolve_request(read_request(vars(parser().parse(words)))).job


def test_a_file_may_be_named_with_config(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: qwen1.5-0.5b\nsequence: 512\nsaving: {every: 10m}\nhardware: {gpus: 2x24GB}")
    job = plan_for("--config", str(path), "--save-steps", "20")
    assert (job.sequence, job.saving.every_steps, job.saving.every_minutes) == (512, 20, None)
    with pytest.raises(ConfigError, match="both name the file to start from: leave one out"):
        plan_for(str(path), "--config", str(path))


def test_margin_is_a_share_or_a_percentage(shell: Shell) -> None:
    limits = [shell.json(*SMALL, "--margin", word)["chosen"]["gpu_limit_bytes"] for word in ("0.25", "25%")]
    assert limits[0] == limits[1] == 18 * 2**30


def test_hours_are_told_when_the_steps_are_known(shell: Shell) -> None:
    asked = (*SMALL, "--samples", "8000", "--epochs", "2")
    answer = shell.json(*asked)
    paced = answer["chosen"]["pace"]
    assert answer["hours"] == pytest.approx((2000 * paced["step_s"] + paced["warm_up_s"]) / 3600)
    assert "for 2,000 steps" in " ".join(shell.run(*asked).split())
    assert shell.json(*SMALL)["hours"] is None


def test_what_was_never_run_says_so(shell: Shell) -> None:
    text = " ".join(shell.run("--model", "qwen2.5-32b", "--method", "lora", "--gpus", "8xK100-64GB").split())
    assert "Never run by us: - K100:" in text
    assert "DeepSpeed 0.14.2, which Hygon's stack ships" in text
    nvme = ("--model", "7b_mamba", "--gpus", "1x24GB", "--host-ram", "64GB", "--nvme", "2TB")
    pinned = ("--engine", "zero3", "--offload-optimizer", "nvme", "--offload-param", "nvme")
    assert any("DeepSpeed's NVMe" in sentence for sentence in shell.json(*nvme, *pinned)["unproven"])


def test_states_that_stream_from_an_nvme_were_timed_once(shell: Shell) -> None:
    machine = ("--model", "tiny_llama", "--gpus", "1x24GB", "--host-ram", "64GB", "--nvme", "1GB")
    answer = shell.json(*machine, "--engine", "stream", "--offload-optimizer", "nvme")
    assert not answer["unproven"]
    assert any("timed once" in sentence and "12.2 s" in sentence for sentence in answer["because"])


def test_a_named_deepspeed_is_priced_and_the_installed_one_otherwise(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "deepspeed-0.16.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.4\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = shell.json(*SMALL)
    assert answer["chosen"]["levers"]["deepspeed_version"] == "0.16.4"
    assert any("0.16.4, which is installed here" in sentence for sentence in answer["because"])
    named = shell.json(*SMALL, "--deepspeed-version", "0.15.0")
    assert named["chosen"]["levers"]["deepspeed_version"] == "0.15.0"


def test_without_a_gpu_the_cpu_stands_in(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = shell.json("--model", "tiny_llama")
    assert answer["hardware"]["vendor"] == "cpu"
    assert answer["hardware"]["gpus_per_node"] == 2
    assert any("CPU stands in" in sentence for sentence in answer["because"])


# --- nothing fits -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_nothing_fits_is_an_answer_with_what_would(shell: Shell) -> None:
    text = " ".join(shell.run(*HOPELESS).split())
    assert "Nothing fits that keeps the training as it is." in text
    assert "--allow lora: trains adapters of rank 8 instead of every weight" in text
    answer = shell.json(*HOPELESS)
    assert answer["fits"] is False
    assert answer["chosen"] is None
    assert answer["remedies"][0]["allow"] == "lora"
    assert all(remedy["fits"] and remedy["cost"] for remedy in answer["remedies"])
    shared = (*HOPELESS, "--effective-batch", "8", "--engine", "zero3", "--checkpointing", "full")
    needed = shell.json(*shared)["gpus_needed"]
    assert shell.json(*shared, "--gpus", f"{needed}xRTX4090")["fits"]


def test_an_allowed_change_is_made_and_printed(shell: Shell) -> None:
    answer = shell.json(*HOPELESS, "--allow", "lora,smaller-model")
    assert answer["fits"]
    assert answer["chosen"]["levers"]["method"] == "lora"
    assert answer["chosen"]["changes"] == ["trains adapters of rank 8 instead of every weight"]
    text = shell.run(*HOPELESS, "--allow", "lora,smaller-model")
    assert "IT CHANGES THE TRAINING:\n  - trains adapters of rank 8" in text
    assert "--method lora" in text.partition("Levers:")[2]


# --- tiers and limits ---------------------------------------------------------------------------


def test_all_tiers_side_by_side(shell: Shell) -> None:
    asked = ("--model", "qwen1.5-1.8b", "--method", "lora", "--gpus", "1x8GB", "--host-ram", "32GB")
    tiers = {tier["tier"]: tier for tier in shell.json(*asked, "--tier", "all")["tiers"]}
    assert len(tiers) == 10
    assert tiers["minimal"]["chosen"]["levers"]["seq"] == 1024
    assert any("1024 tokens instead of 2048" in cost for cost in tiers["minimal"]["costs"])
    lines = shell.run(*asked, "--tier", "all").splitlines()
    assert all(any(line.startswith(name + " ") for line in lines) for name in tiers)
    assert max(map(len, lines)) <= 80


def test_a_tier_beside_the_free_search(shell: Shell) -> None:
    asked = ("--model", "qwen1.5-1.8b", "--method", "lora", "--gpus", "1x8GB", "--host-ram", "32GB")
    answer = shell.json(*asked, "--tier", "auto", "--seq", "512")
    assert answer["tier"] == "stage2_offload"
    assert answer["chosen"]["levers"]["seq"] == 512, "an explicit flag wins"
    assert answer["costs"] == ["an effective batch of 18"]
    assert answer["free"]["chosen"]["pace"]["tokens_per_s"] > answer["chosen"]["pace"]["tokens_per_s"]
    text = shell.run(*asked, "--tier", "stage3")
    assert "\ntier ZeRO-3 " in text
    assert "\nfree " in text
    assert "IT CHANGES THE TRAINING:\n  - sequences of 1536 tokens instead of 2048." in text
    assert text.count("sequences of 1536 tokens instead of 2048.") == 1


def test_for_llamafactory_only_what_it_can_run_is_promised(shell: Shell) -> None:
    asked = ("--model", "qwen2.5-32b", "--method", "lora", "--gpus", "8xK100-64GB", "--engine", "zero3")
    asked += ("--seq", "1024")
    assert shell.json(*asked)["chosen"]["levers"]["checkpointing"].startswith("layers:")
    answer = shell.json(*asked, "--launcher", "llamafactory")
    for way in (answer["chosen"], *answer["alternatives"]):
        assert way["levers"]["checkpointing"] in ("none", "full", "full+offload")
    assert any("every layer or none" in sentence for sentence in answer["because"])


def test_what_a_job_file_says_wins_over_a_tier_even_if_it_is_the_default(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: qwen1.5-0.5b\nsequence: 2048\nhardware: {gpus: 1x24GB}\n", encoding="utf-8")
    answer = shell.json(str(file), "--tier", "minimal")
    assert answer["chosen"]["levers"]["seq"] == 2048
    assert shell.json(str(file), "--tier", "minimal", "--seq", "256")["chosen"]["levers"]["seq"] == 256


def test_a_flag_wins_over_the_number_of_gpus_in_a_training_config(shell: Shell) -> None:
    file = str(Path(__file__).parents[1] / "data" / "config_7b_mamba.yaml")
    answer = shell.json(file, "--gpus", "8x24GB", "--host-ram", "256GB", "--engine", "zero3", "--checkpointing", "full")
    assert answer["hardware"]["gpus_per_node"] == 8
    about = [sentence for sentence in answer["because"] if "num_gpus" in sentence]
    assert about == ["--gpus wins over the job file's num_gpus of 4."]
    alike = shell.json(file, "--gpus", "4x24GB", "--host-ram", "256GB", "--engine", "zero3", "--checkpointing", "full")
    assert not [sentence for sentence in alike["because"] if "num_gpus" in sentence], "they agree"


def test_a_number_of_gpus_that_this_machine_has_not_asks_for_the_cards(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = shell.refused(str(Path(__file__).parents[1] / "data" / "config_7b_mamba.yaml"))
    assert "num_gpus in config_7b_mamba.yaml is 4, more GPUs than this machine has" in said
    assert "--gpus 4x24GB" in said


def test_a_flag_names_the_model_of_a_job_file_that_names_none(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("method: lora\nhardware: {gpus: 1x24GB}\n", encoding="utf-8")
    answer = shell.json(str(file), "--model", "qwen1.5-0.5b")
    assert answer["chosen"]["model"] == "qwen1.5-0.5b"
    assert answer["chosen"]["levers"]["method"] == "lora"
    assert shell.json(str(file), "--max", "model")["fits"]
    assert "names no model" in shell.refused(str(file))


LLAMAFACTORY = """
model_name_or_path: qwen1.5-1.8b
stage: sft
finetuning_type: lora
lora_rank: 16
lora_alpha: 64
lora_target: q_proj,v_proj
dataset: mine
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2e-4
num_train_epochs: 2.0
bf16: true
flash_attn: fa2
"""


def test_a_llamafactory_file_is_planned(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(LLAMAFACTORY, encoding="utf-8")
    out = tmp_path / "out"
    words = ("--gpus", "4x24GB", "--host-ram", "64GB", "--write", str(out), "--for", "tightfit")
    answer = shell.json(str(file), *words)
    levers = answer["chosen"]["levers"]
    assert (levers["method"], levers["seq"], levers["precision"]) == ("lora", 1024, "bf16")
    assert (levers["lora_rank"], levers["lora_targets"], levers["adapter_dtype"]) == (16, "q_proj,v_proj", "fp32")
    assert answer["effective_batch"] == 64
    said = " ".join(answer["because"])
    assert "sft.yaml does 16 sequences per step on each GPU: with 4 GPUs, 64 in all." in said
    assert "The plan chooses anew what sft.yaml says in flash_attn." in said
    assert "Left aside" not in said
    worker = json.loads((out / "worker.json").read_text(encoding="utf-8"))
    assert worker["lora"]["alpha"] == 64
    assert worker["training"]["learning_rate"] == 2e-4
    assert shell.json(str(file), "--gpus", "2x24GB", "--seq", "512")["chosen"]["levers"]["seq"] == 512
    file.write_text(LLAMAFACTORY.replace("cutoff_len", "cutof_len"), encoding="utf-8")
    assert "cutoff_len" in shell.refused(str(file), "--gpus", "4x24GB")


# --- defaults that the card decides, and what is said for nothing ---------------------------------


def test_a_card_without_bf16_computes_in_fp16_unless_told_otherwise(shell: Shell) -> None:
    asked = ("--model", "qwen1.5-0.5b", "--gpus", "2xV100-32GB")
    answer = shell.json(*asked)
    assert answer["chosen"]["levers"]["precision"] == "fp16"
    assert any("No --precision was named, and the V100" in sentence for sentence in answer["because"])
    told = shell.json(*asked, "--precision", "bf16")
    assert told["chosen"]["levers"]["precision"] == "bf16"
    assert any("--precision fp16 is what it trains in" in sentence for sentence in told["because"])
    assert shell.estimate(*asked)["levers"]["precision"] == "fp16"
    assert shell.estimate(*asked, "--precision", "bf16")["levers"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("model", "flag", "word", "lacks"),
    [("tiny_mamba", "--attention", "flash", "attention"), ("qwen1.5-0.5b", "--scan", "torch", "Mamba")],
)
def test_a_flag_about_layers_that_are_not_there(shell: Shell, model: str, flag: str, word: str, lacks: str) -> None:
    said = f"{flag} is without effect: {model} has no {lacks} layers."
    asked = ("--model", model, "--gpus", "2x24GB")
    assert said in shell.json(*asked, flag, word)["because"]
    assert said in shell.estimate(*asked, flag, word)["because"]
    assert said not in shell.json(*asked)["because"]


@pytest.mark.thorough
def test_allowed_changes_that_do_not_help_say_why(shell: Shell) -> None:
    text = " ".join(shell.run(*HOPELESS, "--allow", "quantize,8bit-optimizer").split())
    assert "Nothing fits, even with what was allowed." in text
    assert "--allow quantize is without effect: only frozen weights can have 4 bits" in text
    assert "(--allow lora,quantize)" in text
    assert "--allow 8bit-optimizer: not enough." in text
    two = " ".join(shell.run(*HOPELESS, "--allow", "shorter-seq,8bit-optimizer").split())
    assert "not enough, alone or together." in two
    unneeded = " ".join(shell.run(*SMALL, "--allow", "lora").split())
    assert "This fits as it is: none of the allowed changes was made." in unneeded


def test_slower_is_told_in_time(shell: Shell) -> None:
    text = " ".join(shell.run("--model", "qwen2.5-7b", "--gpus", "8xRTX4090", "--host-ram", "256GB").split())
    assert re.search(r"fits too and takes \d+% longer", text)
    assert "slower" not in text


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tier_that_does_not_fit_says_so(shell: Shell) -> None:
    text = shell.run("--model", "7b_mamba", "--gpus", "2x24GB", "--host-ram", "32GB", "--tier", "stage3")
    assert "The tier stage3 does not fit: it needs " in text


@pytest.mark.thorough
def test_a_tier_that_does_not_fit_names_those_that_do(shell: Shell) -> None:
    asked = ("--model", "qwen1.5-0.5b", "--gpus", "1x6GB", "--host-ram", "64GB")
    fitting = [each["tier"] for each in shell.json(*asked, "--tier", "all")["tiers"] if each["fits"]]
    assert fitting, "or this shows nothing"
    text = " ".join(shell.run(*asked, "--tier", "deepspeed").split())
    assert "The tier deepspeed does not fit" in text
    assert f"Of the other tiers {', '.join(fitting)} fit: --tier all" in text
    poor = ("--model", "qwen1.5-0.5b", "--gpus", "1x2GB", "--host-ram", "1GB", "--tier", "auto")
    assert "None of the other tiers fits either." in shell.run(*poor, "--effective-batch", "1")


def test_the_longest_sequence(shell: Shell) -> None:
    asked = ("--model", "qwen1.5-0.5b", "--gpus", "1x8GB", "--host-ram", "64GB")
    answer = shell.json(*asked, "--max", "seq")
    longest = answer["max"]["value"]
    assert answer["max"] == {"what": "seq", "value": longest}
    assert answer["chosen"]["levers"]["seq"] == longest
    assert shell.json(*asked, "--seq", str(longest))["fits"]
    assert f"The longest sequence that fits: {longest} tokens." in shell.run(*asked, "--max", "seq")


@pytest.mark.thorough
def test_the_largest_micro_batch_and_model(shell: Shell) -> None:
    answer = shell.json("--model", "qwen1.5-0.5b", "--gpus", "1x12GB", "--max", "micro_batch")
    most = answer["max"]["value"]
    assert answer["chosen"]["levers"]["micro_batch"] == most
    assert answer["effective_batch"] == most
    model = shell.json("--gpus", "1xRTX4090", "--host-ram", "64GB", "--method", "qlora", "--max", "model")
    assert model["max"]["value"] == model["chosen"]["model"]


# --- files --------------------------------------------------------------------------------------


def test_written_files_are_listed_and_lead_to_the_data(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"instruction": "a", "output": "b"}\n', encoding="utf-8")
    Path("job.yaml").write_text(
        "model: qwen2.5-7b\nmethod: lora\ndata: {path: data.jsonl}\nhardware: {gpus: 4xRTX4090, host_ram: 256GB}\n",
        encoding="utf-8",
    )
    answer = shell.json("job.yaml", "--write", "out")
    assert {Path(file).name for file in answer["files"]} == {path.name for path in Path("out").iterdir()}
    assert {p.name for p in Path("out").iterdir()} <= {"launch.sh", "PLAN.md", "worker.json", "deepspeed.json"}
    worker = json.loads(Path("out/worker.json").read_text(encoding="utf-8"))
    assert worker["data"]["path"] == str(tmp_path / "data.jsonl")
    assert worker["levers"] == {k: v for k, v in answer["chosen"]["levers"].items() if k != "world"}
    first = {path: path.read_bytes() for path in Path("out").iterdir()}
    assert "exists: say --force" in shell.refused("job.yaml", "--write", "out")
    text = shell.run("job.yaml", "--write", "out", "--force")
    assert "Start it with: tightfit train --plan out, or bash out/launch.sh" in " ".join(text.split())
    started = shell.run("job.yaml", "--write", "there", "--launcher", "llamafactory")
    assert started.endswith("\nStart it with: bash there/launch.sh\n")
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == first


def test_data_beside_the_job_file_is_found(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "data.jsonl").write_text("{}\n", encoding="utf-8")
    job = "model: qwen1.5-0.5b\ndata: {path: data.jsonl}\nhardware: {gpus: 1x24GB}\n"
    (tmp_path / "jobs" / "job.yaml").write_text(job, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shell.run("jobs/job.yaml", "--write", "out")
    worker = json.loads(Path("out/worker.json").read_text(encoding="utf-8"))
    assert worker["data"]["path"] == str(tmp_path / "jobs" / "data.jsonl")


def test_launchers_that_start_no_fsdp2_get_another_engine(shell: Shell, tmp_path: Path) -> None:
    asked = ("--model", "qwen2.5-32b", "--gpus", "8xH100-80GB", "--host-ram", "512GB", "--effective-batch", "64")
    assert shell.json(*asked)["chosen"]["levers"]["engine"] == "fsdp2", "or this shows nothing"
    out = tmp_path / "out"
    answer = shell.json(*asked, "--launcher", "llamafactory", "--write", str(out))
    assert answer["chosen"]["levers"]["engine"] != "fsdp2"
    assert answer["chosen"]["fits"]
    assert any("FSDP2 is left out: llamafactory-cli starts" in sentence for sentence in answer["because"])
    assert all(way["levers"]["engine"] != "fsdp2" for way in answer["alternatives"])
    assert "llamafactory-cli train" in (out / "launch.sh").read_text(encoding="utf-8")
    request = "No --precision was named"
    old = ("--model", "qwen1.5-0.5b", "--gpus", "4xV100-32GB", "--launcher", "deepspeed")
    assert any(sentence.startswith(request) for sentence in shell.json(*old)["because"]), "what was said before stays"
    pinned = shell.json(*asked, "--launcher", "deepspeed", "--engine", "zero3")
    assert not any("FSDP2" in sentence for sentence in pinned["because"]), "nothing was left out"


ONLY_FSDP2 = ("--model", "qwen2.5-7b", "--gpus", "8xRTX4090", "--host-ram", "20GB")
"""ZeRO-3 holds more of the host's RAM than this."""
WAY_OUT = "As it is, nothing fits that --launcher deepspeed starts: with --launcher torchrun FSDP2 "
"""And then how: in a pipeline, or not."""


@pytest.mark.slow
@pytest.mark.thorough
def test_where_only_fsdp2_fits_another_launcher_is_named(shell: Shell, tmp_path: Path) -> None:
    assert shell.json(*ONLY_FSDP2, "--launcher", "torchrun")["chosen"]["levers"]["engine"] == "fsdp2"
    answer = shell.json(*ONLY_FSDP2, "--launcher", "deepspeed")
    assert not answer["fits"]
    assert any(sentence.startswith(WAY_OUT) for sentence in answer["because"])
    assert all(way["levers"]["engine"] != "fsdp2" for way in (*answer["alternatives"], *answer["remedies"]))
    said = shell.refused(*ONLY_FSDP2, "--launcher", "deepspeed", "--write", str(tmp_path / "out"))
    assert "nothing was written: --launcher torchrun would make it fit" in said
    changed = shell.json(*ONLY_FSDP2, "--launcher", "deepspeed", "--allow", "lora")
    assert changed["chosen"]["changes"] == ["trains adapters of rank 8 instead of every weight"]
    assert changed["chosen"]["levers"]["engine"] != "fsdp2"
    assert any(sentence.startswith(WAY_OUT) for sentence in changed["because"])
    assert not any("--launcher" in sentence for sentence in shell.json(*HOPELESS)["because"])
    hopeless = shell.json(*HOPELESS, "--launcher", "deepspeed")
    assert not any("torchrun" in sentence for sentence in hopeless["because"]), "that would not help"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_most_that_fits_is_what_the_launcher_can_start(shell: Shell) -> None:
    assert shell.json(*ONLY_FSDP2, "--max", "seq")["max"]["value"] > 0
    answer = shell.json(*ONLY_FSDP2, "--max", "seq", "--launcher", "deepspeed")
    assert answer["max"]["value"] is None
    assert any(sentence.startswith(WAY_OUT) for sentence in answer["because"])
    asked = ("--method", "lora", "--gpus", "8xK100-64GB", "--launcher", "llamafactory", "--max")
    for wanted in (("seq", "--model", "qwen2.5-32b"), ("micro-batch", "--model", "qwen2.5-32b"), ("model",)):
        answer = shell.json(*asked, *wanted)
        for way in (answer["chosen"], *answer["alternatives"]):
            assert way["levers"]["checkpointing"] in ("none", "full", "full+offload")
            assert way["levers"]["engine"] != "fsdp2"
        assert any("every layer or none" in sentence for sentence in answer["because"])


def test_the_output_folder_lies_beside_the_written_files_whatever_is_here(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = "model: qwen1.5-0.5b\nhardware: {gpus: 1x24GB}\n"

    def output(text: str) -> str:
        Path("job.yaml").write_text(text, encoding="utf-8")
        shell.run("job.yaml", "--write", "out", "--force", "--for", "trainer")
        return str(json.loads(Path("out/training_args.json").read_text(encoding="utf-8"))["output_dir"])

    assert output(job) == "output"
    Path("output").mkdir()
    assert output(job) == "output"
    assert output(f"{job}saving: {{folder: {tmp_path}/runs}}\n") == f"{tmp_path}/runs"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output(f"{job}saving: {{folder: ~/runs}}\n") == f"{tmp_path}/runs"


def test_gpu_numbers_port_and_hosts_reach_the_script(shell: Shell, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=8\nsecond slots=8\n", encoding="utf-8")
    asked = ("--model", "qwen2.5-32b", "--gpus", "2x8xA100-80GB", "--launcher", "deepspeed", "--engine", "zero3")
    out = tmp_path / "out"
    shell.run(*asked, "--hostfile", str(hosts), "--port", "12345", "--write", str(out))
    script = (out / "launch.sh").read_text(encoding="utf-8")
    assert "12345" in script
    assert (out / "hostfile").read_text(encoding="utf-8").startswith("first slots=8")
    one = tmp_path / "one"
    small = ("--model", "qwen1.5-0.5b", "--gpus", "4x24GB", "--gpu-ids", "2,3", "--launcher", "torchrun")
    shell.run(*small, "--write", str(one))
    assert "CUDA_VISIBLE_DEVICES=2,3" in (one / "launch.sh").read_text(encoding="utf-8")


# --- bad input ----------------------------------------------------------------------------------

REFUSED = {
    "an unknown card": (("--gpus", "8xVoodoo2"), "--gpus"),
    "no RAM": (("--host-ram", "0GB"), "--host-ram"),
    "no unit": (("--host-ram", "0"), "--host-ram"),
    "an odd batch": (("--effective-batch", "9"), "--effective-batch 9"),
    "max seq and seq": (("--max", "seq", "--seq", "512"), "--seq"),
    "max and tier": (("--max", "seq", "--tier", "stage3"), "--tier"),
    "max batch and batch": (("--max", "micro-batch", "--effective-batch", "8"), "--effective-batch"),
    "max model and model": (("--max", "model"), "--model"),
    "max what": (("--max", "sequence"), "--max knows no"),
    "a wrong tier": (("--tier", "stage4"), "--tier knows no"),
    "a wrong allowance": (("--allow", "lora,magic"), "--allow knows no 'magic'"),
    "launcher and engine": (("--launcher", "deepspeed", "--engine", "fsdp2"), "--launcher deepspeed"),
    "a wrong launcher": (("--launcher", "mpirun"), "--launcher knows no"),
    "a huge margin": (("--margin", "95%"), "--margin"),
    "a margin in percent": (("--margin", "4"), "write 4% or 0.04"),
    "force alone": (("--force",), "--force needs --write"),
    "all tiers written": (("--tier", "all", "--write", "out"), "name one tier"),
    "too many GPUs": (("--num-gpus", "9"), "9"),
    "more than there are": (("--world", "9"), "--world 9"),
    "two numbers": (("--world", "2", "--num-gpus", "2"), "leave one out"),
    "no such GPU": (("--gpu-ids", "0,9"), "gpu_ids has 9"),
    "no port": (("--port", "99999"), "--port"),
    "no hostfile": (("--hostfile", "nowhere"), "nowhere"),
    "a wrong version": (("--transformers-version", "new"), "--transformers-version"),
    "a warm-up said twice": (("--warmup-steps", "3", "--warmup-ratio", "0.1"), "say the same thing: keep one"),
    "half a step": (("--warmup-steps", "0.5"), "--warmup-steps must be a whole number, not '0.5'"),
    "more than all steps": (("--warmup-ratio", "3"), "--warmup-ratio must be a share from 0 to below 1, not '3'"),
    "a schedule of others": (("--lr-scheduler", "cosine_with_restarts"), "; it takes cosine, linear, constant or"),
    "two rhythms": (("--allow", "lora", "--save-steps", "0"), "--save-steps must be a whole number of at least 1"),
    "alpha of nothing": (("--lora-alpha", "3"), "--lora-alpha needs --method lora or qlora"),
    "a flag for another thing": (("--early-stop-steps", "3"), "has no flag --early-stop-steps; see"),
    "a wrong flag": (("--enginge", "zero3"), "did you mean --engine?"),
    "a tier for adapters": (("--method", "full", "--tier", "quantized"), "--method lora or qlora"),
    "no folder": (("--write", "/dev/null"), "/dev/null is a file"),
    "a closed folder": (("--write", "/proc/nowhere"), "cannot write to /proc/nowhere"),
}


@pytest.mark.parametrize(("words", "names"), REFUSED.values(), ids=REFUSED)
def test_wrong_input_is_one_sentence(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert names in shell.refused("--model", "qwen1.5-0.5b", "--gpus", "8x24GB", *words)
    assert list(tmp_path.iterdir()) == []


def test_job_files_are_checked(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: qwen1.5-0.5b\nsequnce: 12\n", encoding="utf-8")
    assert "sequence" in shell.refused(str(file))
    file.write_text("sequence: 12\n", encoding="utf-8")
    assert "model" in shell.refused(str(file))
    hosts = tmp_path / "hosts"
    hosts.write_text("first eight\n", encoding="utf-8")
    assert "line 1 of the hostfile" in shell.refused(*SMALL, "--hostfile", str(hosts))


def test_what_does_not_fit_is_not_written(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = shell.refused(*HOPELESS, "--write", str(out))
    assert "nothing fits, so nothing was written: --allow lora would make it fit" in said
    assert not out.exists()


# --- real processes -----------------------------------------------------------------------------


def test_exit_codes_and_streams(tmp_path: Path) -> None:
    assert process(*HOPELESS).returncode == 0, "what does not fit is an answer too"
    done = process(*SMALL, "--gpus", "8xVoodoo2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_terminals_without_unicode() -> None:
    done = process(*SMALL, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\n> " in done.stdout
    assert "?" not in done.stdout


def test_a_plan_loads_neither_torch_nor_what_it_does_not_draw_with() -> None:
    script = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    code = main(['plan', '--model', 'qwen1.5-0.5b', '--gpus', '2x24GB', '--json'])\n"
        "assert code == 0\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & (HEAVY | {"rich", "yaml", "huggingface_hub"})


def test_a_batch_that_the_file_makes_is_named_by_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).parents[1] / "data" / "config_7b_mamba.yaml")
    assert main(["plan", file, "--gpus", "6x24GB"]) == 2
    said = capsys.readouterr().err
    assert "The 32 sequences per step of config_7b_mamba.yaml cannot be shared evenly by 6 GPUs" in said
    assert "use --effective-batch 30 or 36" in said
