"""`tightfit train` as a user meets it, with a stand-in for the worker: what it says, leaves behind and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import patience

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from train_shell import TINY, Shell, desk, shell, told

from tightfit.cli import main

pytestmark = pytest.mark.thorough

__all__ = ["shell"]

# --- a run that goes well -----------------------------------------------------------------------


def test_a_run_from_plan_to_model(shell: Shell) -> None:
    out = shell.run("good", *TINY, "--output", "runs/first")
    folder = shell.folder / "runs/first"
    for piece in (
        "tiny_mamba (532k), full, bf16, on 2 × CPU",
        "Because:",
        "The selective scan is our own (--scan tightfit)",
        "✓ two ranks started by tightfit",
        "✗ the engine is another",
        "memory, first backward: 1.25 GiB (planned 1.00 GiB)",
        "step 1/6  loss 4.9000  1,001 tokens/s  5 s left  memory 1.00 GiB now, 3.00 GiB peak",
        "scale 4,096",
        "evaluation at step 6: loss 4.0000, perplexity 54.6",
        "! something to know",
        "surprise: about a newer worker",
        "Trained tiny_mamba for 6 steps: loss 4.9000 → 4.4000.",
        "predicted",
        f"The model is in {folder}/model",
    ):
        assert piece in " ".join(out.split()) or piece in out, piece
    assert sorted(os.listdir(folder)) == ["attempts", "events.jsonl", "logs", "model", "plan", "run.json"]
    assert sorted(os.listdir(folder / "logs")) == ["rank-0.log", "rank-1.log"]
    assert json.loads((folder / "plan/worker.json").read_text())["saving"]["folder"] == str(folder)
    record = json.loads((folder / "run.json").read_text())
    assert (record["state"], record["exit_code"], record["pid"]) == ("done", 0, os.getpid())
    assert record["command"][:3] == ["tightfit", "train", "--model"]
    assert not list((shell.folder.parent / "cache").rglob("reservations/*.json"))


def test_steps_in_a_pipe_are_few(shell: Shell) -> None:
    out = shell.run("good", *TINY)
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("step ")] == ["step 1/6", "step 6/6"]


def test_json_is_the_summary_alone(shell: Shell) -> None:
    told = json.loads(shell.run("good", *TINY, "--json"))
    assert told["state"] == "done"
    assert told["steps"] == 6
    assert told["loss"] == {"first": 4.9, "last": 4.4}
    assert told["memory"]["peak_bytes"] == 3 * 2**30
    assert [each["milestone"] for each in told["memory"]["milestones"]] == ["init", "forward", "backward", "step"]
    assert told["pace"]["step_s"] == 0.5
    assert told["summary"] == {"steps": 6, "more": None}
    assert told["model"] == str(shell.folder / "output/model")


def test_what_ranks_are_told(shell: Shell) -> None:
    shell.run("options", *TINY, "--no-probe", "--tensorboard")
    first, second = (told(shell.folder / "output", rank) for rank in (0, 1))
    assert first["arguments"] == ["--no-probe", "--tensorboard", "--resume", "auto"]
    assert first["cwd"] == str(shell.folder / "output/plan")
    assert (first["told"]["RANK"], second["told"]["RANK"], second["told"]["LOCAL_RANK"]) == ("0", "1", "1")
    assert first["told"]["WORLD_SIZE"] == first["told"]["LOCAL_WORLD_SIZE"] == "2"
    assert first["told"]["MASTER_ADDR"] == "127.0.0.1"
    assert first["told"]["MASTER_PORT"] == second["told"]["MASTER_PORT"]
    assert first["told"]["TIGHTFIT_LAUNCHER"] == "tightfit"
    assert first["told"]["TOKENIZERS_PARALLELISM"] == "false"
    assert int(first["told"]["OMP_NUM_THREADS"]) >= 1


def test_a_plan_that_was_written_before(shell: Shell) -> None:
    assert main(["plan", *TINY, "--scan", "torch", "--write", "planned"]) == 0
    out = shell.run("options", "--plan", "planned", "--output", "elsewhere")
    assert "The plan is the one in" in out
    assert told(shell.folder / "elsewhere")["told"]["WORLD_SIZE"] == "2"
    shell.run("good", "--plan", "planned")
    assert (shell.folder / "planned/output/model").is_dir()


def test_a_job_file_and_the_notes_spellings(shell: Shell) -> None:
    Path("job.yaml").write_text("model: tiny_llama\nsequence: 32\nmax_steps: 6\nsaving:\n  folder: from_file\n")
    shell.run("good", "job.yaml")
    assert (shell.folder / "from_file/model").is_dir()
    shell.run("options", "--preset", "tiny_mamba", "--max_seq_length", "64", "--output_dir", "o", "--num_gpus", "1")
    worker = json.loads((shell.folder / "o/plan/worker.json").read_text())
    assert (worker["levers"]["seq"], worker["world"]["ranks"]) == (64, 1)
    assert worker["model"]["name"] == "tiny_mamba"


def test_a_deepspeed_file_pins_what_it_says(shell: Shell) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    Path("ds.json").write_text(json.dumps(config))
    shell.run("good", *TINY, "--deepspeed_config", "ds.json", "--json")
    levers = json.loads((shell.folder / "output/plan/worker.json").read_text())["levers"]
    wanted = ("zero2", "cpu", 2, 3, 1000000)
    names = ("engine", "offload_optimizer", "micro_batch", "accum", "reduce_bucket")
    assert tuple(levers[name] for name in names) == wanted
    shell.run("good", *TINY, "--deepspeed_config", "ds.json", "--micro-batch", "1", "--output", "b", "--json")
    assert json.loads((shell.folder / "b/plan/worker.json").read_text())["levers"]["micro_batch"] == 1


def test_levers_can_be_pinned_and_gpus_bounded(shell: Shell) -> None:
    shell.run("good", *TINY, "--engine", "zero3", "--max-gpus", "1", "--json")
    worker = json.loads((shell.folder / "output/plan/worker.json").read_text())
    assert (worker["levers"]["engine"], worker["world"]["ranks"]) == ("zero3", 1)


def test_a_dry_run_writes_nothing(shell: Shell) -> None:
    out = shell.run("good", *TINY, "--dry-run", "--output", "new/folder")
    assert "Nothing was started or written (--dry-run): 2 ranks would run on the CPU" in " ".join(out.split())
    assert os.listdir(shell.folder) == []
    told = json.loads(shell.run("good", *TINY, "--dry_run", "--json"))
    assert told["plan"]["fits"] is True
    assert os.listdir(shell.folder) == []


@pytest.mark.slow
@pytest.mark.thorough
def test_a_dry_run_where_nothing_fits_shows_every_shortage(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", "llama-3.1-8b", "--seq", "8192", "--margin", "80%", "--dry-run"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("tightfit: nothing fits, so nothing was started: ")
    assert err.count("\n") == 1
    table, _, lacks = out.partition("What each lacks:")
    rows = [line for line in table.splitlines() if line.startswith("× ") and "does not fit" not in line]
    assert len(rows) == sum(line.startswith("  - ") for line in lacks.splitlines()) > 3
    assert re.search(r"GiB more than the card has .*, and \S+ GiB more host RAM", " ".join(lacks.split()))
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["plan"]["fits"] is False
    assert os.listdir(shell.folder) == []


def test_data_is_found_from_the_job_file_and_made_absolute(shell: Shell) -> None:
    Path("there").mkdir()
    Path("there/text.txt").write_text("words\n")
    Path("there/job.yaml").write_text("model: tiny_llama\nsequence: 32\ndata:\n  path: text.txt\n")
    shell.run("good", "there/job.yaml", "--json")
    worker = json.loads((shell.folder / "output/plan/worker.json").read_text())
    assert worker["data"]["path"] == str(shell.folder / "there/text.txt")


# --- a run that does not ------------------------------------------------------------------------


def test_a_users_mistake_leaves_nothing(shell: Shell) -> None:
    for mode in ("user", "user_one"):
        code, _, err = shell.train(mode, *TINY, "--output", "a/b")
        assert code == 2
        assert err == "tightfit: line 17 of data.jsonl is not JSON: mend it\n"
        assert os.listdir(shell.folder) == []


def test_a_users_mistake_after_the_first_step_keeps_the_run(shell: Shell) -> None:
    code, _, err = shell.train("user_late", *TINY)
    assert code == 2
    assert err.count("\n") == 1
    assert (shell.folder / "output/events.jsonl").exists()


def test_a_rank_that_dies(shell: Shell) -> None:
    code, _, err = shell.train("die", *TINY)
    assert code == 3
    assert err.splitlines()[0] == "tightfit: the training failed: RuntimeError: no such tensor"
    assert f"The last lines of {shell.folder}/output/logs/rank-1.log:" in err
    assert "  RuntimeError: no such tensor" in err.splitlines()
    assert "Nothing more was tried: the same would happen again." in err
    record = json.loads((shell.folder / "output/run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 3)
    assert not (shell.folder / "output/lock").exists()
    told = shell.train("die", *TINY, "--json")
    assert told[0] == 3
    assert json.loads(told[1])["error"] == "RuntimeError: no such tensor"
    assert (shell.folder / "output/earlier/1/run.json").exists()


def wait_for(*paths: Path) -> list[int]:
    deadline = patience.now() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert patience.now() < deadline, f"{paths} never came"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    ("number", "mode", "code"),
    [(signal.SIGINT, "running", 130), (signal.SIGTERM, "running", 143), (signal.SIGINT, "starting", 130)],
)
def test_an_interrupted_run(shell: Shell, number: signal.Signals, mode: str, code: int) -> None:
    folder = shell.folder / "output"
    with desk(mode, *TINY, cache=shell.folder.parent / "cache") as process:
        pids = wait_for(folder / "pid-0", folder / "pid-1")
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == code
    done = "after step 1" if mode == "running" else "before the first step"
    assert err == f"tightfit: interrupted {done}; every process has ended\n"
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    left = set(os.listdir(folder)) - {"pid-0", "pid-1"}  # which the stand-in put there, and nobody of ours
    assert bool(left) == (mode == "running")


def test_a_second_run_in_the_same_folder_is_told_who(shell: Shell) -> None:
    folder = shell.folder / "output"
    with desk("running", *TINY, cache=shell.folder.parent / "cache") as process:
        wait_for(folder / "pid-0", folder / "pid-1")
        err = shell.refused(*TINY)
        assert f"{folder} is in use by the run of process {process.pid} on " in err
        memory = shell.run("good", "--check-memory")
        assert f"are reserved by the run in {folder} (process {process.pid})" in " ".join(memory.split())
        out = shell.run("good", *TINY, "--output", "other")
        assert "as live runs have reserved the rest" in " ".join(out.split())
    wait_until_free = patience.now() + 10
    while Path("/proc", str(process.pid)).exists() and patience.now() < wait_until_free:
        time.sleep(0.05)
    assert "reserved" not in shell.run("good", "--check-memory")


# --- what is refused ----------------------------------------------------------------------------


def test_a_finished_run_is_not_overwritten(shell: Shell) -> None:
    shell.run("good", *TINY)
    assert "--overwrite" in shell.refused(*TINY)
    shell.run("good", *TINY, "--overwrite")


def test_a_port_in_use(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port} is in use" in shell.refused(*TINY, "--port", port)
    shell.run("options", *TINY, "--port", port)
    assert told(shell.folder / "output")["told"]["MASTER_PORT"] == port


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "model"),
        ((*TINY, "--load_checkpoint", "x"), "there is nothing at"),
        ((*TINY, "--resume", "x"), "name a checkpoint or a run's folder with --resume"),
        ((*TINY, "--resume", "none", "--resume-anyway"), "leave --resume-anyway out"),
        ((*TINY, "--save-every", "often"), "--save-every must be a number of steps such as 500, a time such as 10m"),
        ((*TINY, "--keep-last", "0"), "--keep-last must be a whole number of at least 1, not 0"),
        ((*TINY, "--data", "no.jsonl"), "there is no data at no.jsonl"),
        ((*TINY, "--gpu-ids", "4,5"), "this machine has none"),
        ((*TINY, "--num-gpus", "3"), "--num-gpus is 3 and this machine has no GPU: leave it out to train on the CPU"),
        ((*TINY, "--gpus", "4xRTX4090"), "the plan wants"),
        (
            ("--model", "7b_mamba", "--gpus", "2x2x40GB", "--host-ram", "64GB", "--seq", "256"),
            "for 2 nodes: name them with --hostfile",
        ),
        ((*TINY, "--max-gpus", "0"), "--max-gpus must be at least 1"),
        ((*TINY, "--max-gpus", "1", "--num-gpus", "1"), "leave one out"),
        ((*TINY, "--port", "70000"), "--port must be from 1 to 65535"),
        ((*TINY, "--tier", "all"), "name one tier"),
        ((*TINY, "--plan", "x"), "leave --max-steps out"),
        (("--plan", "nowhere"), "nowhere holds no worker.json"),
        ((*TINY, "--node-rank", "1", "--nodes", "2"), "--master-addr"),
        ((*TINY, "--nodes", "2"), "--node-rank"),
        ((*TINY, "--nodes", "2", "--node-rank", "2", "--master-addr", "a"), "from 0 to 1"),
        ((*TINY, "--hostfile", "none"), "none"),
        ((*TINY, "--epoch", "2"), "did you mean --epochs?"),
        (("--model", "qwen2.5-7b", "--method", "lora"), "use --model Qwen/Qwen2.5-7B"),
        (("--model", "llama-3.1-8b", "--margin", "80%", "--engine", "zero1"), "nothing fits, so nothing was started"),
    ],
)
def test_one_sentence_that_names_the_fix(shell: Shell, words: tuple[str, ...], sentence: str) -> None:
    assert sentence in shell.refused(*words)
    assert os.listdir(shell.folder) == []


def test_adapters_on_a_preset_that_nobody_has_trained(shell: Shell) -> None:
    out = shell.run("good", *TINY, "--method", "lora", "--dry-run")
    assert "tiny_mamba has no public weights" in " ".join(out.split())


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "world": {"nodes": 0}}'])
def test_a_plan_that_is_torn(shell: Shell, text: str) -> None:
    Path("planned").mkdir()
    Path("planned/worker.json").write_text(text)
    assert "write the plan again" in shell.refused("--plan", "planned")


def test_what_is_claimed_for_this_machine_is_held_against_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.hardware.machine.ram_here", lambda: (24 * 2**30, ()))
    said = shell.refused(*TINY, "--host-ram", "500GB", "--dry-run")
    assert "--host-ram 500GB is more than the 24.0 GiB that this machine has: lower it, or leave it out" in said
    rounded = " ".join(shell.run("good", *TINY, "--host-ram", "25GB", "--dry-run").split())
    assert "Host RAM: 24.0 GiB, which is what this machine has of 25GB." in rounded
    disk = shell.refused(*TINY, "--nvme", "1000TB", "--nvme-path", str(shell.folder), "--dry-run")
    assert "--nvme 1000TB is more than the" in disk


def test_gpus_that_are_not_there_are_said_before_ram(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "qwen1.5-0.5b", "--gpus", "4x24GB", "--offload-optimizer", "cpu", "--engine", "zero3")
    assert main(["plan", *words, "--host-ram", "9TB", "--write", str(shell.folder / "far")]) == 0
    capsys.readouterr()
    said = shell.refused("--plan", "far", "--dry-run", "--no-calibration")
    assert "the plan wants 4 GPUs and this machine has none" in said


def test_random_samples_are_said_before_the_start(shell: Shell) -> None:
    assert "No data is named: the samples are random tokens" in " ".join(shell.run("good", *TINY).split())
