"""The real worker is asked to stop before it trains, and started by the batch file as SLURM starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from running import write_plan
from warm import Rank, run_workers

import patience
import warm_desk
from ports import reserve_port
from tightfit.formats.launch.script import slurm_sbatch
from tightfit.formats.target import Target
from tightfit.job.file import job_from_flags
from tightfit.planner import plan
from tightfit.train.__main__ import CODES, STOPPED, read_options
from tightfit.train.loop import Ending
from tightfit.types import Gpu, Hardware

SMALL = {"model": "tiny_llama", "seq": 64, "effective_batch": 4, "max_steps": 2, "engine": "fsdp2"}
SRUN = """#!/bin/sh
shift 2
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NNODES=1 "$@" &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit $?; done
"""


SRUN_SIGNALLED = """#!/bin/sh
shift 2
trap 'kill -USR1 $pids' USR1
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NNODES=1 "$@" &
  pids="$pids $!"
done
for pid in $pids; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
done
exit $code
"""


def test_endings_and_their_codes() -> None:
    assert [CODES[word] for word in get_args(Ending)] == [0, STOPPED, STOPPED]
    assert get_args(Ending) == ("finished", "timeout", "stopped")


def test_how_to_go_on_is_said_on_the_command_line() -> None:
    plain, named = (
        read_options(["worker.json"]),
        read_options(["worker.json", "--resume", "/some/step-4", "--resume-anyway"]),
    )
    assert (plain.resume, plain.resume_anyway) == ("auto", False)
    assert (named.resume, named.resume_anyway) == ("/some/step-4", True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGUSR1, signal.SIGINT))],
)
def test_a_rank_that_waits_for_another_leaves_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """In a call of torch's that lasts for half an hour."""
    folder = write_plan(tmp_path, 2, **SMALL)
    told = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": reserve_port(),
    }
    process = warm_desk.Process(str(folder / "worker.json"), env={**os.environ, **told}, worker=True)
    deadline = patience.now() + 60
    events = tmp_path / "run" / "events.jsonl"
    while not events.exists() or '"start"' not in events.read_text():
        assert patience.now() < deadline
        time.sleep(0.05)
    time.sleep(1)  # it is in the store's wait by now
    process.send_signal(number)
    _, err = process.communicate(timeout=5)
    process.kill()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "errors").exists(), "to be asked is no failure"


STARTS, TELLS = (
    f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    '#!/bin/sh\nenv -0 > "../$SLURM_PROCID.env"\nprintf "%s\\0" "$@" > "../$SLURM_PROCID.words"\n',
)
"""Two kinds of python: one that runs, and one that leaves what it was told."""


def prepare_batch(tmp_path: Path, srun: str, python: str, **job: Any) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a batch file, with stand-ins for SLURM's programs."""
    folder = write_plan(tmp_path / "plan", 2, **job)
    hardware = Hardware(gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=12 << 30), gpus_per_node=2)
    found = plan(job_from_flags(job), None, hardware)
    (folder / "slurm.sbatch").write_text(slurm_sbatch(found, Target()))
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        "srun": srun,
        "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
        "python": python,
    }
    for name, script in stand_ins.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    told = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": "7",
        "MASTER_PORT": reserve_port(),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return ["bash", str(folder / "slurm.sbatch")], {**env, **told}


@pytest.mark.thorough
def test_the_batch_file_starts_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ones train by what each was told."""
    command, env = prepare_batch(tmp_path, SRUN, TELLS, **SMALL, output=str(tmp_path / "run"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    ranks, words = [], set()
    for task in range(2):
        said, given = ((tmp_path / f"{task}.{kind}").read_text()[:-1].split("\0") for kind in ("words", "env"))
        ranks.append(Rank(dict(each.split("=", 1) for each in given), str(tmp_path / f"said-{task}")))
        words.add(tuple(said))
    assert words == {("-m", "tightfit.train", "worker.json")}
    monkeypatch.chdir(tmp_path / "plan")
    assert run_workers(["worker.json"], ranks) == [0, 0], [Path(rank.said).read_text() for rank in ranks]
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"launcher": "srun"' in events or '"launcher":"srun"' in events
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_job_that_slurm_queues_again_goes_on(tmp_path: Path) -> None:
    """The same job is preempted, and runs again with the same number."""
    command, env = prepare_batch(
        tmp_path, SRUN_SIGNALLED, STARTS, **{**SMALL, "max_steps": 300, "output": str(tmp_path / "run")}
    )
    events = tmp_path / "run" / "events.jsonl"
    first = subprocess.Popen(command, env=env, start_new_session=True)
    deadline = patience.now() + 120
    while not (events.exists() and '"event": "step"' in events.read_text()):
        assert patience.now() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(60) == STOPPED
    assert not (tmp_path / "run" / "model").exists()
    saved = max(int(path.name.partition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert again.returncode == 0, again.stderr
    assert f"step {saved}" in again.stdout + again.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()
