"""Weights and states on NVMe: what DeepSpeed locks in RAM for it, and what goes into files."""

from __future__ import annotations

from dataclasses import replace

from tightfit.inputs.flags import released_at_once
from tightfit.memory import estimate
from tightfit.memory.host import swap_buffer_numel
from tightfit.memory.weights import of
from tightfit.model.load import load_model
from tightfit.types import Buckets, Levers

SHAPE = load_model("qwen2.5-7b")
BOTH = released_at_once(Levers(engine="zero3", offload_optimizer="nvme", offload_param="nvme"))
MEBIBYTE = 2**20


def locked(levers: Levers, world: int) -> int:
    return estimate(SHAPE, levers, world).host.phases["step"].components["buckets"]


def with_buckets(**changes: int) -> Levers:
    return replace(BOTH, buckets=replace(BOTH.buckets, **changes))


def test_a_buffer_holds_the_largest_part_of_a_rank() -> None:
    largest = SHAPE.vocab_size * SHAPE.hidden_size
    for world in (1, 3, 8, 64):
        buffer = swap_buffer_numel(SHAPE, BOTH, world)
        assert largest / world <= buffer < largest / world + 512
        assert buffer % 512 == 0
    assert swap_buffer_numel(SHAPE, with_buckets(param_buffer_size=7), 8) == 7


def test_buffers_of_weights_are_counted_and_sized() -> None:
    buffer = swap_buffer_numel(SHAPE, BOTH, 8)
    more = locked(with_buckets(param_buffer_count=6), 8) - locked(BOTH, 8)
    assert more == 2 * buffer


def test_a_sub_group_is_locked_whole_on_every_rank() -> None:
    """One for the weights, as large as all ranks' parts together; four for the optimizer, of this rank's part."""
    world, sizes = 8, (400_000_000, 100_000_000)
    weights = replace(BOTH, offload_optimizer="cpu")
    for levers, least in ((weights, 2 * world), (BOTH, 2 * world + 4 * Buckets().optimizer_buffer_count)):
        large, small = (
            locked(replace(levers, buckets=replace(levers.buckets, sub_group_size=size)), world) for size in sizes
        )
        assert large - small >= least * 150_000_000
    reading = 2 * Buckets().param_buffer_count * swap_buffer_numel(SHAPE, BOTH, world)
    parameters = SHAPE.parameters
    assert locked(weights, world) - reading == 2 * parameters  # one sub group is the whole model here


def test_small_parts_stay_in_memory() -> None:
    """Below a mebibyte there is no file; below the persistence threshold the whole parameter is on the GPU."""
    for world in (1, 64):
        small = [
            numel
            for numel in of(SHAPE, BOTH).trainable
            if numel > BOTH.buckets.persistence_threshold and -(-numel // world) * 2 < MEBIBYTE
        ]
        kept = estimate(SHAPE, BOTH, world).host.phases["step"].components.get("weights", 0)
        parts = sum(-(-numel // world) * 2 for numel in small)
        assert parts <= kept <= 2 * parts  # a pinned part takes a power of two
        assert bool(small) == (world == 64)
    alone = released_at_once(Levers(engine="zero3", offload_param="nvme"))
    files = estimate(SHAPE, alone, 64).host.nvme_bytes_per_node
    whole = 2 * SHAPE.parameters
    assert 0.85 * whole < files < whole
