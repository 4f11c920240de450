"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm_desk

VERBS = ("estimate", "models", "gpus")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def tightfit(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return warm_desk.run(*words, cwd=cwd, env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"} | env)


def answer(*words: str, cwd: Path | None = None) -> Any:
    done = tightfit(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def refused(*words: str, cwd: Path | None = None) -> str:
    """The one sentence that a wrong command line gets."""
    done = tightfit(*words, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tightfit: ")
    assert "Traceback" not in done.stderr
    return lines[0]


# --- help and version ---------------------------------------------------------------------------


def test_help_names_every_verb_and_an_example() -> None:
    done = tightfit("--help")
    assert done.returncode == 0
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)
    assert "example:\n  tightfit " in done.stdout
    assert tightfit().stdout == done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str) -> None:
    done = tightfit(verb, "--help")
    assert done.returncode == 0
    assert f"example:\n  tightfit {verb}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\nexit codes:\n  0" in done.stdout
    assert re.search(r"\n  2 +something that you have to change", done.stdout)


@pytest.mark.parametrize("verb", ["plan", "train", "run", "rehearse", "export", "checkpoints", "clean", "watch"])
def test_the_help_of_what_touches_files_says_which(verb: str) -> None:
    assert "\nwrites:\n  " in tightfit(verb, "--help").stdout


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_names_from_other_scripts_work_where_they_work_in_train(verb: str) -> None:
    ours = tightfit(verb, "--model", "tiny_llama", "--gpus", "1x24GB", "--seq", "256")
    theirs = tightfit(verb, "--preset", "tiny_llama", "--gpus", "1x24GB", "--max_seq_length", "256")
    assert (theirs.returncode, theirs.stdout) == (0, ours.stdout)


def test_version() -> None:
    import tightfit as package

    assert tightfit("--version").stdout.startswith(f"tightfit {package.__version__}\nPython ")


def test_the_flags_are_those_of_the_contract() -> None:
    text = tightfit("estimate", "--help").stdout
    for flag in (
        "--model --method --engine --world --seq --micro-batch --accum --precision --offload-optimizer --offload-param "
        "--checkpointing --loss --attention --optimizer --lora-rank --lora-targets --adapter-dtype --scan "
        "--reduce-bucket --allgather-bucket --prefetch-bucket --persistence-threshold --max-live-parameters "
        "--deepspeed-version --gpus --json --deepspeed --trace --host-ram --nvme --network --link --compare "
        "--no-master-weights --frozen-layers --dataloader-workers"
    ).split():
        assert f"  {flag} " in text or f"  {flag}\n" in text, flag


# --- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["plan --model 7b_mamba --nvme-path", "estimate --model", "lint", "gpus", ""])
def test_bytes_that_are_no_text(line: str) -> None:
    assert "'/n\\udcff' on the command line is not text in UTF-8" in refused(*line.split(), "/n\udcff")


@pytest.mark.thorough
def test_a_step_of_more_sequences_than_anybody_means() -> None:
    line = "estimate --model tiny_llama --micro-batch 2000 --accum 2000"
    assert "--micro-batch 2000 × --accum 2000 must be at most 1000000 sequences per step" in refused(*line.split())
    assert "--seq must be at most 16777216, not 16777217" in refused(*line.split()[:3], "--seq", "16777217")
    assert "--micro-batch 9000 × --seq 900000 must be at most 1073741824 tokens in a forward pass" in refused(
        *line.split()[:3], "--seq", "900000", "--micro-batch", "9000"
    )
    assert "--lora-rank must be at most 65536, not 1000000000" in refused(
        *line.split()[:3], "--method", "lora", "--lora-rank", "1000000000"
    )
    assert "--effective-batch must be at most 1000000" in refused(
        *"plan --model tiny_llama --gpus 1x24GB --effective-batch 50000000".split()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("estimat", "did you mean estimate?"),
        ("--model tiny_llama", "begin with a verb"),
        ("estimate", "say which model"),
        ("estimate --model tiny_lama", "tiny_llama"),
        ("estimate --model tiny_llama --micro-batch 0", "--micro-batch must be at least 1, not 0"),
        ("estimate --model tiny_llama --micro-batch two", "--micro-batch takes a whole number, not 'two'"),
        ("estimate --model tiny_llama --seq -3", "--seq must be at least 1, not -3"),
        ("estimate --model tiny_llama --seq", "--seq: expected one argument"),
        ("estimate --model tiny_llama --world 0", "--world must be at least 1, not 0"),
        ("estimate --model tiny_llama --world 9 --gpus 8x24GB", "--world 9 is more than the 8 GPUs of --gpus 8x24GB"),
        ("estimate --model tiny_llama --gpus 4xRTX4091", "RTX 4090"),
        ("estimate --model tiny_llama --host-ram 64GB", "--host-ram needs --gpus"),
        ("estimate --model tiny_llama --gpus 1x24GB --host-ram much", "not a size"),
        ("estimate --model tiny_llama --engine zero2 --offload-param cpu", "needs --engine zero3 or fsdp2"),
        ("estimate --model tiny_llama --offload-optimizer cpu", "zero1, zero2 or zero3"),
        ("estimate --model tiny_llama --engine fsdp2 --offload-optimizer cpu", "say --offload-param cpu"),
        ("estimate --model tiny_llama --engine zero2 --offload-optimizer nvme", "needs --engine zero3"),
        ("estimate --model tiny_llama --engine zero5", "did you mean zero"),
        ("estimate --model tiny_llama --lora-rank 64", "needs --method lora or qlora"),
        ("estimate --model tiny_llama --checkpointing layers:99", "more layers than the 4"),
        ("estimate --model tiny_llama --sequence 5", "has no flag --sequence: did you mean --seq?"),
        ("estimate --model tiny_llama --num_gpus=4", "has no flag --num-gpus: did you mean --world?"),
        ("estimate --model tiny_llama --offload-optimiser cpu", "did you mean --offload-optimizer?"),
        ("estimate --model tiny_llama --deepspeed nowhere.json", "nowhere.json"),
        ("estimate nowhere.yaml", "nowhere.yaml"),
        ("estimate --model tiny_llama one.yaml two.yaml", "two.yaml"),
        ("models --gpus 0x24GB", "no GPU in it"),
        ("models --frozen-layers 2", "has no flag --frozen-layers"),
        ("gpus --jason", "did you mean --json?"),
        ("gpus extra", "does not know what to do with 'extra'"),
    ],
)
def test_wrong_input_is_one_sentence(line: str, says: str) -> None:
    assert says in refused(*line.split())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA, "model_type": "lama"}, "llama"),
        ({**LLAMA, "model_type": "quite_another_thing"}, "--trace"),
        ({"model_type": "llama"}, "hidden_size"),
        ({**LLAMA, "num_hidden_layers": "two"}, "num_hidden_layers"),
        ([], "not a JSON object"),
    ],
)
def test_a_wrong_config_is_one_sentence(tmp_path: Path, config: object, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert says in refused("estimate", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"zero_optimisation": {"stage": 3}}', "zero_optimization"),
        ('{"zero_optimization": {"stage": 3, "offload_optimiser": {"device": "cpu"}}}', "offload_optimizer"),
        ('{"zero_optimization": {"stage": 7}}', "stage"),
        ('{"zero_optimization": {"stage": 3', "JSON"),
        ("\x00\x01", "JSON"),
        ("[1, 2]", "ds.json"),
    ],
)
def test_a_wrong_deepspeed_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert says in refused("estimate", "--model", "tiny_llama", "--deepspeed", "ds.json", cwd=tmp_path)


