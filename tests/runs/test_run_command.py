"""`tightfit run`: what a user sees of a command that ends well, badly, by a signal, or that never starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import patience
import warm_desk
from tightfit.model.presets import PRESETS

pytestmark = pytest.mark.thorough

ASSETS = Path(__file__).parents[1] / "assets"
OOM = (
    "raise MemoryError('x')",
    "import sys; sys.stderr.write('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 23.64 GiB of which 1.00 GiB is free.\\n'); sys.exit(1)",
)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`tightfit run …` in a folder of its own, where `bin/` is searched for programs first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def started(*words: str) -> subprocess.CompletedProcess[str]:
        return warm_desk.run("run", *words)

    return started


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def record(folder: Path, number: int = 1) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"attempts/{number:03d}.json").read_text(encoding="utf-8"))
    return read


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "a -- is missing"),
        (("python", "train.py"), "a -- is missing"),
        (("--",), "no command was given"),
        (("--", "no-such-program", "x"), "there is no program no-such-program"),
        (("--max-attempts", "0", "--", "python", "-c", "1"), "--max-attempts must be at least 1"),
        (("--max-attempts", "two", "--", "python"), "takes a whole number"),
        (("--allow", "quantise", "--", "python"), "quantize"),
        (("--allow", "lora-rank", "--", "python"), "only tightfit train can do that"),
        (("--outptu", "a", "--", "python"), "did you mean --output"),
        (("--gpus", "three", "--", sys.executable, "-c", "1"), "three"),
        (("--", "env", "llamafactory-cli", "train", "broken.yaml"), "is not YAML"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1\n", encoding="utf-8")
    done = run(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("tightfit: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("tightfit-run-*"))


def test_a_folder_in_use_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/a.txt").touch()
    done = run("--output", "old", "--", sys.executable, "-c", "1")
    assert done.returncode == 2
    assert "name a new folder" in done.stderr


def test_help_has_examples(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "tightfit run -- llamafactory-cli train" in done.stdout


# --- how it ends --------------------------------------------------------------------------------


def test_output_passes_through_and_is_kept(run: Run, tmp_path: Path) -> None:
    text = (
        "import sys, time\n"
        "for stream, said in ((sys.stdout, 'to '), (sys.stderr, 'to err\\n'), (sys.stdout, 'out\\n')):\n"
        "    stream.write(said); stream.flush(); time.sleep(0.2)\n"
    )
    done = run("--", sys.executable, "-c", text)
    assert done.returncode == 0
    assert done.stdout == "to out\n"
    assert "to err\n" in done.stderr
    log = (tmp_path / "tightfit-run-1/attempts/001/command.log").read_text(encoding="utf-8")
    assert sorted(log.splitlines()) == ["to err", "to out"]
    again = run("--", sys.executable, "-c", text)
    assert "tightfit-run-2" in again.stderr
    made = json.loads((tmp_path / "tightfit-run-1/run.json").read_text(encoding="utf-8"))
    assert (made["state"], made["exit_code"]) == ("done", 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("{}['missing']", 1),
    ],
)
def test_the_exit_code_is_the_commands_own(run: Run, tmp_path: Path, text: str, code: int) -> None:
    done = run("--", sys.executable, script(tmp_path, text))
    assert done.returncode == code
    assert len(list((tmp_path / "tightfit-run-1/attempts").glob("*.json"))) == 1


def test_a_bug_is_told_and_not_tried_again(run: Run, tmp_path: Path) -> None:
    name = script(tmp_path, "flag = '--resume_from_checkpoint'\nbatch = {}\nbatch['labels_of_mine']\n")
    done = run("--", sys.executable, name)
    assert done.returncode == 1
    assert "not started again: the same would happen again" in done.stderr
    assert record(tmp_path / "tightfit-run-1")["cause"]["kind"] == "code"


@pytest.mark.parametrize("text", OOM[1:])
def test_memory_without_a_config_stops_with_what_helps(run: Run, tmp_path: Path, text: str) -> None:
    done = run("--", sys.executable, script(tmp_path, text))
    assert done.returncode == 1
    assert "The GPU ran out of memory" in done.stderr
    assert "there is no config that tightfit could change" in done.stderr
    assert "  - " in done.stderr or "tightfit run: - " in done.stderr
    found = record(tmp_path / "tightfit-run-1")
    assert (found["cause"]["kind"], found["next"]["action"]) == ("device-oom", "stop")
    told = warm_desk.run("diagnose", "tightfit-run-1")
    assert told.returncode == 1
    assert "ran out of memory" in told.stdout


DIES_ONCE = """
import os, pathlib, signal, sys
mark = pathlib.Path("died")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
print("second start")
"""


NUMBERS = """
for step in range(1, 8):
    print({"loss": float("nan") if FIRST <= step <= LAST else 2.0, "grad_norm": 1.0, "learning_rate": 1e-4})
