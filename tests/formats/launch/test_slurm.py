"""The batch file is run with stand-ins for SLURM's programs, which treat signals as SLURM does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patience
from tightfit.formats.launch.script import slurm_sbatch
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.hardware.slurm import slurm_rank
from tightfit.hardware.words import parse_hardware
from tightfit.job import Job
from tightfit.planner.plan import Plan
from tightfit.types import Levers

MakePlan = Callable[..., Plan]

SRUN = """#!/usr/bin/env python3
import json, os, signal, subprocess, sys
words = sys.argv[1:]
options = []
while words[0].startswith("-"):
    options.append(words.pop(0))
json.dump(options, open("srun.json", "w"))
tasks = []
for task in range(int(os.environ.get("TASKS", "1"))):
    told = {"SLURM_NODEID": "1", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NTASKS": "2"}
    tasks.append(subprocess.Popen(words, env={**os.environ, **told}, start_new_session=True))
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])  # "forcing job termination"
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = "#!/bin/sh\ntest \"$*\" = 'show hostnames gpu[01-02]' && printf 'gpu01\\ngpu02\\n'\n"
NOTE = """#!/usr/bin/env python3
import json, os, sys
json.dump({"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}, open("note.json", "w"))
"""


RANK = """#!/bin/sh
exec {python} -c '
import os, sys, time
from pathlib import Path
from tightfit.train.stop import Stop, leave

assert sys.argv[1:] == ["-m", "tightfit.train", "worker.json"], sys.argv
stop = Stop().install()
stop.arm()
rank = os.environ["SLURM_PROCID"]
Path(f"pid-{{rank}}.new").write_text(str(os.getpid()))
Path(f"pid-{{rank}}.new").rename(f"pid-{{rank}}")
while not stop.is_asked:
    time.sleep(0.01)
time.sleep(1)
Path(f"saved-{{rank}}").write_text(str(stop.why))
leave(4)
' "$@"
"""


def text_of(make_plan: MakePlan, gpus: str = "2x8xA100-80GB", target: Target | None = None, **job: Any) -> str:
    plan = make_plan(
        Levers(engine="zero3", offload_optimizer="cpu"), parse_hardware(gpus), Job(model="qwen2.5-7b", **job)
    )
    text = slurm_sbatch(plan, target or Target())
    assert text == slurm_sbatch(plan, target or Target())
    return text


def prepared(text: str, folder: Path, **stand_ins: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a batch file, as SLURM runs it: a copy, from somewhere else."""
    programs = folder / "bin"
    programs.mkdir()
    for name, script in {"srun": SRUN, "scontrol": SCONTROL, **stand_ins}.items():
        (programs / name.replace("_", "-")).write_text(script, encoding="utf-8")
        (programs / name.replace("_", "-")).chmod(0o755)
    spool = folder / "spool"
    spool.mkdir()
    (spool / "slurm_script").write_text(text, encoding="utf-8")
    env = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_JOB_ID": "4711",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    return ["bash", str(spool / "slurm_script")], env


def run(text: str, folder: Path, *arguments: str) -> Any:
    command, env = prepared(text, folder, python=NOTE, llamafactory_cli=NOTE)
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=env, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "note.json").read_text(encoding="utf-8"))


def wait_for(*paths: Path) -> None:
    deadline = patience.now() + 20
    while not all(path.exists() for path in paths):
        assert patience.now() < deadline, f"{paths} never came"
        time.sleep(0.02)


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


def test_one_task_a_gpu(make_plan: MakePlan) -> None:
    asked = directives(text_of(make_plan))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"], asked["mem"]) == ("2", "8", "gpu:8", "0")
    assert "time" not in asked


def test_it_is_told_in_time_to_save(make_plan: MakePlan) -> None:
    name, _, seconds = directives(text_of(make_plan))["signal"].partition("@")
    assert name == "USR1"
    assert 300 < int(seconds) <= 65_535


def test_what_saves_on_no_signal_is_sent_none(make_plan: MakePlan) -> None:
    asked = directives(text_of(make_plan, target=Target(launcher="llamafactory")))
    assert "signal" not in asked
    assert asked["ntasks-per-node"] == "1"


def test_a_time_limit_leaves_room_to_save(make_plan: MakePlan) -> None:
    assert directives(text_of(make_plan, timeout="12h"))["time"] == str(12 * 60 + 30)


def test_dcus_have_a_name_of_their_own(make_plan: MakePlan) -> None:
    assert directives(text_of(make_plan, "2x8xK100-64GB"))["gres"] == "dcu:8"


def test_ranks_meet_on_the_first_node(make_plan: MakePlan, tmp_path: Path) -> None:
    note = run(text_of(make_plan, target=Target(port=29777, gpu_ids=tuple(range(8)))), tmp_path, "--no-probe")
    assert note["argv"][1:] == ["-m", "tightfit.train", "worker.json", "--no-probe"]
    assert json.loads((tmp_path / "srun.json").read_text()) == ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    assert note["cwd"] == str(tmp_path)
    found = slurm_rank(note["env"])
    assert found is not None
    assert (found.address, found.port) == ("gpu01", 29777)
    assert note["env"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert note["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7", "SLURM's choice must stand"
    assert "CUDA_DEVICE_ORDER" not in note["env"]
    assert int(note["env"]["OMP_NUM_THREADS"]) >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("case", [pytest.param("time limit", marks=pytest.mark.slow), "time limit, B:", "preemption"])
def test_every_signal_of_slurms_lets_the_ranks_save(make_plan: MakePlan, tmp_path: Path, case: str) -> None:
    command, env = prepared(text_of(make_plan), tmp_path, python=RANK.format(python=sys.executable))
    batch = subprocess.Popen(command, env={**env, "TASKS": "2"}, cwd="/", start_new_session=True)
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    wait_for(*pids)
    if case == "time limit, B:":
        batch.send_signal(signal.SIGUSR1)
    else:
        for pid in pids:
            os.kill(int(pid.read_text()), signal.SIGUSR1 if case == "time limit" else signal.SIGTERM)
    if case == "preemption":
        batch.send_signal(signal.SIGTERM)
    assert batch.wait(20) == 4
    name = "SIGTERM" if case == "preemption" else "SIGUSR1"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [name, name]


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


def test_it_is_queued_again_and_its_log_goes_on(make_plan: MakePlan) -> None:
    text = text_of(make_plan)
    asked = directives(text)
    assert "requeue" in asked
    assert asked["open-mode"] == "append"
    assert sum("srun " in line and not line.startswith("#") for line in text.splitlines()) == 1


def test_on_one_node_it_is_written_where_slurm_is_the_target(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero3"), parse_hardware("8xA100-80GB"), Job(model="qwen2.5-7b"))
    assert "slurm.sbatch" not in render(plan, Target())
    asked = directives(render(plan, Target(cluster="slurm"))["slurm.sbatch"])
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("1", "8")
