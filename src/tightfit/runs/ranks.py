"""What each rank of a node is told: torchrun's variables, its GPUs, those of `formats/launch/environment.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.formats.launch.environment import HIP, allocator, host
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.surroundings import cores, inherited
from tightfit.runs.folder import RunFolder
from tightfit.runs.launch import RankStart
from tightfit.runs.worker_file import WorkerFile

WORKER = (sys.executable, "-m", "tightfit.train")
"""What a rank is, before the name of its config."""
LAUNCHER = "TIGHTFIT_LAUNCHER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks meet, and which node this is."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which GPUs the ranks of this node may see."""

    variable: str
    words: tuple[str, ...] | None
    """In the words of that variable; None: as the user's own environment says."""
    others: int = 0
    """GPUs of this node that other runs have: each rank gets its share of the cores, and so do theirs."""


def rank_starts(
    worker: WorkerFile, meeting: Meeting, sight: Sight, folder: RunFolder, command: Sequence[str]
) -> list[RankStart]:
    """The ranks of this node. `command`: what starts one, with its options."""
    here = worker.gpus_per_node
    shared = _environment(worker, meeting, sight)
    starts = []
    for local in range(here):
        rank = meeting.node * here + local
        own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
        name = f"rank-{rank}"
        starts.append(
            RankStart(
                name=name,
                rank=rank,
                command=tuple(command),
                environment=inherited({**shared, **own}),
                log=folder.log(name),
            )
        )
    return starts


def launcher_start(folder: RunFolder, meeting: Meeting, options: Sequence[str]) -> RankStart:
    """Several nodes from one: the rendered script, which reaches the others."""
    environment = inherited({"MASTER_PORT": str(meeting.port), LAUNCHER: "deepspeed"})
    command = ("bash", str(folder.plan / "launch.sh"), *options)
    return RankStart(name="launcher", rank=0, command=command, environment=environment, log=folder.log("launcher"))


def worker_command(folder: RunFolder, options: Sequence[str], worker: Sequence[str] = WORKER) -> tuple[str, ...]:
    """What one rank is started with."""
    return (*worker, str(folder.plan / WORKER_FILE), *options)


def _environment(worker: WorkerFile, meeting: Meeting, sight: Sight) -> dict[str, str | None]:
    """What all ranks of the node are told alike; None: taken away."""
    told: dict[str, str | None] = {
        "WORLD_SIZE": str(worker.ranks),
        "LOCAL_WORLD_SIZE": str(worker.gpus_per_node),
        "GROUP_RANK": str(meeting.node),
        "NODE_RANK": str(meeting.node),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        LAUNCHER: "tightfit",
        "PYTHONUNBUFFERED": "1",  # a log that ends before the crash says nothing
    }
    for variable in (*allocator(worker.vendor), *host(worker.vendor, worker.offload_optimizer, worker.gpus_per_node)):
        if variable.value is not None:
            told[variable.name] = variable.value
    if "OMP_NUM_THREADS" in told:  # there it is shell text, to be worked out where it runs
        told["OMP_NUM_THREADS"] = str(-(-cores() // (worker.gpus_per_node + sight.others)))
    if worker.vendor == "cpu":
        told["CUDA_VISIBLE_DEVICES"] = ""  # or libraries would take a GPU that the plan does not use
    elif sight.words is not None:
        told["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers are those that the maker's tool shows
        if worker.vendor in HIP or sight.variable != "CUDA_VISIBLE_DEVICES":
            told["CUDA_VISIBLE_DEVICES"] = None  # HIP obeys it too, and two that differ leave no GPU
        told[sight.variable] = ",".join(sight.words)
    return told
