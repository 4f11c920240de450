"""`plan --write --target`: what is printed, and what a target refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tightfit.cli import main

LARGE = "plan --model qwen2.5-7b --gpus 2x8xA100-80GB --host-ram 512GB"


def asked(words: str, folder: Path) -> int:
    return main([*shlex.split(words), "--write", str(folder)])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "files", "said"),
    [
        ("slurm", {"slurm.sbatch"}, "sbatch slurm.sbatch"),
        (
            "kubernetes",
            {"kubernetes-job.yaml", "kubeflow-trainjob.yaml", "kubeflow-pytorchjob.yaml"},
            "kubectl apply -f",
        ),
        ("ray", {"ray_train.py"}, "ray job submit -- python"),
    ],
)
def test_the_files_and_how_to_start_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, files: set[str], said: str
) -> None:
    folder = tmp_path / "my-run"
    small = "plan --model qwen1.5-0.5b --gpus 2xA100-80GB --host-ram 128GB"
    assert asked(f"{small} --target {target}", folder) == 0
    written = {path.name for path in folder.iterdir()}
    clusters = {
        "slurm.sbatch",
        "kubernetes-job.yaml",
        "kubeflow-trainjob.yaml",
        "kubeflow-pytorchjob.yaml",
        "ray_train.py",
    }
    assert written & clusters == files
    assert {"worker.json", "launch.sh", "PLAN.md"} <= written
    printed = capsys.readouterr().out
    assert said in printed
    if target == "kubernetes":
        told = " ".join(printed.split())
        assert "the image registry.example.com/tightfit:latest, the namespace default and the claim tightfit" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--target kube", "--target knows no 'kube': it takes slurm, kubernetes or ray"),
        ("--target kubernetes --for llamafactory", "cannot start LLaMA-Factory: plan with --for tightfit"),
        ("--target ray --for trainer", "cannot start Hugging Face's Trainer: plan with --for tightfit"),
        ("--target slurm --for trainer", "cannot start Hugging Face's Trainer: plan with --for tightfit"),
        ("--target kubernetes --hostfile HOSTS", "leave --hostfile out"),
        ("--target ray --hostfile HOSTS", "leave --hostfile out"),
        ("--target kubernetes --gpu-ids 0,1", "leave --gpu-ids out"),
        ("--target kubernetes --launcher deepspeed", "with torchrun: leave --launcher deepspeed out"),
    ],
)
def test_what_a_target_cannot_do_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=8\nb slots=8\n", encoding="utf-8")
    assert asked(f"{LARGE} {words.replace('HOSTS', str(hosts))}", tmp_path / "my-run") == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "my-run").exists()


def test_a_target_is_for_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(LARGE), "--target", "ray"]) == 2
    assert "say --write DIR as well" in capsys.readouterr().err
