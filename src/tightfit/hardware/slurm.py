"""What SLURM says about where a process stands, in torchrun's words.

Two ways lead through `srun`: one task a node, each a `tightfit train` that starts the ranks of its node; or one task a
GPU, each a worker that is a rank itself. Everything is read from the variables that `srun` sets, so that no tool of
SLURM's is needed on the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tightfit.messages import Message
from tightfit.types import ConfigError

_FIRST_PORT, _PORTS = 20_000, 20_000
"""A job's port is made from its number: all its nodes make the same, and two jobs seldom do."""
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class SlurmNode(NamedTuple):
    """This node among those of a job, under `srun` with one task a node."""

    rank: int
    nodes: int
    address: str  # the first node, where the ranks meet
    port: int


class SlurmRank(NamedTuple):
    """This process among the ranks, under `srun` with one task a GPU."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    address: str
    port: int


def slurm_node(env: Mapping[str, str]) -> SlurmNode | None:
    """This node's place; None: there is one node only, or no SLURM."""
    nodes = _number(env, *_NODES)
    if nodes is None:
        return None
    in_step = _number(env, "SLURM_STEP_ID", "SLURM_STEPID") is not None
    tasks = _number(env, *_TASKS) if in_step else None
    if tasks is not None and tasks > nodes:
        raise ConfigError(Message("machine.too-many-tasks", tasks=tasks, nodes=nodes))
    if nodes == 1:
        return None
    if not in_step:
        raise ConfigError(Message("machine.not-under-srun", nodes=nodes))
    rank = _number(env, "SLURM_NODEID", "SLURM_PROCID")
    if rank is None:
        raise ConfigError(Message("machine.which-node"))
    return SlurmNode(rank, nodes, *_meeting(env))


def slurm_rank(env: Mapping[str, str]) -> SlurmRank | None:
    """This process's place among the ranks; None: SLURM started no ranks."""
    rank, world = _number(env, "SLURM_PROCID"), _number(env, *_TASKS)
    if rank is None or world is None or world < 2:
        return None
    nodes = _number(env, *_NODES) or 1
    local_world = _number(env, "SLURM_NTASKS_PER_NODE") or world // nodes
    return SlurmRank(rank, _number(env, "SLURM_LOCALID") or 0, world, local_world, *_meeting(env))


def has_its_own_gpu(env: Mapping[str, str], local_rank: int) -> bool:
    """Whether SLURM gave this rank one GPU that no other sees (`--gpus-per-task=1`).

    Under a torchrun that is a single task, all ranks of the node would share that one: their number is not SLURM's."""
    gpus, gres = env.get("SLURM_GPUS_PER_TASK", ""), env.get("SLURM_TRES_PER_TASK", "").split(",")
    one = re.fullmatch(r"(?:[^:]+:)?1", gpus) or any(
        re.fullmatch(r"gres/gpu(?:[:=][^:=]+)?[:=]1", each) for each in gres
    )
    return bool(one) and _number(env, "SLURM_LOCALID") == local_rank


def first_host(nodes: str) -> str:
    """The first machine of a list such as `gpu[07-12,31],login1`."""
    found = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodes.strip())
    if not found:
        raise ConfigError(Message("machine.unreadable-nodes", nodes=nodes[:60]))
    return found[1] + (found[2] or "") + (found[3] or "")


def _meeting(env: Mapping[str, str]) -> tuple[str, int]:
    """Address and port at which the ranks meet."""
    port = _number(env, "MASTER_PORT") or _FIRST_PORT + (_number(env, "SLURM_JOB_ID") or 0) % _PORTS
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], port
    return first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""), port


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that holds a number."""
    numbers = (int(env[name]) for name in names if re.fullmatch("[0-9]{1,12}", env.get(name, "")))
    return next(numbers, None)
