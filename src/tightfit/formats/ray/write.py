"""`ray_train.py`: a program that starts the plan's ranks as workers of Ray Train's TorchTrainer.

Ray hands out the GPUs and the numbers, and starts all workers again when one fails; the training itself is our worker,
a process below each of Ray's. It cannot be a call: the worker ends its process by itself, and hears signals in its
main thread, which is Ray's there. Ray's own process group is of no use to it, so that one stays on the host.

The folder must be on a disk that all nodes share, for the checkpoints: `--working-dir` of `ray job submit` would copy
it to each.
"""

from __future__ import annotations

from tightfit.formats.launch.environment import environment
from tightfit.formats.launch.script import comment, dtk, exports
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, untrained
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan
from tightfit.priced import strategy_name

RESTARTS = 3

_PROGRAM = '''\
{head}
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = Path(__file__).resolve().parent
RECORDS = FOLDER / ".ray"
ENDING = RECORDS / "exit-code"
PORT = os.environ.get("MASTER_PORT", "{port}")
# {ended}
ENDED = (0, 2, 4)
# {variables}
START = r"""
set -euo pipefail
{script}
exec "$@"
"""


class HostConfig(TorchConfig):
    # {no_context}
    @property
    def train_func_context(self):
        return contextlib.nullcontext


def start_rank(told):
    here = ray.train.get_context()
    # {address}
    place = {{
        "RANK": str(here.get_world_rank()),
        "LOCAL_RANK": str(here.get_local_rank()),
        "WORLD_SIZE": str(here.get_world_size()),
        "LOCAL_WORLD_SIZE": str(here.get_local_world_size()),
        "MASTER_PORT": told["port"],
        "TIGHTFIT_LAUNCHER": "ray",
    }}
    # {own_process}
    # {pipe}
    reading, writing = os.pipe()
    place["TIGHTFIT_PARENT_FD"] = str(reading)
    worker = [sys.executable, "-m", "tightfit.train", "worker.json", *told["arguments"]]
    env = {{**os.environ, **place}}
    command = ["bash", "-c", START, "ray_train", *worker]
    rank = subprocess.Popen(command, cwd=told["folder"], env=env, pass_fds=[reading])
    os.close(reading)
    code = rank.wait()
    os.close(writing)
    if code not in ENDED:
        raise RuntimeError(f"rank {{place['RANK']}}: exit code {{code}}")
    if here.get_world_rank() == 0:
        Path(told["ending"]).write_text(str(code))


def main():
    RECORDS.mkdir(exist_ok=True)
    ENDING.unlink(missing_ok=True)
    trainer = TorchTrainer(
        start_rank,
        train_loop_config={{"folder": str(FOLDER), "ending": str(ENDING), "port": PORT, "arguments": sys.argv[1:]}},
        torch_config=HostConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers={world}, use_gpu={use_gpu}, resources_per_worker={resources}),
        # {restarts}
        run_config=RunConfig(
            name="tightfit", storage_path=str(RECORDS), failure_config=FailureConfig(max_failures={max_failures})
        ),
    )
    trainer.fit()
    return int(ENDING.read_text())


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_train(plan: Plan, target: Target) -> str:
    """The program; what is added to its line goes to the worker."""
    way = require_way(plan)
    hardware, on_gpu = way.hardware, way.hardware.gpu.vendor != "cpu"
    said = [Message("ray.starts", strategy=strategy_name(way.levers), world=way.world, gpu=hardware.gpu.name)]
    said += [Message("ray.submit"), *untrained(plan.job)]
    if hardware.gpu.vendor == "hygon":
        said.append(Message("ray.hygon", gpus=hardware.gpus_per_node))
    # Ray chooses the GPUs, and hands its choice on.
    variables = [each for each in environment(plan, target) if not each.name.endswith("VISIBLE_DEVICES")]
    script = [*(dtk() if hardware.gpu.vendor == "hygon" else ()), *exports(variables)]
    return _PROGRAM.format(
        head="\n".join(line for each in said for line in comment(each)),
        port=target.port,
        script="\n".join(script),
        world=way.world,
        use_gpu=on_gpu,
        resources='{"CPU": 1, "GPU": 1}' if on_gpu else '{"CPU": 1}',
        max_failures=RESTARTS,
        variables=text("ray.same-variables"),
        ended=text("ray.ended"),
        address=text("ray.address"),
        no_context=text("ray.no-context"),
        own_process=text("ray.own-process"),
        pipe=text("ray.pipe"),
        restarts=text("ray.restarts"),
    )
