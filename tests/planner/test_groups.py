"""Groups of GPUs that have a copy of the weights each: what they hold, what they send, and where a plan takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit import memory
from tightfit.hardware.named import read_hardware
from tightfit.hardware.words import connect
from tightfit.inputs.flags import levers_from_flags
from tightfit.inputs.layouts import check_layout
from tightfit.job.file import job_from_flags
from tightfit.model.load import load_model, shape_from_config
from tightfit.pace import pace
from tightfit.planner import plan
from tightfit.planner.candidates import corners
from tightfit.types import ConfigError, Hardware, Levers

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128_256, "num_hidden_layers": 32,
         "tie_word_embeddings": False}  # fmt: skip
SHAPE = shape_from_config(LLAMA, "llama-8b")


def levers(**flags: Any) -> Levers:
    return levers_from_flags({"engine": "fsdp2", "seq": 4096, **flags}, SHAPE)


def nodes(count: int, network: str = "100Gb") -> Hardware:
    return connect(read_hardware(f"{count}x8xA100-80GB"), network, None)


def test_a_group_holds_what_as_many_gpus_alone_would() -> None:
    """But for the buffers of one more communicator."""
    alone = memory.estimate(SHAPE, levers(), 8, nodes(1)).gpu
    group = memory.estimate(SHAPE, levers(shard_within=8), 32, nodes(4)).gpu
    assert group.peak_bytes == alone.peak_bytes
    assert group.overhead["communicator"] == 2 * alone.overhead["communicator"]
    assert group.required_bytes == alone.required_bytes + alone.overhead["communicator"]


def test_hpz_keeps_the_weights_once_more_among_fewer() -> None:
    flat = memory.estimate(SHAPE, levers(engine="zero3"), 32, nodes(4)).gpu
    group = memory.estimate(SHAPE, levers(engine="zero3", shard_within=8), 32, nodes(4)).gpu
    more = group.phases["backward"].total_bytes - flat.phases["backward"].total_bytes
    assert more == -(-2 * SHAPE.parameters // 8)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_the_network_matters_less_to_groups(engine: str) -> None:
    """With adapters nothing but their gradients crosses from node to node."""
    for method in ("full", "lora"):
        wide, narrow = nodes(4, "8x400Gb"), nodes(4, "25Gb")
        flat, group = (levers(engine=engine, method=method, accum=4, shard_within=size) for size in (0, 8))
        lost = [pace(SHAPE, each, narrow).step_s - pace(SHAPE, each, wide).step_s for each in (flat, group)]
        assert lost[1] < 0.75 * lost[0]
        if method == "lora":
            assert lost[1] < 0.05 * lost[0]


def test_groups_of_one_node_send_nothing_between_nodes_and_groups_of_all_are_none() -> None:
    hardware = nodes(2)
    assert pace(SHAPE, levers(shard_within=16), hardware).step_s == pace(SHAPE, levers(), hardware).step_s


def test_what_copies_tell_each_other_is_sent_once_a_step() -> None:
    hardware = nodes(4, "10Gb")

    def communicates(accum: int) -> float:
        return pace(SHAPE, levers(accum=accum, shard_within=8), hardware).causes["communication"]

    assert communicates(8) < 1.5 * communicates(1)


def test_a_plan_takes_groups_where_the_network_is_slow_and_never_on_one_node() -> None:
    flags = {"model": LLAMA, "seq": 4096, "effective_batch": 128, "pipeline_parallel": 1}
    slow = plan(job_from_flags(flags), SHAPE, nodes(4, "25Gb")).chosen
    assert slow is not None
    assert slow.levers.shard_within == 8
    one = plan(job_from_flags(flags), SHAPE, nodes(1))
    assert one.chosen is not None
    assert {way.levers.shard_within for way in (one.chosen, *one.alternatives)} == {0}


@pytest.mark.parametrize(
    ("flags", "world", "why"),
    [
        ({"shard_within": 5}, 32, "inputs.groups-divide"),
        ({"engine": "zero2", "shard_within": 8}, 32, "inputs.groups-need-sharding"),
        ({"engine": "zero3", "shard_within": 8, "method": "qlora"}, 32, "inputs.no-second-copy"),
        ({"engine": "zero3", "shard_within": 8, "offload_param": "cpu"}, 32, "inputs.no-second-copy"),
    ],
)
def test_what_cannot_be_is_said(flags: dict[str, Any], world: int, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(levers(**flags), SHAPE, world)
    assert raised.value.said.id == why


def test_other_trainers_have_groups_by_deepspeed_alone() -> None:
    check_layout(replace(levers(engine="zero3", shard_within=8), trainer="trainer"), SHAPE, 32)
    with pytest.raises(ConfigError):
        check_layout(replace(levers(shard_within=8), trainer="trainer"), SHAPE, 32)


def test_ranks_that_share_sequences_count_once_in_a_batch() -> None:
    flags = {"model": LLAMA, "seq": 4096, "effective_batch": 12, "sequence_parallel": 4, "engine": "zero2"}
    found = plan(job_from_flags(flags), SHAPE, nodes(1)).chosen
    assert found is not None
    assert found.levers.micro_batch * found.levers.accumulation == 6
    assert found.effective_batch == 12
    assert found.levers.compile == "off"


@pytest.mark.parametrize(
    ("model", "flags", "why", "fix"),
    [
        ("llama-8b", {"sequence_parallel": 3}, "inputs.sharing-heads", "use 1, 2, 4, 8, 16 or 32"),
        ("llama-8b", {"sequence_parallel": 16}, "inputs.sharing-gpus", "use 1, 2, 4 or 8"),
        ("llama-8b", {"sequence_parallel": 2, "compile": "layers"}, "inputs.compile-sharing", "use --compile off"),
        ("tiny_mamba", {"sequence_parallel": 2}, "inputs.sharing-scan", "leave it out"),
    ],
)
def test_sequences_that_cannot_be_shared(model: str, flags: dict[str, Any], why: str, fix: str) -> None:
    shape = SHAPE if model == SHAPE.name else load_model(model)
    with pytest.raises(ConfigError) as raised:
        check_layout(levers_from_flags(flags, shape, Levers(engine="fsdp2")), shape, 8)
    assert raised.value.said.id == why
    assert str(raised.value.said).endswith(fix)


def test_other_trainers_share_no_sequences() -> None:
    with pytest.raises(ConfigError):
        check_layout(replace(levers(sequence_parallel=2), trainer="trainer"), SHAPE, 8)


# --- sequences that GPUs share -------------------------------------------------------------------


def test_gpus_that_share_a_sequence_hold_a_part_of_what_it_takes() -> None:
    """Weights, gradients and states are as they were; of activations each has its part, of attention's output two."""
    long = {"seq": 65_536, "checkpointing": "none", "loss": "fused"}
    held = {n: memory.estimate(SHAPE, levers(**long, sequence_parallel=n), 8, nodes(1)).gpu for n in (1, 2, 8)}
    kept = {n: each.phases["forward"].components["activations"] for n, each in held.items()}
    assert kept[8] == pytest.approx(kept[1] / 8, rel=0.05)
    assert kept[2] == pytest.approx(kept[1] / 2, rel=0.05)
    rest = {n: each.phases["step"].total_bytes for n, each in held.items()}
    assert rest[1] == rest[2] == rest[8]


