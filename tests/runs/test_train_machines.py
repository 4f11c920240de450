"""`tightfit train` on machines that are not here: several of them, and GPUs that a stand-in for nvidia-smi shows."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from train_shell import TINY, Shell, desk, shell, told

from tightfit.cli import main
from tightfit.runs import launch
from tightfit.runs.processes import mark_of
from tightfit.runs.reservations import Reservation, Reservations

pytestmark = pytest.mark.thorough

__all__ = ["shell"]

# --- several machines ---------------------------------------------------------------------------


def test_two_nodes_on_one_machine(shell: Shell) -> None:
    words = (
        *TINY,
        "--nodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--port",
        "29777",
        "--output",
        str(shell.folder / "o"),
    )
    cache = shell.folder.parent
    with (
        desk("options", *words, "--node-rank", "1", cache=cache / "one") as second,
        desk("options", *words, "--node-rank", "0", cache=cache / "two") as first,
    ):
        assert second.communicate(timeout=60)[1] == ""
        out, err = first.communicate(timeout=60)
    assert (first.returncode, second.returncode, err) == (0, 0, "")
    assert "2 nodes × 2 × CPU" in out
    ranks = [told(shell.folder / "o", rank)["told"] for rank in range(4)]
    assert [each["RANK"] for each in ranks] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in ranks] == ["0", "1", "0", "1"]
    assert [each["NODE_RANK"] for each in ranks] == ["0", "0", "1", "1"]
    assert {each["WORLD_SIZE"] for each in ranks} == {"4"}
    assert {each["MASTER_PORT"] for each in ranks} == {"29777"}
    assert not (shell.folder / "o-node1").exists()


def test_nodes_under_slurm(shell: Shell) -> None:
    step = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_NODELIST": "localhost,other",
    }
    for name, value in step.items():
        shell.monkeypatch.setenv(name, value)
    cache, words = shell.folder.parent, (*TINY, "--output", str(shell.folder / "o"))
    shell.monkeypatch.setenv("SLURM_NODEID", "1")
    with desk("options", *words, cache=cache / "one") as second:
        shell.monkeypatch.setenv("SLURM_NODEID", "0")
        with desk("options", *words, cache=cache / "two") as first:
            assert first.communicate(timeout=60)[1] == ""
        assert second.communicate(timeout=60)[1] == ""
    assert (first.returncode, second.returncode) == (0, 0)
    for rank in range(4):
        found = told(shell.folder / "o", rank)["told"]
        assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["WORLD_SIZE"]) == ("localhost", "20005", "4")
        assert (found["RANK"], found["NODE_RANK"]) == (str(rank), str(rank // 2))


def test_a_hostfile_starts_the_rendered_script(shell: Shell) -> None:
    Path("hosts").write_text("alpha slots=8\nbeta slots=8\n")
    bin_folder = shell.folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "deepspeed").write_text('#!/bin/sh\necho "$@" > "$PWD/../asked"\n')
    (bin_folder / "deepspeed").chmod(0o755)
    shell.monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    words = ("--gpus", "2x8xA100-80GB", "--host-ram", "512GB", "--hostfile", "hosts", "--port", "29888")
    shell.run("good", "--model", "7b_mamba", "--scan", "torch", "--seq", "512", *words)
    asked = (shell.folder / "output/asked").read_text()
    assert "--hostfile hostfile" in asked
    assert "--master_port 29888" in asked
    assert asked.strip().endswith("--module tightfit.train worker.json --resume auto")


# --- GPUs ---------------------------------------------------------------------------------------

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a0"
CARD = "NVIDIA GeForce RTX 4090"


@pytest.fixture
def four_gpus(shell: Shell) -> Shell:
    """A stand-in for nvidia-smi that shows four cards, the last almost full."""
    folder = shell.folder.parent / "tools"
    folder.mkdir()
    rows = "".join(f"{i}, {UUID}{i}, 24564, 8.9, {CARD}\n" for i in range(4))
    whole = "".join(
        f"{i}, 00000000:0{i}:00.0, {UUID}{i}, 24564, 0, {800 if i == 3 else 24100}, 0, 41, 31.50, 550.54, 8.9, {CARD}\n"
        for i in range(4)
    )
    apps = f"{UUID}3, {os.getpid()}, 23000\n"
    answers = {"--query-gpu=index,uuid": rows, "--query-gpu=index,pci": whole, "--query-compute": apps}
    (folder / "nvidia-smi").write_text(
        f"#!{sys.executable} -SE\nimport sys\n"
        f"print(next(text for key, text in {answers!r}.items() if sys.argv[1].startswith(key)), end='')\n"
    )
    (folder / "nvidia-smi").chmod(0o755)
    shell.monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    shell.monkeypatch.setattr("tightfit.hardware.probes.tools.BESIDE_PATH", {})
    return shell


def reserve(shell: Shell, *numbers: int, pid: int | None = None) -> None:
    registry = Reservations(shell.folder.parent / "cache" / "tightfit" / "reservations")
    entry = Reservation.ours(Path("/runs/other"), 0, tuple(f"{UUID}{number}" for number in numbers), None)
    if pid is not None:
        entry = replace(entry, pid=pid, mark=mark_of(pid))
    with registry.alone():
        registry.add(entry)


def visible(shell: Shell) -> tuple[str | None, str]:
    found = told(shell.folder / "output")["told"]
    return found["CUDA_VISIBLE_DEVICES"], found["WORLD_SIZE"]


PINNED = (*TINY, "--engine", "zero2", "--micro-batch", "1", "--accum", "1", "--json")


def test_gpus_by_number(four_gpus: Shell) -> None:
    four_gpus.run("options", *PINNED, "--gpu-ids", "2,1", "--effective-batch", "2")
    assert visible(four_gpus) == ("2,1", "2")
    found = told(four_gpus.folder / "output")["told"]
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_gpus_that_others_fill_are_avoided_or_named(four_gpus: Shell) -> None:
    four_gpus.run("options", *PINNED, "--max-gpus", "3", "--effective-batch", "3")
    assert visible(four_gpus) == ("0,1,2", "3")
    err = four_gpus.refused(*PINNED, "--gpu-ids", "3", "--output", "b")
    assert "GPU 3 has 0.8 GiB free" in err
    assert f"process {os.getpid()}" in err


def test_gpus_that_do_not_exist(four_gpus: Shell) -> None:
    assert "gpu_ids has 9" in four_gpus.refused(*PINNED, "--gpu-ids", "9")


def test_gpus_of_a_live_run_are_left_alone(four_gpus: Shell) -> None:
    reserve(four_gpus, 0, 3)
    assert f"GPU 0 is in use by the run in /runs/other (process {os.getpid()})" in four_gpus.refused(
        *PINNED, "--gpu-ids", "0,1"
    )
    assert "say --num-gpus 2" in four_gpus.refused(*PINNED, "--num-gpus", "4")
    four_gpus.run("options", *PINNED)
    assert visible(four_gpus) == ("1,2", "2")


def test_cores_are_shared_with_other_runs(four_gpus: Shell) -> None:
    four_gpus.monkeypatch.setattr(launch, "cores", lambda: 16)
    offloaded = (*PINNED, "--offload-optimizer", "cpu", "--gpu-ids", "1,2")
    four_gpus.run("options", *offloaded)
    assert told(four_gpus.folder / "output")["told"]["OMP_NUM_THREADS"] == "8"
    reserve(four_gpus, 0, pid=os.getppid())
    four_gpus.run("options", *offloaded, "--output", "beside")
    assert told(four_gpus.folder / "beside")["told"]["OMP_NUM_THREADS"] == "6"


def test_every_gpu_taken(four_gpus: Shell) -> None:
    reserve(four_gpus, 0, 1, 2, 3)
    assert "every GPU is in use" in four_gpus.refused(*PINNED)


def test_the_users_own_choice_of_gpus_is_respected(four_gpus: Shell) -> None:
    four_gpus.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{UUID}0")
    assert "both choose GPUs" in four_gpus.refused(*PINNED, "--gpu-ids", "0")
    four_gpus.run("options", *PINNED)
    assert visible(four_gpus) == (f"2,{UUID}0", "2")


def test_memory_of_each_gpu(four_gpus: Shell) -> None:
    out = four_gpus.run("good", "--check_memory")
    assert "GPU 3, NVIDIA GeForce RTX 4090: 800 MiB of 24,564 MiB free" in out
    assert f"23,000 MiB  process {os.getpid()}" in out
    reported = json.loads(four_gpus.run("good", "--check-memory", "--json"))
    assert reported["gpus"][3]["holders"][0]["pid"] == os.getpid()


def test_a_plan_for_more_gpus_than_there_are(four_gpus: Shell) -> None:
    pinned = ("--model", "tiny_mamba", "--seq", "64", "--engine", "zero2", "--micro-batch", "1", "--accum", "1")
    assert main(["plan", *pinned, "--effective-batch", "8", "--gpus", "8x24GB", "--write", "planned"]) == 0
    assert main(["plan", *pinned, "--effective-batch", "2", "--gpus", "2x24GB", "--write", "two"]) == 0
    four_gpus.capsys.readouterr()
    assert "the plan wants 8 GPUs and this machine has 4" in four_gpus.refused("--plan", "planned")
    four_gpus.run("options", "--plan", "two", "--output", "output", "--json")
    assert visible(four_gpus) == ("0,1", "2")