"""


def test_a_loss_that_is_nan_to_the_end_is_not_done(run: Run, tmp_path: Path) -> None:
    name = script(tmp_path, NUMBERS.replace("FIRST", "4").replace("LAST", "9"))
    done = run("--output", "a", "--", sys.executable, name)
    assert done.returncode == 1
    assert "it ended as if all were well" in done.stderr
    assert "The loss became nan and did not recover" in done.stderr
    assert "tightfit run: done" not in done.stderr
    assert record(tmp_path / "a")["state"] == "failed"
    found = json.loads(warm_desk.run("diagnose", "a", "--json").stdout)
    assert found["verdict"]["id"] == "loss-nan"


def test_a_loss_that_recovers_is_done(run: Run, tmp_path: Path) -> None:
    name = script(tmp_path, NUMBERS.replace("FIRST", "3").replace("LAST", "3"))
    done = run("--output", "a", "--", sys.executable, name)
    assert done.returncode == 0
    assert "tightfit run: done at the first attempt" in done.stderr
    (tmp_path / "all.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    for what in ("a", "all.log"):
        found = json.loads(warm_desk.run("diagnose", what, "--json").stdout)
        assert found["verdict"] is None


PLAIN = """import sys
from types import SimpleNamespace
HfArgumentParser = TrainingArguments = None


def train() -> None:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
             "23.64 GiB of which 1.00 GiB is free.")


trainer = SimpleNamespace(train=train)
trainer.train()
"""


def test_a_script_that_would_begin_at_step_0_is_not_started_again(run: Run, tmp_path: Path) -> None:
    """It has kept steps, and calls trainer.train() without them: starting it again would throw them away."""
    name = script(tmp_path, PLAIN)
    place = tmp_path / "out/checkpoint-4"
    place.mkdir(parents=True)
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (place / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    (place / "trainer_state.json").write_text('{"global_step": 4, "max_steps": 9}', encoding="utf-8")
    done = run("--output", "a", "--", sys.executable, name, "--output_dir", "out")
    assert done.returncode == 1
    assert "train.py calls trainer.train() without resume_from_checkpoint" in done.stderr
    assert "the 4 steps in out/checkpoint-4 would be trained anew" in done.stderr
    assert "micro batch × accumulation 8 × 1 → 4 × 2 may fit" in done.stderr
    assert not (tmp_path / "a/attempts/002.json").exists()
    again = ("--output", "b", "--retry-anyway", "--max-attempts", "2", "--", sys.executable, name)
    done = run(*again, "--output_dir", "out")
    assert "it begins again, as you asked: train.py does not go on from checkpoint-4" in done.stderr
    assert record(tmp_path / "b", 2)["effective_batch"] == record(tmp_path / "b")["effective_batch"] == 8


@pytest.mark.thorough
def test_what_may_pass_is_tried_again_only_with_leave(run: Run, tmp_path: Path) -> None:
    name = script(tmp_path, DIES_ONCE)
    done = run("--", sys.executable, name)
    assert done.returncode == 143
    assert "--retry-anyway" in done.stderr
    (tmp_path / "died").unlink()
    again = run("--retry-anyway", "--", sys.executable, name)
    assert again.returncode == 0
    assert again.stdout == "second start\n"
    (tmp_path / "died").unlink()
    once = run("--retry-anyway", "--max-attempts", "1", "--", sys.executable, name)
    assert once.returncode == 143


def test_json_is_all_there_is_on_stdout(run: Run, tmp_path: Path) -> None:
    done = run("--json", "--output", "a/b", "--", sys.executable, "-c", "print('noise')")
    found = json.loads(done.stdout)
    assert "noise" in done.stderr
    assert (found["state"], found["exit_code"], found["folder"]) == ("done", 0, "a/b")
    assert [each["state"] for each in found["attempts"]] == ["done"]


# --- signals and processes ----------------------------------------------------------------------

PARENT = """
import pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("child").write_text(str(child.pid))
{rest}
"""


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_nothing_is_left_when_the_main_process_ends(run: Run, tmp_path: Path) -> None:
    """Not even a process in a session of its own, as torchrun starts its ranks."""
    done = run("--", sys.executable, script(tmp_path, PARENT.format(rest="sys.exit(5)")))
    assert done.returncode == 5
    assert is_gone(int((tmp_path / "child").read_text(encoding="ascii")))


STOPS = """
def leave(number, frame):
    print("saving first", flush=True)
    sys.exit(9)
signal.signal(signal.{signal}, leave)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_passed_on_and_its_answer_counts(tmp_path: Path, name: str) -> None:
    path = script(tmp_path, PARENT.format(rest=STOPS.format(signal=name)))
    process = warm_desk.Process("run", "--", sys.executable, path, cwd=tmp_path)
    try:
        assert process.first_line() == "ready"
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 9, err
    assert out == "ready\nsaving first\n"
    assert "stopped as asked" in err
    assert is_gone(int((tmp_path / "child").read_text(encoding="ascii")))
    assert record(tmp_path / "tightfit-run-1")["state"] == "interrupted"