def test_sharing_takes_the_arithmetic_apart_and_costs_an_exchange() -> None:
    one, eight = (pace(SHAPE, levers(seq=65_536, sequence_parallel=n), nodes(1)) for n in (1, 8))
    assert eight.causes["arithmetic"] == pytest.approx(one.causes["arithmetic"] / 8, rel=0.02)
    assert eight.causes["communication"] > one.causes["communication"]
    assert eight.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.2)  # of an eighth of the sequences
    assert eight.step_s < one.step_s / 6


def test_a_plan_for_a_long_sequence_shares_it() -> None:
    job = job_from_flags({"model": LLAMA, "seq": 131_072, "effective_batch": 8, "host_ram": "256GB"})
    chosen = plan(job, SHAPE, replace(nodes(1), host_ram_bytes=256 << 30)).chosen
    assert chosen is not None
    assert chosen.levers.sequence_parallel > 1
    assert chosen.levers.micro_batch * chosen.levers.accumulation * chosen.levers.data_ranks(chosen.world) == 8


def test_a_plan_for_a_short_one_does_not() -> None:
    found = plan(job_from_flags({"model": LLAMA, "seq": 4096, "effective_batch": 32}), SHAPE, nodes(1))
    assert found.chosen is not None
    assert {way.levers.sequence_parallel for way in (found.chosen, *found.alternatives)} == {1}


def test_tiles_of_an_mlp_hold_less_and_cost_time_only_where_nothing_recomputes() -> None:
    long, depths = {"seq": 65_536, "loss": "fused"}, ("full", "none")
    cut, whole = ([levers(**long, checkpointing=depth, mlp=how) for depth in depths] for how in ("tiled", "plain"))
    less = [memory.estimate(SHAPE, each, 8, nodes(1)).gpu.peak_bytes for each in (*cut, *whole)]
    assert less[0] < 0.9 * less[2]
    assert less[1] < 0.7 * less[3]
    times = [pace(SHAPE, each, nodes(1)).step_s for each in (*cut, *whole)]
    assert times[0] == pytest.approx(times[2], rel=0.02)
    assert 1.05 * times[3] < times[1] < 1.3 * times[3]


@pytest.mark.parametrize(("seq", "mlps"), [(16_384, {"plain", "tiled"}), (8192, {"plain"})])
def test_tiles_are_tried_of_long_sequences_alone(seq: int, mlps: set[str]) -> None:
    tried = corners(SHAPE, levers(seq=seq), frozenset(), nodes(1), 8)
    assert {corner.rest.mlp for corner in tried} == mlps
