"""Real ranks for tests: a plan for so many CPU processes, the worker in each of them, and what they said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Rank, run_workers

import warm_desk
from compiling import compile_part
from ports import reserve_port
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.job.file import job_from_flags
from tightfit.messages import from_json
from tightfit.planner import plan
from tightfit.types import Gpu, Hardware

GIB = 2**30
LIMIT_S = 240
CAPABILITY = """
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda self: {}
"""


@dataclass(frozen=True)
class Ran:
    """What a run left behind."""

    folder: Path
    codes: list[int]
    events: list[dict[str, Any]]
    stderr: list[str]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    @property
    def losses(self) -> list[float]:
        return [each["loss"] for each in self.of("step")]


def write_plan(folder: Path, world: int, **flags: Any) -> Path:
    """The files of a job on `world` CPU ranks, with these flags; the run's folder is beside them. The model may be the
    fields of a config."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(flags["model"], dict):
        (folder / "config.json").write_text(json.dumps(flags["model"]))
        flags["model"] = str(folder / "config.json")
    hardware = Hardware(
        gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=12 * GIB),
        gpus_per_node=world,
        host_ram_bytes=24 * GIB,
        nvme_bytes=100 * GIB if "nvme_path" in flags else None,
    )
    flags.setdefault("scan", "torch")
    if "mamba" not in str(flags["model"]):
        del flags["scan"]
    job = job_from_flags({"output": str(folder / "run"), **flags})
    found = plan(job, None, hardware)
    assert found.chosen is not None
    assert found.chosen.world == world
    for name, text in render(found, Target()).items():
        (folder / name).write_text(text)
    return folder


def edit(folder: Path, **changes: Any) -> Path:
    """Change the worker's orders: `data__path=…` sets the field `path` of the block `data`."""
    orders = json.loads((folder / "worker.json").read_text())
    for key, value in changes.items():
        *blocks, leaf = key.split("__")
        tree = orders
        for block in blocks:
            tree = tree[block]
        tree[leaf] = value
    (folder / "worker.json").write_text(json.dumps(orders))
    return folder


def run_ranks(
    folder: Path,
    *options: str,
    world: int | None = None,
    cache: Path | None = None,
    first: str = "",
    fresh: bool = False,
    fp16: bool | None = None,
    draws: bool = False,
) -> Ran:
    """Run the ranks of a plan. `first`: Python that each executes before the worker begins, or instead if it leaves.

    `fresh`: each is a Python of its own from its start, and not a fork of a warm one. `fp16`: what DeepSpeed is told
    of the processor; None: a plan in fp16 runs on any, since torch can do without, and others see what there is.
    `draws`: the pictures at the end too.
    """
    orders = json.loads((folder / "worker.json").read_text())
    if fp16 is not None or orders["levers"]["precision"] == "fp16":
        first = f"{CAPABILITY.format(fp16 is not False)}\n{first}"
    world = orders["world"]["ranks"] if world is None else world
    argv, said = [str(folder / "worker.json"), *options], [folder / f"said-{rank}" for rank in range(world)]
    cache = cache or folder / "cache"
    if fresh:
        command = [sys.executable, "-m", "tightfit.train", *argv]
        started = start_ranks(command, world, cache, stdout=subprocess.DEVNULL)
        try:
            for process, path in zip(started, said, strict=True):
                path.write_text(process.communicate(timeout=LIMIT_S)[1])
        finally:
            for process in started:
                process.kill()
        codes = [process.returncode for process in started]
    else:
        ranks = [
            Rank(each, str(path), first, draws) for each, path in zip(environments(world, cache), said, strict=True)
        ]
        codes = run_workers(argv, ranks)
    return read_run(Path(orders["saving"]["folder"]), codes, said)


def read_run(run: Path, codes: list[int], said: list[Path]) -> Ran:
    log = run / "events.jsonl"
    events = [in_words(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    return Ran(run, codes, events, [path.read_text() for path in said])


def in_words(event: dict[str, Any]) -> dict[str, Any]:
    """Messages of an event as a reader of English sees them."""

    def told(value: object) -> object:
        if isinstance(value, list):
            return [told(each) for each in value]
        return str(from_json(value)) if isinstance(value, dict) and "message" in value else value

    return {name: told(value) for name, value in event.items()}


def start_ranks(
    command: list[str], world: int, cache: Path, stdout: int = subprocess.PIPE
) -> list[subprocess.Popen[str]]:
    """So many processes of a command, as a launcher starts them."""
    compile_part("cpu_adam")
    return [
        subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
        for environment in environments(world, cache)
    ]


def figures_of(script: str, world: int, cache: Path) -> dict[str, float]:
    """What rank 0 of so many prints as JSON: each is a fork of a warm process and runs this file beside ours."""
    code = f"import runpy; runpy.run_path({str(Path(__file__).with_name(script))!r}, run_name='__main__')"
    with warm_desk.turn.taken(True), ExitStack() as stack:
        ranks = [warm_desk.Process(env=each, ranks=True, code=code) for each in environments(world, cache)]
        for rank in ranks:
            stack.callback(rank.kill)
        said = [rank.communicate(LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(stderr for _, stderr in said)
    found: dict[str, float] = json.loads(said[0][0].splitlines()[-1])
    return found


def environments(world: int, cache: Path) -> list[dict[str, str]]:
    """What a launcher tells each rank."""
    common = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": reserve_port(),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(cache),
        "TIGHTFIT_LAUNCHER": "tests",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
