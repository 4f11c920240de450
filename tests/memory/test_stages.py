"""A pipeline's layers and its order: every pass once, nothing before what it needs, nobody waits for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tightfit.memory.stages import Pass, order_actions, order_passes, split_layers
from tightfit.model.load import load_model
from tightfit.types import Levers

ROWS = [(gpus, per_gpu, count) for gpus in (2, 3, 4, 8) for per_gpu in (1, 2, 3) for count in (1, 2, 3, 4, 7, 8, 17)]


@pytest.mark.parametrize(("gpus", "per_gpu"), [(2, 1), (4, 1), (2, 2), (3, 4), (16, 2)])
def test_every_layer_belongs_to_one_stage(gpus: int, per_gpu: int) -> None:
    shape = load_model("llama-3.1-8b")
    stages = split_layers(shape, Levers(pipeline_parallel=gpus, stages_per_gpu=per_gpu))
    assert [layer for stage in stages for layer in stage] == list(range(shape.n_layers))
    assert len(stages) == gpus * per_gpu
    assert min(map(len, stages)) >= 1
    assert len(stages[-1]) <= max(map(len, stages))  # it has the head as well


@pytest.mark.parametrize(("gpus", "per_gpu", "count"), ROWS)
def test_both_ends_of_each_pair_meet_in_the_same_order(gpus: int, per_gpu: int, count: int) -> None:
    actions = order_actions(gpus, per_gpu, count)
    every = {
        Pass(direction, stage, number)
        for direction in ("forward", "backward")
        for stage in range(gpus * per_gpu)
        for number in range(count)
    }
    ran = [each.of for one in actions for each in one if each.what == "run"]
    assert len(ran) == len(every)
    assert set(ran) == every
    other = {"send": "receive", "receive": "send"}
    for one in range(gpus):
        for two in range(one + 1, gpus):
            here = [(each.what, each.of.direction, each.of.micro_batch) for each in actions[one] if each.peer == two]
            there = [(each.what, each.of.direction, each.of.micro_batch) for each in actions[two] if each.peer == one]
            assert here == [(other[what], *rest) for what, *rest in there]


def test_one_stage_per_gpu_has_no_more_in_flight_than_gpus_follow() -> None:
    for gpu in range(4):
        flying = most = 0
        for each in order_passes(gpu, 4, 1, 9):
            flying += 1 if each.direction == "forward" else -1
            most = max(most, flying)
        assert most == 4 - gpu
        assert flying == 0


def test_the_last_gpu_runs_backward_what_it_ran_forward() -> None:
    passes = list(order_passes(3, 4, 1, 5))
    assert [each.direction for each in passes] == ["forward", "backward"] * 5
    assert all(one.micro_batch == two.micro_batch for one, two in list(pairwise(passes))[::2])
