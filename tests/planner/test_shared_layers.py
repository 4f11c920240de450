"""Layers that GPUs share: what they hold, what they send, and where a plan takes them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from tightfit import memory
from tightfit.hardware.named import read_hardware
from tightfit.hardware.words import connect
from tightfit.inputs.flags import levers_from_flags
from tightfit.job.file import job_from_flags
from tightfit.model.load import shape_from_config
from tightfit.pace import Clock, KernelChoice, pace
from tightfit.planner import Way, plan
from tightfit.types import Checkpointing, ConfigError, Hardware, Levers

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128_256, "num_hidden_layers": 32,
         "tie_word_embeddings": False}  # fmt: skip
SHAPE = shape_from_config(LLAMA, "llama-8b")


def levers(**flags: Any) -> Levers:
    return levers_from_flags({"engine": "fsdp2", "seq": 4096, **flags}, SHAPE)


def nodes(count: int, network: str = "100Gb") -> Hardware:
    return connect(read_hardware(f"{count}x8xA100-80GB"), network, None)


def test_what_rests_is_shared_by_all_gpus_however_they_share_layers() -> None:
    held = {n: memory.estimate(SHAPE, levers(tensor_parallel=n), 8, nodes(1)) for n in (1, 2, 8)}
    for n, each in held.items():
        assert each.trainable_parameters == SHAPE.parameters
        rests = each.gpu.phases["step"]
        assert rests.total_bytes == pytest.approx(held[1].gpu.phases["step"].total_bytes, rel=1e-4), n
        assert rests.components["weights"] == pytest.approx(4 * SHAPE.parameters / 8, rel=1e-4)


def test_what_is_gathered_and_kept_is_a_part() -> None:
    """Of a layer's matrices and of all that has heads or the width of the MLP; inputs of both blocks are kept whole."""
    flags = {"checkpointing": "none", "loss": "fused", "micro_batch": 1}
    phases = {n: memory.estimate(SHAPE, levers(**flags, tensor_parallel=n), 8, nodes(1)).gpu.phases for n in (1, 2, 8)}
    kept = {n: each["loss"].components["activations"] for n, each in phases.items()}
    gathered = 2 * 32 * 4096 * 4096 * 2
    assert kept[2] - gathered == pytest.approx((kept[1] - gathered) / 2, rel=0.02)
    assert kept[8] - gathered == pytest.approx((kept[1] - gathered) / 8, rel=0.05)
    small = shape_from_config({**LLAMA, "vocab_size": 1024}, "few words")
    layer = sum(tensor.numel for tensor in small.blocks[0].tensors) * 2
    for n in (2, 8):  # the layer at work and the next one, and norms of all that stay
        whole = memory.estimate(small, levers(**flags, tensor_parallel=n), 16, nodes(2)).gpu.phases["backward"]
        assert whole.components["gathered_weights"] == pytest.approx(2 * layer / n, rel=0.05)


def test_sharing_takes_the_arithmetic_apart_and_costs_what_layers_send() -> None:
    one, eight = (pace(SHAPE, levers(tensor_parallel=n, checkpointing="none"), nodes(1)) for n in (1, 8))
    assert eight.causes["arithmetic"] == pytest.approx(one.causes["arithmetic"] / 8, rel=0.1)
    sent = 8 * 32 * 4096 * 4096 * 2 * 7 / 8 / eight.rates["link"].value
    latency = 8 * 32 * 30e-6
    assert eight.causes["communication"] - sent - latency < 0.5 * one.causes["communication"]
    assert eight.causes["communication"] > sent + latency


def test_over_the_network_it_is_slow() -> None:
    inside, across = levers(tensor_parallel=8), replace(levers(), tensor_parallel=16)
    wide = shape_from_config({**LLAMA, "num_key_value_heads": 16}, "more heads")
    lost = [pace(wide, way, nodes(n)).causes["communication"] for n, way in ((1, inside), (2, across))]
    assert lost[1] > 5 * lost[0]


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel": 2},
        {"tensor_parallel": 8},
        {"tensor_parallel": 4, "method": "lora"},
        {"tensor_parallel": 4, "shard_within": 8, "accum": 2},
    ],
)
def test_a_search_has_the_same_seconds(flags: dict[str, Any]) -> None:
    way, hardware = levers(micro_batch=2, **flags), nodes(2)
    choice = KernelChoice(way.attention, way.scan, way.buckets)
    times = Clock(SHAPE, way, hardware).times(way, choice)
    for depth in (0, 5, 32):
        here = replace(way, checkpointing=Checkpointing(layers=depth))
        assert times[depth] == pytest.approx(pace(SHAPE, here, hardware).step_s, rel=1e-9)