def test_one_that_will_not_listen_is_ended_by_the_second_signal(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    path = script(tmp_path, PARENT.format(rest=deaf + "print('ready', flush=True)\ntime.sleep(600)"))
    process = warm_desk.Process("run", "--", sys.executable, path, cwd=tmp_path)
    try:
        process.first_line()
        process.send_signal(signal.SIGINT)
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        began = patience.now()
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 137
    assert patience.now() - began < 10
    assert is_gone(int((tmp_path / "child").read_text(encoding="ascii")))


# --- LLaMA-Factory, note 003's job --------------------------------------------------------------

NOTE_003 = """### model
model_name_or_path: deepseek-ai/DeepSeek-R1-Distill-Qwen-32B

### method
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
deepspeed: cfg/ds_z3.json

### data
dataset: mine
template: deepseek3
cutoff_len: 1024

### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 16
learning_rate: 5e-05   # the guide's
num_train_epochs: 3.0
bf16: true
output_dir: saves/ds32b
"""
ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


@pytest.fixture
def note_003(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "cfg").mkdir()
    program = tmp_path / "bin/llamafactory-cli"
    program.write_text(f"#!{sys.executable}\n{(ASSETS / 'llamafactory_stand_in.py').read_text(encoding='utf-8')}")
    program.chmod(0o755)
    (tmp_path / "cfg/x.yaml").write_text(NOTE_003, encoding="utf-8")
    (tmp_path / "cfg/ds_z3.json").write_text(json.dumps(ZERO3), encoding="utf-8")
    return tmp_path


DCU = ("--gpus", "8xK100-64GB", "--host-ram", "512GB")
TRAIN = ("--", "llamafactory-cli", "train", "cfg/x.yaml")


def test_what_is_predicted_before_the_start(run: Run, note_003: Path) -> None:
    done = run("--dry-run", *DCU, *TRAIN)
    assert done.returncode == 0
    assert "LLaMA-Factory, configured by x.yaml, ds_z3.json" in done.stdout
    assert "Fits: needs" in done.stdout
    assert "phase (ZeRO-3, micro batch 2 × 16)" in done.stdout
    small = json.loads(run("--dry-run", "--json", "--gpus", "1x24GB", *TRAIN).stdout)
    assert small["predicted"]["fits"] is False
    assert "tightfit plan cfg/x.yaml" in small["predicted"]["said"]
    assert not list(note_003.glob("tightfit-run-*"))


def test_flags_alone_and_flags_over_a_file_are_predicted_too(run: Run, note_003: Path) -> None:
    values = yaml.safe_load(NOTE_003)
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    alone = run("--dry-run", *DCU, "--", "llamafactory-cli", "train", *flags)
    assert "LLaMA-Factory, configured by ds_z3.json" in alone.stdout
    assert alone.stdout.splitlines()[-1] == run("--dry-run", *DCU, *TRAIN).stdout.splitlines()[-1]
    over = run("--dry-run", *DCU, *TRAIN, "per_device_train_batch_size=4")
    assert "micro batch 4 × 16" in over.stdout


@pytest.fixture(params=[16, pytest.param(None, marks=pytest.mark.slow)], ids=["shallow", "whole"])
def job(request: pytest.FixtureRequest, note_003: Path) -> str:
    """Its YAML; the search takes as long as the model is deep, and one of 16 layers goes down the same schemes."""
    if request.param is None:
        return NOTE_003
    config = {**PRESETS["qwen2.5-32b"].config, "num_hidden_layers": request.param}
    (note_003 / "shallow").mkdir()
    (note_003 / "shallow/config.json").write_text(json.dumps(config), encoding="utf-8")
    text = NOTE_003.replace("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "shallow")
    (note_003 / "cfg/x.yaml").write_text(text, encoding="utf-8")
    return text


@pytest.mark.thorough
def test_note_003s_schemes_one_after_another(run: Run, note_003: Path, job: str) -> None:
    done = run("--json", *DCU, "--allow", "quantize,shorter-seq", *TRAIN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    changes = [" ".join(each["next"]["changed"]) for each in found["attempts"] if each["next"]]
    assert "the scheme optimized" in changes[0]
    assert any("quantized" in change or "limit" in change for change in changes[1:])
    last = yaml.safe_load(Path(found["last_command"][2]).read_text(encoding="utf-8"))
    first = yaml.safe_load(job)
    batch = last["per_device_train_batch_size"] * last["gradient_accumulation_steps"]
    assert batch == first["per_device_train_batch_size"] * first["gradient_accumulation_steps"]
    assert "learning_rate: 5e-05   # the guide's\n" in Path(found["last_command"][2]).read_text(encoding="utf-8")
    assert (note_003 / "cfg/x.yaml").read_text(encoding="utf-8") == job
    assert json.loads((note_003 / "cfg/ds_z3.json").read_text(encoding="utf-8")) == ZERO3


@pytest.mark.thorough
@pytest.mark.usefixtures("job")
def test_without_leave_it_stops_with_what_would_help(run: Run, note_003: Path) -> None:
    done = run(*DCU, *TRAIN)
    assert done.returncode == 1
    assert "--allow quantize would train the adapters on 4-bit weights" in done.stderr
    written = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in note_003.glob("cfg/x.tightfit-*.yaml")]
    assert all("quantization_bit" not in values and values["cutoff_len"] == 1024 for values in written)