def test_a_model_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("not json")
    assert "JSON" in refused("estimate", "--model", str(tmp_path / "config.json"))


def test_two_engines_contradict(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    line = ("estimate", "--model", "tiny_llama", "--deepspeed", "ds.json", "--engine", "fsdp2")
    assert "two engines" in refused(*line, cwd=tmp_path)


# --- estimate -----------------------------------------------------------------------------------


def test_the_json_contract() -> None:
    said = answer("estimate", "--model", "tiny_llama", "--engine", "zero3", "--world", "4", "--seq", "128")
    assert said["model"].keys() == {"name", "parameters", "trainable_parameters"}
    assert said["model"]["name"] == "tiny_llama"
    assert said["model"]["parameters"] == said["model"]["trainable_parameters"] > 0
    gpu = said["gpu"]
    assert {"peak_bytes", "peak_phase", "init_peak_bytes", "required_bytes", "phases"} <= gpu.keys()
    assert gpu["peak_bytes"] == gpu["phases"][gpu["peak_phase"]]["total_bytes"]
    assert gpu["required_bytes"] >= max(gpu["peak_bytes"], gpu["init_peak_bytes"])
    for phase in gpu["phases"].values():
        assert phase["total_bytes"] == sum(phase["components"].values())
        assert all(isinstance(size, int) and size >= 0 for size in phase["components"].values())
    assert {"init", "forward", "loss", "backward", "step"} <= gpu["phases"].keys()
    assert 0 < said["host"]["peak_bytes_per_rank"] <= said["host"]["peak_bytes_per_node"]
    assert said["fits"] is None
    assert said["card"] is None
    assert all(isinstance(sentence, str) for sentence in said["because"])


@pytest.mark.thorough
@pytest.mark.parametrize(("card", "fits"), [("1x8GB", True), ("1x100MB", False)])
def test_fits_is_an_answer_where_there_is_a_card(card: str, fits: bool) -> None:
    said = answer("estimate", "--model", "tiny_llama", "--gpus", card)
    assert said["fits"] is fits
    assert said["card"]["memory_bytes"] > 0


def test_what_was_priced_is_said() -> None:
    line = "estimate --model tiny_mamba --method lora --lora_rank 4 --micro_batch=2 --reduce-bucket 5e6 --gpus 2x4x24GB"
    levers = answer(*line.split())["levers"]
    assert {"method": "lora", "lora_rank": 4, "micro_batch": 2, "world": 8}.items() <= levers.items()
    assert levers["reduce_bucket"] == 5_000_000
    assert levers["checkpointing"] == "full"


def test_the_world_may_be_smaller_than_the_machine() -> None:
    assert answer("estimate", "--model", "tiny_llama", "--gpus", "8x24GB", "--world", "2")["levers"]["world"] == 2


def test_a_deepspeed_file_sets_the_levers_and_a_flag_wins(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    line = ("estimate", "--model", "tiny_llama", "--deepspeed", "ds.json", "--offload-param", "cpu")
    levers = answer(*line, cwd=tmp_path)["levers"]
    assert levers["engine"] == "zero3"
    assert (levers["offload_optimizer"], levers["offload_param"]) == ("cpu", "cpu")
    assert levers["reduce_bucket"] == 1000


def test_a_llamafactory_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "train.yaml").write_text(
        f"model_name_or_path: {tmp_path}\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 16\n"
        "lora_target: all\ncutoff_len: 512\nper_device_train_batch_size: 2\nbf16: true\n"
    )
    levers = answer("estimate", str(tmp_path / "train.yaml"), "--seq", "256")["levers"]
    assert {"method": "lora", "lora_rank": 16, "seq": 256, "micro_batch": 2}.items() <= levers.items()


@pytest.mark.thorough
def test_a_job_file_is_priced_as_it_stands(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: tiny_llama\nmethod: lora\nlora: {rank: 4}\nsequence: 512\neffective_batch: 16\n"
        "hardware: {gpus: 4x24GB}\nlevers: {engine: zero2, micro_batch: 2}\n"
    )
    found = answer("estimate", str(job))
    pinned = {"method": "lora", "lora_rank": 4, "seq": 512, "engine": "zero2", "micro_batch": 2, "accum": 2, "world": 4}
    assert pinned.items() <= found["levers"].items()
    assert found["fits"] is True
    over = answer("estimate", str(job), "--seq", "256", "--world", "2", "--engine", "zero3")["levers"]
    assert (over["seq"], over["world"], over["engine"], over["accum"]) == (256, 2, "zero3", 4), "flags win"
    job.write_text("sequence: 512\nmethod: full\n")
    assert answer("estimate", str(job), "--model", "tiny_llama")["levers"]["seq"] == 512
    assert "names no model" in refused("estimate", str(job))


@pytest.mark.thorough
def test_a_job_file_without_an_engine_is_priced_as_it_would_be_trained(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: 7b_mamba\nsequence: 1024\nhardware: {gpus: 6x32GB, host_ram: 256GB}\n")
    found, planned = answer("estimate", str(job)), answer("plan", str(job))
    assert found["fits"] is True
    assert found["levers"] == planned["chosen"]["levers"]
    assert "No engine is named in job.yaml: priced is what `tightfit train` would choose." in found["because"]
    job.write_text(f"{job.read_text()}tier: stage3\n")
    assert answer("estimate", str(job))["levers"]["engine"] == "zero3"


@pytest.mark.thorough
def test_a_training_config_is_priced_too() -> None:
    found = answer("estimate", str(Path(__file__).parents[1] / "data" / "config_7b_mamba.yaml"), "--engine", "zero3")
    assert {"seq": 4096, "micro_batch": 1, "accum": 8, "world": 4, "engine": "zero3"}.items() <= found["levers"].items()
    assert found["model"]["parameters"] == pytest.approx(6.9e9, rel=0.01)
    assert "An effective batch of 32 on 4 GPUs: priced as 1 × 8 on each." in found["because"]


def test_qlora_under_zero3_is_priced() -> None:
    said = answer("estimate", "--model", "tiny_llama", "--method", "qlora", "--engine", "zero3", "--world", "2")
    assert said["model"]["trainable_parameters"] < said["model"]["parameters"]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["tiny_llama", "7b_mamba", "gemma-3-27b"])
@pytest.mark.parametrize("more", [(), ("--gpus", "6x32GB"), ("--gpus", "1xRTX4090"), ("--compare", "--gpus", "2x8GB")])
def test_80_columns(model: str, more: tuple[str, ...]) -> None:
    done = tightfit("estimate", "--model", model, *more)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


@pytest.mark.thorough
def test_the_picture_has_a_verdict_and_advice() -> None:
    text = tightfit("estimate", "--model", "qwen2.5-7b", "--engine", "zero2", "--gpus", "4xRTX4090").stdout
    assert "Does not fit: needs " in text
    assert "The largest parts, and what would shrink them:" in text
    assert "Host RAM: " in text
    assert "Start-up: " in text


@pytest.mark.thorough
def test_a_terminal_that_knows_no_unicode_still_gets_an_answer() -> None:
    done = tightfit("estimate", "--model", "tiny_llama", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_compare_sets_the_strategies_side_by_side() -> None:
    line = ("estimate", "--model", "llama-3.1-8b", "--gpus", "8x24GB", "--compare")
    strategies = answer(*line)["strategies"]
    priced = [row for row in strategies if "engine" in row]
    assert [(row["engine"], row["offload_optimizer"], row["offload_param"]) for row in priced] == [
        ("zero0", "none", "none"),
        ("zero1", "none", "none"),
        ("zero2", "none", "none"),
        ("zero3", "none", "none"),
        ("zero2", "cpu", "none"),
        ("zero3", "cpu", "none"),
        ("zero3", "cpu", "cpu"),
        ("fsdp2", "none", "none"),
        ("fsdp2", "cpu", "cpu"),
        ("stream", "none", "none"),
    ]
    assert priced[0]["peak_bytes"] > priced[1]["peak_bytes"] > priced[3]["peak_bytes"]


# --- models and gpus ----------------------------------------------------------------------------


def test_models_lists_every_preset_with_its_true_size() -> None:
    rows = {row["name"]: row for row in answer("models")["models"]}
    assert rows["qwen2.5-7b"]["parameters"] == 7_615_616_512
    text = tightfit("models").stdout
    assert all(name in text for name in rows)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.thorough
def test_models_with_cards_prices_every_preset() -> None:
    line = ("models", "--gpus", "6x32GB", "--seq", "2048")
    rows = {row["name"]: row for row in answer(*line)["models"]}
    assert rows["tiny_llama"]["fits"] is True
    assert rows["qwen2.5-32b"]["fits"] is False
    parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    for row in rows.values():
        assert all(row[part] > 0 for part in parts)
        assert max(row[part] for part in parts) <= row["peak_bytes"] <= row["required_bytes"]
        assert row["strategy"] == "ZeRO-3"
    text = tightfit(*line).stdout
    assert max(map(len, text.splitlines())) <= 80


def test_models_on_one_gpu_are_unsharded() -> None:
    assert {row["strategy"] for row in answer("models", "--gpus", "1xA100-80GB")["models"]} == {"unsharded"}


@pytest.mark.thorough
def test_gpus_lists_the_catalogue() -> None:
    rows = answer("gpus")["gpus"]
    assert {"RTX 4090", "L4"} <= {row["name"] for row in rows}
    done = tightfit("gpus")
    assert "RTX 4090" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.thorough
def test_a_reader_that_leaves_early_is_no_error() -> None:
    shell = f"{sys.executable} -m tightfit gpus | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_this_machine_can_be_named() -> None:
    found = json.loads(tightfit("estimate", "--model", "tiny_llama", "--gpus", "this", "--json").stdout)
    assert found["fits"] is True
    assert found["card"]


# --- advice -------------------------------------------------------------------------------------

SITUATIONS = (
    "--model qwen2.5-7b --gpus 8x24GB",
    "--model qwen2.5-7b --gpus 8x24GB --micro-batch 4 --checkpointing none",
    "--model qwen1.5-0.5b --method lora --gpus 1xRTX3050Laptop-4GB",
    "--model qwen1.5-0.5b --engine zero2 --gpus 4x24GB",
    "--model 7b_mamba --engine zero3 --gpus 4x24GB --scan torch",
    "--model qwen2.5-7b --method qlora --engine fsdp2 --gpus 4x24GB",
)


@pytest.mark.thorough
@pytest.mark.parametrize("line", SITUATIONS)
def test_advice_that_is_free_helps_when_it_is_followed(line: str) -> None:
    """Every flag that is advised without a warning lowers what is needed."""
    words = line.split()
    before = json.loads(tightfit("estimate", *words, "--json").stdout)["gpu"]["required_bytes"]
    text = tightfit("estimate", *words).stdout
    advice = text.partition("what would shrink them:")[2].partition("Because:")[0].replace("\n    ", " ")
    for sentence in advice.strip().split("\n  - "):
        flags = re.findall(r"--[a-z-]+ [a-z0-9+:]+", sentence)
        if not flags or "changes the training" in sentence:
            continue
        pulled = [word for flag in flags for word in flag.split()]
        names = {flag.split()[0] for flag in flags}
        kept = [word for i, word in enumerate(words) if word not in names and (i == 0 or words[i - 1] not in names)]
        after = json.loads(tightfit("estimate", *kept, *pulled, "--json").stdout)["gpu"]["required_bytes"]
        assert after < before, sentence


@pytest.mark.thorough
def test_what_does_not_fit_is_told_what_would() -> None:
    text = tightfit("estimate", "--model", "qwen2.5-7b", "--gpus", "8x24GB").stdout
    assert "The same training would fit as:" in text
    assert "--engine zero3" in text
    small = tightfit("estimate", "--model", "qwen1.5-0.5b", "--method", "lora", "--gpus", "1x4GB").stdout
    assert "--engine zero0 --loss fused" in " ".join(small.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--model tiny_llama --gpus 2x24GB", "No --engine was named"),
        ("--model tiny_llama --gpus 1xT4", "has no bf16 of its own"),
        (
            "--model tiny_llama --engine zero3 --offload-optimizer nvme --gpus 2x24GB",
            "DeepSpeed's NVMe offload was run on CPU ranks",
        ),
        (
            "--model tiny_llama --engine stream --offload-optimizer nvme --gpus 1x24GB",
            "was timed once, with a 3B model",
        ),
    ],
)
def test_choices_carry_their_because(line: str, says: str) -> None:
    found = json.loads(tightfit("estimate", *line.split(), "--json").stdout)
    assert any(says in sentence for sentence in found["because"])


def test_a_disk_too_small_for_the_swap_files() -> None:
    line = "--model qwen2.5-7b --engine zero3 --offload-optimizer nvme --nvme 1GB --gpus 8x24GB"
    found = json.loads(tightfit("estimate", *line.split(), "--json").stdout)
    assert found["fits"] is False
    assert found["host"]["nvme_bytes_per_node"] == pytest.approx(16 * found["model"]["parameters"], rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_full_disk_is_no_bug(buffering: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, *buffering, "-m", "tightfit", "gpus"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == "tightfit: the output could not be written: the disk is full"


FULL = """
import errno, os, sys
from pathlib import Path
from tightfit.cli import estimate, main
from tightfit.owned import replace_file

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

os.write = full
estimate.gpus = full if sys.argv[1] == "unnamed" else lambda _: replace_file(Path(sys.argv[1]), b"x")
sys.exit(main(["gpus"]))
"""


@pytest.mark.thorough
def test_a_full_disk_under_another_file_is_not_the_outputs(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    named, unnamed = (
        subprocess.run([sys.executable, "-c", FULL, word], check=False, capture_output=True, text=True)
        for word in (str(file), "unnamed")
    )
    assert named.returncode == 2
    assert named.stderr == f"tightfit: {file} could not be written: the disk is full\n"
    assert unnamed.returncode == 1
    assert unnamed.stderr.endswith("OSError: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("columns", ["0", "1", "40", "200"])
def test_any_width_of_terminal(columns: str) -> None:
    done = tightfit("estimate", "--model", "tiny_llama", "--gpus", "1x24GB", COLUMNS=columns)
    assert done.returncode == 0
    assert "Fits" in done.stdout


@pytest.mark.thorough
def test_a_terminal_without_our_characters() -> None:
    line = ("estimate", "--model", "tiny_llama", "--engine", "zero3", "--gpus", "2x24GB")
    done = tightfit(*line, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "?" not in done.stdout
    assert "2 x 24GB card" in done.stdout