# --- where a plan takes them ------------------------------------------------------------------------


def ways(hardware: Hardware, config: dict[str, Any] = LLAMA, **flags: Any) -> tuple[Way, list[Way]]:
    """The one that is chosen, and all."""
    job = job_from_flags({"model": config, "seq": 4096, **flags})
    found = plan(job, SHAPE if config is LLAMA else shape_from_config(config, "other"), hardware)
    assert found.chosen is not None
    return found.chosen, [found.chosen, *found.alternatives]


def test_a_batch_that_is_shared_evenly_by_one_node_tries_nothing_of_it() -> None:
    _, every = ways(nodes(1), effective_batch=32)
    assert {way.levers.ranks_per_sample for way in every} == {1}


def test_of_fewer_sequences_than_gpus_several_have_each() -> None:
    chosen, every = ways(nodes(1), effective_batch=4)
    assert chosen.world == 8
    assert {way.effective_batch for way in every} == {4}
    assert {way.levers.ranks_per_sample for way in every if way.world == 8} == {2, 4, 8}
    assert {way.levers.engine for way in every if way.levers.tensor_parallel > 1} == {"fsdp2"}
    assert {way.levers.sequence_parallel for way in every} == {1, 2}
    assert "plan.fewer-sequences" in [getattr(said, "id", "") for said in chosen.because]


@pytest.mark.parametrize(
    "flags",
    [
        {"effective_batch": 12},  # more than there are GPUs: there are batches near it that would do
        {"effective_batch": 4, "tensor_parallel": 1, "sequence_parallel": 1},
        {"effective_batch": 4, "micro_batch": 1},
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        ways(nodes(1), **flags)
    assert raised.value.said.id == "plan.uneven-batch"


def test_more_machines_can_do_what_fewer_can() -> None:
    """A slow network between them: the GPUs of one node share the sequences as if they were alone."""
    alone, _ = ways(nodes(1), effective_batch=4)
    beside, _ = ways(nodes(2, "1Gb"), effective_batch=4)
    assert beside.world == 8
    assert beside.levers.ranks_per_sample == alone.levers.ranks_per_sample == 2
    assert beside.pace.step_s <= 1.05 * alone.pace.step_s


def test_a_lever_that_is_pinned_brings_the_engine_that_has_it() -> None:
    chosen, every = ways(nodes(1), tensor_parallel=4, effective_batch=6)
    assert {(way.levers.engine, way.levers.tensor_parallel) for way in every} == {("fsdp2", 4)}
    assert chosen.levers.micro_batch * chosen.levers.accumulation == 3
    assert chosen.levers.compile == "off"


WIDE = {**LLAMA, "hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128, "num_hidden_layers": 3}
"""Llama 405B's layers."""


def test_layers_that_are_large_to_be_gathered_are_shared() -> None:
    _, every = ways(read_hardware("8xA100-40GB"), WIDE, effective_batch=8, seq=1024)
    fsdp2 = [way for way in every if way.levers.is_fsdp2 and way.levers.offload_param == "none"]
    held = {way.levers.tensor_parallel: way.footprint.gpu.peak_bytes for way in fsdp2}
    assert set(held) == {1, 2, 4, 8}
    assert held[4] < 0.75 * held[1]


def test_on_very_many_gpus_only_what_may_be_faster_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that of a search of everything."""
    hardware, flags = nodes(16, "100Gb"), {"effective_batch": 512}
    chosen, few = ways(hardware, **flags)
    monkeypatch.setattr(import_module("tightfit.planner.search"), "MANY_GPUS", 10**6)
    wanted, every = ways(hardware, **flags)
    assert chosen.levers == wanted.levers
    assert len(few) < len(every)
