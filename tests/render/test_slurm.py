"""The batch file is run with stand-ins for SLURM's programs; torchrun's own parser reads what they were given."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tightfit.inputs.hardware import parse_hardware
from tightfit.job import Job
from tightfit.planner.plan import Plan
from tightfit.render.slurm import slurm_sbatch
from tightfit.render.target import Target
from tightfit.types import Levers

MakePlan = Callable[..., Plan]

SRUN = """#!/usr/bin/env python3
import os, sys
words = sys.argv[1:]
assert words.pop(0) == "--kill-on-bad-exit=1"
os.environ["SLURM_NODEID"] = "1"
os.execvp(words[0], words)
"""
SCONTROL = "#!/bin/sh\ntest \"$*\" = 'show hostnames gpu[01-02]' && printf 'gpu01\\ngpu02\\n'\n"
NOTE = """#!/usr/bin/env python3
import json, os, sys
json.dump({"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}, open("note.json", "w"))
"""


def text_of(make_plan: MakePlan, gpus: str = "2x8xA100-80GB", target: Target | None = None, **job: Any) -> str:
    plan = make_plan(
        Levers(engine="zero3", offload_optimizer="cpu"), parse_hardware(gpus), Job(model="qwen2.5-7b", **job)
    )
    text = slurm_sbatch(plan, target or Target())
    assert text == slurm_sbatch(plan, target or Target())
    return text


def run(text: str, folder: Path, *arguments: str) -> Any:
    programs = folder / "bin"
    programs.mkdir()
    stand_ins = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": NOTE, "llamafactory-cli": NOTE}
    for name, script in stand_ins.items():
        (programs / name).write_text(script, encoding="utf-8")
        (programs / name).chmod(0o755)
    spool = folder / "spool"  # SLURM runs a copy, from somewhere else
    spool.mkdir()
    (spool / "slurm_script").write_text(text, encoding="utf-8")
    env = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_JOB_ID": "4711",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    command = ["bash", str(spool / "slurm_script"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=spool)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "note.json").read_text(encoding="utf-8"))


def directives(text: str) -> dict[str, str]:
    """As sbatch reads them: up to the first line that is a command."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
    return found


def test_one_task_a_node_with_all_its_gpus(make_plan: MakePlan) -> None:
    asked = directives(text_of(make_plan))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"], asked["mem"]) == ("2", "1", "gpu:8", "0")
    assert "time" not in asked


def test_a_time_limit_leaves_room_to_save(make_plan: MakePlan) -> None:
    assert directives(text_of(make_plan, timeout="12h"))["time"] == str(12 * 60 + 30)


def test_dcus_have_a_name_of_their_own(make_plan: MakePlan) -> None:
    assert directives(text_of(make_plan, "2x8xK100-64GB"))["gres"] == "dcu:8"


def test_torchrun_meets_on_the_first_node(make_plan: MakePlan, tmp_path: Path) -> None:
    from torch.distributed.run import parse_args

    note = run(text_of(make_plan, target=Target(port=29777, gpu_ids=tuple(range(8)))), tmp_path, "--resume")
    args = parse_args(note["argv"][1:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d")
    assert (args.rdzv_endpoint, args.rdzv_id) == ("gpu01:29777", "4711")
    assert (args.module, args.training_script, args.training_script_args) == (
        True,
        "tightfit.train",
        ["worker.json", "--resume"],
    )
    assert note["cwd"] == str(tmp_path)
    assert note["env"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert note["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7", "SLURM's choice must stand"
    assert "CUDA_DEVICE_ORDER" not in note["env"]
    assert int(note["env"]["OMP_NUM_THREADS"]) >= 1


def test_llamafactory_learns_its_node_from_slurm(make_plan: MakePlan, tmp_path: Path) -> None:
    note = run(text_of(make_plan, target=Target(launcher="llamafactory")), tmp_path, "max_steps=2")
    assert note["argv"][1:] == ["train", "llamafactory.yaml", "max_steps=2"]
    told = [note["env"][name] for name in ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")]
    assert told == ["1", "2", "8", "gpu01", "29500"]


def test_outside_slurm_it_says_how_to_submit_it(make_plan: MakePlan, tmp_path: Path) -> None:
    script = tmp_path / "slurm.sbatch"
    script.write_text(text_of(make_plan), encoding="utf-8")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin"})
    assert done.returncode != 0
    assert "submit this file with sbatch" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("gpus", ["1x8xA100-80GB", "2x8xK100-64GB"])
@pytest.mark.parametrize("target", [Target(), Target(launcher="llamafactory")])
def test_every_batch_file_is_shell(make_plan: MakePlan, tmp_path: Path, gpus: str, target: Target) -> None:
    script = tmp_path / "slurm.sbatch"
    script.write_text(text_of(make_plan, gpus, target, timeout="2h"), encoding="utf-8")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
