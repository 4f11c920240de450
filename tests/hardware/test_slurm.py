"""SLURM's variables in torchrun's words."""

from __future__ import annotations

import pytest

from tightfit.hardware.slurm import first_host, has_its_own_gpu, slurm_node, slurm_rank
from tightfit.types import ConfigError

TWO_NODES = {
    "SLURM_JOB_ID": "812345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
STEP = TWO_NODES | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-12,31],login1", "gpu07"),
        ("a-b[1,3]", "a-b1"),
        ("rack1-[003]-ib", "rack1-003-ib"),
        ("x.cluster.org,y", "x.cluster.org"),
    ],
)
def test_the_first_machine_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_list_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="--master-addr"):
        first_host("")


def test_one_task_a_node() -> None:
    node = slurm_node(STEP)
    assert node is not None
    assert (node.rank, node.nodes, node.address) == (1, 2, "gpu07")
    assert node.port == 20_000 + 812345 % 20_000
    named = slurm_node(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "3000"})
    assert named is not None
    assert (named.address, named.port) == ("head", 3000)


@pytest.mark.parametrize(
    "env",
    [{}, {"SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"}, {"SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_ID": "0"}],
)
def test_one_node_or_no_slurm_is_nothing_special(env: dict[str, str]) -> None:
    assert slurm_node(env) is None


def test_several_nodes_need_srun() -> None:
    with pytest.raises(ConfigError, match="srun --ntasks-per-node=1"):
        slurm_node(TWO_NODES)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_task_a_gpu_would_start_every_rank_many_times(nodes: str) -> None:
    env = STEP | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": nodes}
    with pytest.raises(ConfigError, match="8 tasks"):
        slurm_node(env)


def test_a_worker_a_task() -> None:
    env = STEP | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    rank = slurm_rank(env)
    assert rank is not None
    assert (rank.rank, rank.local_rank, rank.world, rank.local_world, rank.address) == (5, 1, 8, 4, "gpu07")
    assert slurm_rank({}) is None
    assert slurm_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("env", "own"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPUS_PER_TASK": "a100:1"}, True),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"}, True),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:h100:1"}, True),
        ({"SLURM_GPUS_PER_TASK": "2"}, False),
        ({"SLURM_GPUS_PER_TASK": "11"}, False),
        ({"SLURM_TRES_PER_TASK": "cpu=1"}, False),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:4"}, False),
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_LOCALID": "0"}, False),
    ],
)
def test_a_gpu_for_each_task(env: dict[str, str], own: bool) -> None:
    """The last one is a torchrun that is itself the task: its ranks share the GPU."""
    assert has_its_own_gpu({"SLURM_LOCALID": "3", **env}, 3) is own
