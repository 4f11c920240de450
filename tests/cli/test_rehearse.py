"""`tightfit rehearse`, as users meet it: real workers on CPU ranks, and every sentence that stops one."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import patience
import warm_desk
from tightfit.cli import main
from tightfit.cli.rehearse import Rehearsal, verdict_words
from tightfit.hardware.machine import Device
from tightfit.runs import free_ram
from tightfit.runs.records import WorkerFile, worker_file
from tightfit.screen import Comparison
from tightfit.start.rehearse import choose_device, rehearsed
from tightfit.types import HardwareError

GIB = 2**30
TIGHTFIT = (sys.executable, "-m", "tightfit")
SMALL = ("--model", "tiny_llama", "--seq", "64", "--world", "2")


def rehearse(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return warm_desk.run("rehearse", *words, timeout=240, ranks=True, **more)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence that a command line is refused with."""
    assert main(["rehearse", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def plan_folder(tmp_path: Path, no_gpu: None) -> Path:
    """A written plan for two CPU ranks."""
    folder = tmp_path / "plan"
    assert main(["plan", *SMALL, "--write", str(folder)]) == 0
    return folder


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cap", "big", *SMALL), "'big' is not a size"),
        (("--steps", "0", *SMALL), "--steps must be at least 1"),
        (("--steps", "some", *SMALL), "--steps takes a whole number"),
        (("--from-plan", "here", "--model", "tiny_llama"), "has decided that already: leave --model out"),
        (("--from-plan", "here", "job.yaml"), "has decided that already: leave a job file out"),
        (("--from-plan", "nowhere"), "holds no worker.json: name a folder that `tightfit plan --write` made"),
        (("--capp", "24GB", *SMALL), "did you mean --cap?"),
        (("--data", "nowhere.jsonl", *SMALL), "there is no data at nowhere.jsonl"),
        (("--cap", "1MB", *SMALL, "--engine", "zero1"), "nothing fits, so there is nothing to rehearse"),
        (("--on", "0", *SMALL), "leave --on out"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], no_gpu: None, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *words)


def test_a_plan_for_gpus_needs_one(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    said = refused(capsys, "--model", "qwen2.5-7b", "--gpus", "8xRTX4090", "--host-ram", "256GB")
    assert "its rehearsal needs one, which this machine has not: run it where there is one" in said


def test_of_layers_that_stream_one_rank_has_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_gpu: None
) -> None:
    """Ranks of a training share them; the one that is rehearsed has nobody to share them with."""
    streamed = (*SMALL, "--engine", "stream")
    assert main(["plan", *streamed, "--write", str(tmp_path / "plan")]) == 0
    planned = worker_file((tmp_path / "plan/worker.json").read_text(), "the plan").ram_bytes_per_rank
    monkeypatch.setattr(free_ram, "free_ram", lambda: planned)
    capsys.readouterr()
    assert "layers that stream are locked in RAM" in refused(capsys, *streamed)


def test_without_torch_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'tightfit[train]'" in refused(capsys, *SMALL)


def test_a_cap_beyond_the_planned_card(capsys: pytest.CaptureFixture[str], plan_folder: Path) -> None:
    capsys.readouterr()
    assert "is more than the" in refused(capsys, "--from-plan", str(plan_folder), "--cap", "4000GB")


def test_a_plan_that_is_not_whole(capsys: pytest.CaptureFixture[str], plan_folder: Path) -> None:
    tree = json.loads((plan_folder / "worker.json").read_text())
    del tree["evaluation"]
    (plan_folder / "worker.json").write_text(json.dumps(tree))
    capsys.readouterr()
    assert "worker.json is not whole: write the plan again" in refused(capsys, "--from-plan", str(plan_folder))


def test_a_folder_that_is_not_empty_is_not_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    assert str(tmp_path) in refused(capsys, *SMALL, "--keep", str(tmp_path))


def test_the_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["rehearse", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--cap", "--from-plan", "--steps", "--keep", "--gpus", "--data", "--engine"))


# --- which GPU, and which orders ----------------------------------------------------------------


def card(number: int, total: float = 24, free: float = 23) -> Device:
    return Device(
        number=number,
        word=str(number),
        key=f"GPU-test-{number}",
        name="RTX 4090",
        total_bytes=int(total * GIB),
        free_bytes=int(free * GIB),
    )


def gpu_plan(required_gib: float) -> WorkerFile:
    return WorkerFile(
        model="m",
        method="full",
        engine="zero3",
        optimizer="adamw",
        offload_optimizer="none",
        nodes=1,
        gpus_per_node=8,
        vendor="nvidia",
        folder="run",
        required_bytes=int(required_gib * GIB),
        peak_bytes=int(required_gib * GIB),
        host_bytes_per_node=GIB,
        step_s=1.0,
        tokens_per_s=1.0,
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_gpu_with_the_most_room_is_taken(own_cache: None) -> None:
    devices = (card(0, free=3), card(1, free=22), card(2, free=20))
    chosen = choose_device(devices, gpu_plan(20), 24 * GIB, None)
    assert chosen is not None
    assert chosen.number == 1
    named = choose_device(devices, gpu_plan(20), 24 * GIB, 2)
    assert named is not None
    assert named.number == 2


@pytest.mark.parametrize(
    ("number", "required", "said"),
    [
        (7, 20, "--on 7 is no GPU of this machine: there are 0, 1"),
        (0, 20, "GPU 0 has 3.0 GiB free and the rehearsal needs 20.0 GiB"),
        (1, 60, "rehearse it on a larger card, or plan for one like this with --cap 24GB"),
    ],
)
def test_a_gpu_that_will_not_do(own_cache: None, number: int, required: int, said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        choose_device((card(0, free=3), card(1)), gpu_plan(required), 80 * GIB, number)


@pytest.mark.thorough
def test_weights_that_would_have_to_be_fetched_are_drawn(tmp_path: Path, no_gpu: None) -> None:
    folder = tmp_path / "plan"
    words = ["--model", "Qwen/Qwen2.5-7B", "--gpus", "4xA100-80GB", "--host-ram", "512GB"]
    assert main(["plan", *words, "--write", str(folder)]) == 0
    text = (folder / "worker.json").read_text()
    assert json.loads(text)["model"]["weights"] == "Qwen/Qwen2.5-7B"
    made = json.loads(rehearsed(json.loads(text)))
    assert made["model"]["weights"] is None
    assert made["model"]["config"]["model_type"] == "qwen2"
    assert made["data"]["tokenizer"] is None
    assert worker_file(json.dumps(made), "it").required_bytes == worker_file(text, "it").required_bytes
    with_data = json.loads(text)
    with_data["data"]["path"] = "some.jsonl"
    assert json.loads(rehearsed(with_data))["data"]["tokenizer"] == "Qwen/Qwen2.5-7B"


def test_weights_in_a_folder_are_used(plan_folder: Path, tmp_path: Path) -> None:
    tree = json.loads((plan_folder / "worker.json").read_text())
    tree["model"] |= {"weights": str(tmp_path), "config": None}
    assert json.loads(rehearsed(tree))["model"] == tree["model"]


def test_the_verdict_in_words() -> None:
    peak = Comparison(key="peak", name="memory, peak", unit="bytes", predicted=20 * GIB, measured=21 * GIB)
    found = Rehearsal(
        model="m",
        engine="zero3",
        ranks=8,
        rank=4,
        device="H200",
        cap_bytes=24 * GIB,
        tensor_bytes=22 * GIB,
        verdict="passed",
        phase=None,
        error=None,
        steps=5,
        rows=(peak,),
        notes=(),
        folder=None,
    )
    assert verdict_words(found) == (
        "Passed: rank 4 of 8 made 5 steps within 24.00 GiB: its peak is 21.00 GiB of the 22.00 GiB left for tensors."
    )


# --- real ranks ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_rehearsal_passes_and_leaves_nothing(tmp_path: Path, no_gpu: None) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = rehearse(*SMALL, "--steps", "4", cwd=tmp_path, env={**os.environ, "TMPDIR": str(scratch)})
    assert done.returncode == 0, done.stderr
    assert "memory, first optimizer step" in done.stdout
    assert "tokens per second" in done.stdout
    assert "Passed: rank 0 of 2 made 4 steps within" in done.stdout
    assert "the measured pace has no communication" in done.stdout
    assert not list(scratch.glob("tightfit-rehearse-*"))
    assert not [path for path in tmp_path.iterdir() if path != scratch]


@pytest.mark.thorough
def test_layers_that_stream_are_rehearsed(tmp_path: Path, no_gpu: None) -> None:
    done = rehearse(*SMALL, "--engine", "stream", "--resident", "1", "--steps", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["engine"], told["steps"]) == ("passed", "stream", 2)


@pytest.mark.thorough
def test_json_with_data_and_a_kept_folder(tmp_path: Path, no_gpu: None) -> None:
    kept = tmp_path / "kept"
    done = rehearse(*SMALL, "--data", "shipped:text", "--json", "--keep", str(kept), "--steps", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert found["verdict"] == "passed"
    assert (found["ranks"], found["steps"], found["folder"]) == (2, 1, str(kept))
    figures = found["figures"]
    assert list(figures) == [
        *("init", "forward", "backward", "step", "peak", "host"),
        *("largest_step_s", "step_s", "tokens_per_s"),
    ]
    paces = ("largest_step_s", "step_s", "tokens_per_s")
    assert all(figures[name]["predicted"] is None for name in paces), "this CPU was never measured"
    assert all(each["predicted"] > 0 for name, each in figures.items() if name not in paces)
    assert all(figures[name]["measured"] > 0 for name in ("host", "largest_step_s", "step_s", "tokens_per_s"))
    assert not any("No data is named" in note for note in found["notes"])
    assert (kept / "events.jsonl").exists()
    assert (kept / "logs" / "rank-0.log").exists()


@pytest.mark.thorough
def test_the_full_length_needs_neither_data_nor_tokenizer(plan_folder: Path) -> None:
    worker = plan_folder / "worker.json"
    tree = json.loads(worker.read_text())
    tree["data"] |= {"path": "nowhere.jsonl", "tokenizer": "nobody/nothing"}
    tree["levers"]["attention"] = "flash"
    worker.write_text(json.dumps(tree))
    without = rehearse("--from-plan", str(plan_folder), "--steps", "1", env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert without.returncode == 2
    assert "name one with --tokenizer, or go without: --full-length" in without.stderr
    done = rehearse("--from-plan", str(plan_folder), "--steps", "1", "--full-length", "--json")
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert "The samples are random, and all of the full length." in notes
    assert any("flash-attn is not installed here: sdpa takes its place" in note for note in notes)


@pytest.mark.thorough
def test_more_than_the_cap_fails(plan_folder: Path) -> None:
    done = rehearse("--from-plan", str(plan_folder), "--cap", "200MB", "--steps", "1")
    assert done.returncode == 1, done.stderr
    assert "Failed: rank 0 of 2 took more than its 200.0 MiB: its peak is" in done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_running_out_of_memory_names_the_phase(tmp_path: Path, no_gpu: None) -> None:
    folder, limit = tmp_path / "plan", 4 * GIB
    pins = ["--micro-batch", "512", "--effective-batch", "512", "--loss", "plain", "--checkpointing", "none"]
    assert main(["plan", "--model", "tiny_llama", "--seq", "256", "--world", "1", *pins, "--write", str(folder)]) == 0
    done = subprocess.run(  # a process of its own: what is forked has more address space than that already
        (*TIGHTFIT, "rehearse", "--from-plan", str(folder), "--json"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "out of memory"
    assert found["phase"] == "forward"
    assert "can't allocate memory" in found["error"]


@pytest.mark.slow
def test_ctrl_c_ends_the_worker(tmp_path: Path, no_gpu: None) -> None:
    kept = tmp_path / "kept"
    desk = subprocess.Popen(
        (*TIGHTFIT, "rehearse", *SMALL, "--steps", "100000", "--keep", str(kept)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    events = kept / "events.jsonl"
    deadline = patience.now() + 120
    while patience.now() < deadline and not (events.exists() and '"event": "step"' in events.read_text()):
        assert desk.poll() is None
        time.sleep(0.2)
    desk.send_signal(signal.SIGINT)
    _, said = desk.communicate(timeout=30)
    assert desk.returncode == 130
    assert said.splitlines() == ["tightfit: interrupted; the rehearsal has ended"]
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(kept) not in left
