"""The stages of a pipeline: which layers each has, and what a GPU computes in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.memory.pipeline import count_waiting, lay_out
from tightfit.memory.stages import Pass, order_actions, order_passes, split_layers
from tightfit.memory.weights import of as weights_of
from tightfit.model.load import shape_from_config
from tightfit.types import Levers, ModelShape

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128_256, "num_hidden_layers": 32,
         "tie_word_embeddings": False}  # fmt: skip
SMALL = {**LLAMA, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "tie_word_embeddings": True}
GEMMA = {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256_000, "num_hidden_layers": 26}  # fmt: skip
SHAPES = {name: shape_from_config(config, name) for name, config in
          (("llama", LLAMA), ("tied", SMALL), ("two kinds", GEMMA))}  # fmt: skip
ROWS = [(2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 3), (8, 2)]


def levers(gpus: int, stages: int = 1, **more: Any) -> Levers:
    return Levers(engine="fsdp2", pipeline_parallel=gpus, stages_per_gpu=stages, **{"accumulation": gpus, **more})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(("gpus", "stages"), ROWS)
def test_stages_have_every_layer_once(shape: ModelShape, gpus: int, stages: int) -> None:
    split = split_layers(shape, levers(gpus, stages))
    assert len(split) == gpus * stages
    assert min(map(len, split)) >= 1
    assert [layer for layers in split for layer in layers] == list(range(shape.n_layers))
    row = lay_out(shape, levers(gpus, stages))
    assert sum(gpu.alike for gpu in row) == gpus
    for gpu in row:
        assert [stage.number for stage in gpu.stages] == list(range(gpu.place, gpus * stages, gpus))
        for stage in gpu.stages:
            had = [stage.shape.blocks[kind] for kind in stage.shape.pattern]
            assert had == [shape.blocks[shape.pattern[at]] for at in split[stage.number]]
            assert stage.shape.receives is (stage.number > 0)
            assert stage.shape.hands_on is (stage.number < gpus * stages - 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(("gpus", "stages"), ROWS)
@pytest.mark.parametrize("frozen", [0, 5])
def test_stages_together_have_the_weights_of_the_model_once(
    shape: ModelShape, gpus: int, stages: int, frozen: int
) -> None:
    """A tied head is there twice: it trains, whatever of the lowest layers is frozen."""
    asked = levers(gpus, stages, frozen_layers=frozen)
    row = lay_out(shape, asked)
    again = shape.before[0].numel if shape.tied else 0
    assert sum(gpu.alike * gpu.shape.parameters for gpu in row) == shape.parameters + again
    trained = sum(gpu.alike * weights_of(gpu.shape, gpu.levers(asked)).trainable_numel for gpu in row)
    assert trained == weights_of(shape, asked).trainable_numel + again


def test_the_stage_with_the_head_has_fewer_layers() -> None:
    assert list(map(len, split_layers(SHAPES["llama"], levers(4)))) == [8, 9, 9, 6]
    assert len(split_layers(SHAPES["tied"], levers(4))[-1]) < 5


def test_stages_have_the_layers_that_were_asked_for() -> None:
    asked = levers(2, 2, stage_layers="3,9,15,5")
    assert list(map(len, split_layers(SHAPES["llama"], asked))) == [3, 9, 15, 5]
    assert [gpu.shape.n_layers for gpu in lay_out(SHAPES["llama"], asked)] == [18, 14]


@pytest.mark.parametrize(("gpus", "stages"), ROWS)
def test_the_order_is_that_of_torch(gpus: int, stages: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for micro_batches in range(gpus, 4 * gpus + 1, gpus if stages > 1 else 1):
        if stages == 1:
            made = object.__new__(schedules.Schedule1F1B)
            made._stage, made._num_stages = type("Stage", (), {"group_size": gpus}), gpus
            made._n_microbatches, made.pp_group_size = micro_batches, gpus
            orders = made._get_pipeline_order()
        else:
            made = object.__new__(schedules.ScheduleInterleaved1F1B)
            made.n_local_stages, made.pp_group_size, made._n_microbatches = stages, gpus, micro_batches
            made.microbatches_per_round = micro_batches // max(1, micro_batches // gpus)
            orders = {place: made._calculate_single_rank_operations(place) for place in range(gpus)}
        for place, order in orders.items():
            theirs = [str(action) for action in order if action is not None and "REDUCE" not in str(action)]
            if stages == 1 and place == gpus - 1:  # torch's picture, which nothing runs by, counts from 1 here
                theirs = [f"{place}{turn}{micro}" for micro in range(micro_batches) for turn in "FB"]
            ours = order_passes(place, gpus, stages, micro_batches)
            assert [f"{each.stage}{each.direction[0].upper()}{each.micro_batch}" for each in ours] == theirs


def test_how_many_micro_batches_wait() -> None:
    def most(gpus: int, stages: int, micro_batches: int, place: int) -> int:
        return max(
            sum(each.begun) for stage in count_waiting(gpus, micro_batches, place, (1,) * stages) for each in stage
        )

    assert [most(4, 1, 16, place) for place in range(4)] == [3, 2, 1, 0]
    assert most(4, 1, 2, 0) == 1  # no more than there are
    assert [most(4, 2, 16, place) for place in range(4)] == [10, 8, 6, 4]
    assert most(4, 2, 1000, 0) == most(4, 2, 16, 0)


@pytest.mark.parametrize("place", range(4))
def test_what_is_between_gpus_is_what_the_worker_keeps(place: int) -> None:
    """Of one stage on each GPU it is known without following the order."""
    for micro_batches in (4, 5, 16):
        arriving, sent, most = set[Pass](), set[str](), 0
        for action in order_actions(4, 1, micro_batches)[place]:
            if action.what == "run":
                arriving.discard(action.of)
                most = max(most, len(arriving) + len(sent))
            elif action.what == "receive":
                arriving.add(action.of)
            else:
                sent.add(action.of.direction)
        assert most == count_waiting(4, micro_batches, place, (1,))[0][0].travelling


def test_a_stage_with_more_layers_weighs_more() -> None:
    """Of two moments with as many micro batches in hand the one counts at which more layers keep something."""
    even, uneven = (count_waiting(4, 8, 1, layers)[1] for layers in ((2, 2), (3, 2)))  # the upper stage's turns
    assert [each.begun for each in even] == [(5, 3), (7, 1)]
    assert [each.begun for each in uneven] == [(8, 0), (8, 0)]
