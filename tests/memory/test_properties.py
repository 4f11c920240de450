"""What must hold of every model and every setting.

A lever that saves memory never raises what it claims to lower. Some claims that sound right are not, and the
tests say what is: checkpointing holds one layer's input more while that layer recomputes; an offloaded
optimizer works through a buffer of the GPU; and ZeRO-3's limits on live parameters act by whole tensors, so a
smaller limit may overshoot further.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tightfit.inputs.flags import check_levers
from tightfit.memory import estimate
from tightfit.memory.activations import setting_of
from tightfit.memory.layers import layer_cost
from tightfit.model.load import load_model, shape_from_config
from tightfit.model.presets import PRESETS
from tightfit.types import Buckets, Checkpointing, Engine, Footprint, Gpu, Hardware, Levers, Lora, ModelShape, UserError

pytestmark = pytest.mark.thorough

TRAINING = ("forward", "loss", "backward", "step")
STATE = ("weights", "master_weights", "optimizer_states", "gradients")
NONE, FULL, OFFLOADED = Checkpointing(layers=0), Checkpointing(layers=None), Checkpointing(layers=None, offload=True)
FP32 = 4
PARTS: tuple[dict[str, Any], ...] = ({}, {"frozen_layers": 1}, {"trains": "embeddings"})
"""What of a model may train."""

properties = settings(derandomize=True, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])

# --- what is drawn ------------------------------------------------------------------------------

ATTENTION = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_neox", "gpt2")
FAMILIES = (*ATTENTION, "mamba", "mamba2")
ONE_PARAMETER_A_MODULE = ("llama", "qwen3", "gemma3_text")


@lru_cache(maxsize=4096)
def built(family: str, layers: int, head_dim: int, heads: int, vocab: int, tied: bool) -> ModelShape:
    """A small model of this family. Cached: shapes are compared by identity."""
    hidden = head_dim * heads
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    if family == "gpt2":
        config |= {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    elif family in ATTENTION:
        config |= {"num_attention_heads": heads, "intermediate_size": 3 * hidden, "head_dim": head_dim}
        config |= {"num_key_value_heads": max(1, heads // 2)} if family != "gpt_neox" else {}
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    else:
        config |= {"state_size": 16, "expand": 2, "conv_kernel": 4, "n_groups": 1}
        config |= {"num_heads": 2 * heads, "head_dim": head_dim} if family == "mamba2" else {}
    return shape_from_config(config, family)


def shapes(families: tuple[str, ...] = FAMILIES, least_layers: int = 1) -> st.SearchStrategy[ModelShape]:
    return st.builds(
        built,
        st.sampled_from(families),
        st.integers(least_layers, 5),
        st.sampled_from([16, 64, 128]),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([128, 5_000, 50_000]),
        st.booleans(),
    )


def buckets(*, ample: bool = False) -> st.SearchStrategy[Buckets]:
    """`ample`: ZeRO-3's limits as DeepSpeed has them by default, out of these models' reach."""
    limits = ("prefetch_bucket", "max_live_parameters", "max_reuse_distance")
    drawn = {} if ample else {name: st.sampled_from([0, 10**5, 10**6, 10**9]) for name in limits}
    return st.builds(
        Buckets,
        reduce_bucket=st.sampled_from([1, 10**5, 10**6, 5 * 10**8]),
        persistence_threshold=st.sampled_from([0, 10**3, 10**5]),
        sub_group_size=st.sampled_from([10**4, 10**9]),
        overlap_comm=st.sampled_from([None, True, False]),
        contiguous_gradients=st.booleans(),
        **drawn,
    )


@st.composite
def levers(
    draw: st.DrawFn,
    engines: tuple[str, ...] = ("zero0", "zero1", "zero2", "zero3", "fsdp2"),
    methods: tuple[str, ...] = ("full", "lora", "qlora"),
    *,
    ample: bool = False,
) -> Levers:
    method = draw(st.sampled_from(methods))
    lora = st.builds(Lora, rank=st.sampled_from([1, 8, 64]), dtype=st.sampled_from(["bf16", "fp32"]))
    return Levers(
        method=method,
        engine=draw(st.sampled_from(engines)),
        sequence=draw(st.sampled_from([1, 16, 100, 512, 2048])),
        micro_batch=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 2)),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        optimizer=draw(st.sampled_from(["adamw", "adamw8bit", "paged_adamw8bit", "adafactor", "sgd"])),
        master_weights=draw(st.booleans()),
        offload_optimizer=draw(st.sampled_from(["none", "cpu", "nvme"])),
        offload_param=draw(st.sampled_from(["none", "cpu", "nvme"])),
        checkpointing=draw(st.sampled_from([NONE, FULL, OFFLOADED, Checkpointing(layers=1)])),
        loss=draw(st.sampled_from(["plain", "fused"])),
        attention=draw(st.sampled_from(["sdpa", "flash", "eager"])),
        scan=draw(st.sampled_from(["official", "tightfit", "torch"])),
        lora=None if method == "full" else draw(lora),
        **draw(st.sampled_from(PARTS)) if method == "full" else {},
        buckets=draw(buckets(ample=ample)),
        gradient_clipping=draw(st.booleans()),
        dataloader_workers=draw(st.integers(0, 2)),
    )


worlds = st.sampled_from([1, 2, 3, 4, 8, 64])


def priced(shape: ModelShape, world: int, *several: Levers) -> list[Footprint]:
    """Estimates of all of them; a combination that contradicts itself is not drawn."""
    for each in several:
        try:
            check_levers(each, shape)
        except UserError:
            assume(False)
    return [estimate(shape, each, world) for each in several]


def held(footprint: Footprint, phase: str, *components: str) -> int:
    return sum(footprint.gpu.phases[phase].components.get(name, 0) for name in components)


def layer_input(shape: ModelShape, lever: Levers) -> int:
    """One residual stream, at its widest."""
    return lever.micro_batch * lever.sequence * shape.hidden_size * FP32


def price_of_recomputing(shape: ModelShape, lever: Levers) -> int:
    """The input of the layer that recomputes, the mask that it will be called with again; and where only adapters
    train, the gradient that goes on to the embedding, and what the lowest layer holds for it."""
    setting = setting_of(lever)
    kept_mask = lever.micro_batch * lever.sequence**2 * FP32
    first = shape.blocks[shape.pattern[0]]
    flowing, ending = (layer_cost(first, shape.hidden_size, setting, input_grad) for input_grad in (True, False))
    onward = 0 if setting.trains_base else flowing.backward_kept - ending.backward_kept
    return layer_input(shape, lever) + kept_mask + onward


# --- it always answers --------------------------------------------------------------------------


@properties
@given(shapes(), levers(), worlds)
def test_every_question_has_an_answer(shape: ModelShape, lever: Levers, world: int) -> None:
    (found,) = priced(shape, world, lever)
    check_sums(found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if place % 3 else []) for place, name in enumerate(sorted(PRESETS))],
)
@settings(properties, max_examples=5)
@given(levers(), worlds)
def test_of_the_presets_too(name: str, lever: Levers, world: int) -> None:
    (found,) = priced(preset(name), world, lever)
    check_sums(found)


@lru_cache(maxsize=64)
def preset(name: str) -> ModelShape:
    return load_model(name)


def check_sums(found: Footprint) -> None:
    for phase in (*found.gpu.phases.values(), *found.host.phases.values()):
        assert all(type(size) is int and size >= 0 for size in phase.components.values()), phase
        assert phase.total_bytes == sum(phase.components.values())
    gpu, host = found.gpu, found.host
    assert gpu.peak_bytes == max(gpu.phases[phase].total_bytes for phase in TRAINING)
    assert gpu.peak_bytes == gpu.phases[gpu.peak_phase].total_bytes
    assert gpu.init_peak_bytes == gpu.phases["init"].total_bytes
    assert gpu.required_bytes == max(gpu.peak_bytes, gpu.init_peak_bytes) + sum(gpu.overhead.values())
    assert host.peak_bytes_per_rank == max(phase.total_bytes for phase in host.phases.values())
    assert host.peak_bytes_per_node >= host.peak_bytes_per_rank


# --- levers that save ---------------------------------------------------------------------------


@properties
@given(shapes(), levers(), worlds)
def test_checkpointing_keeps_less(shape: ModelShape, lever: Levers, world: int) -> None:
    # one layer has none beneath it to spare, and keeps the mask of eager attention
    assume(shape.n_layers - lever.frozen_layers > 1)
    none, full = priced(shape, world, replace(lever, checkpointing=NONE), replace(lever, checkpointing=FULL))
    for phase in ("forward", "loss"):
        assert held(full, phase, "activations") <= held(none, phase, "activations")


@properties
@given(shapes(), levers(("zero0", "zero1", "zero2", "fsdp2")), worlds)
def test_checkpointing_peaks_lower(shape: ModelShape, lever: Levers, world: int) -> None:
    """But for its price. (Under ZeRO-3 it also changes what is gathered when.)"""
    none, full = priced(shape, world, replace(lever, checkpointing=NONE), replace(lever, checkpointing=FULL))
    assert full.gpu.peak_bytes <= none.gpu.peak_bytes + price_of_recomputing(shape, lever)


@properties
@given(shapes(least_layers=2), levers(("zero0", "zero1", "zero2", "fsdp2")), worlds, st.data())
def test_each_layer_that_recomputes_saves(shape: ModelShape, lever: Levers, world: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, shape.n_layers - 1))
    fewer, more = (replace(lever, checkpointing=Checkpointing(layers=count + extra)) for extra in (0, 1))
    less, most = priced(shape, world, more, fewer)
    assert held(less, "loss", "activations") <= held(most, "loss", "activations")
    assert less.gpu.peak_bytes <= most.gpu.peak_bytes + price_of_recomputing(shape, lever)


@properties
@given(shapes(), levers(), worlds)
@example(built("llama", 1, 64, 2, 128, False), Levers(engine="zero0", sequence=16, frozen_layers=1), 1)
@example(built("gpt2", 1, 16, 1, 128, False), Levers(engine="fsdp2", sequence=1, method="lora", lora=Lora(rank=1)), 1)
def test_offloaded_layer_inputs_leave_the_gpu(shape: ModelShape, lever: Levers, world: int) -> None:
    stay, leave = priced(shape, world, replace(lever, checkpointing=FULL), replace(lever, checkpointing=OFFLOADED))
    assert leave.gpu.peak_bytes <= stay.gpu.peak_bytes
    assert leave.host.peak_bytes_per_rank >= stay.host.peak_bytes_per_rank


@properties
@given(shapes(), levers(), worlds)
def test_a_fused_loss_holds_less(shape: ModelShape, lever: Levers, world: int) -> None:
    """In 16 bits, where there are as many tokens as the model is wide, and no fewer words.

    The fused loss holds a chunk of the logits, the gradient of its input, and the head's: none of the three is
    larger than the logits then, and the plain loss holds the logits three times in fp32.
    """
    assume(lever.precision != "fp32")
    assume(lever.micro_batch * lever.sequence >= shape.hidden_size <= shape.vocab_size)
    plain, fused = priced(shape, world, replace(lever, loss="plain"), replace(lever, loss="fused"))
    assert fused.gpu.phases["loss"].total_bytes <= plain.gpu.phases["loss"].total_bytes


@properties
@given(shapes(), levers(("zero0", "fsdp2"), ("full",)), worlds, st.data())
def test_frozen_layers_take_less(shape: ModelShape, lever: Levers, world: int, data: st.DataObject) -> None:
    """(Under ZeRO-1 and 2 the first rank's part moves on to other parameters, which may be larger ones.)"""
    count = data.draw(st.integers(0, shape.n_layers - 1))
    more, fewer = priced(shape, world, *(replace(lever, frozen_layers=count + extra) for extra in (1, 0)))
    assert more.gpu.peak_bytes <= fewer.gpu.peak_bytes
    assert held(more, "step", *STATE) <= held(fewer, "step", *STATE)


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2"])
def test_a_frozen_embedding_that_is_the_head_has_no_gradient(engine: Engine) -> None:
    shape = built("llama", 2, 16, 1, 50_000, True)
    found = estimate(shape, Levers(engine=engine, sequence=16, frozen_layers=1), 1)
    in_passing = 2 * found.trainable_parameters * FP32
    assert held(found, "backward", "gradients") <= in_passing < shape.vocab_size * shape.hidden_size


@properties
@given(shapes(), levers(("zero1", "zero2", "zero3")), worlds)
def test_an_offloaded_optimizer_leaves_the_gpu(shape: ModelShape, lever: Levers, world: int) -> None:
    stay, leave = priced(
        shape, world, replace(lever, offload_optimizer="none"), replace(lever, offload_optimizer="cpu")
    )
    for phase in TRAINING:
        assert held(leave, phase, "master_weights", "optimizer_states") == 0
    assert held(leave, "step", "gradients") <= held(stay, "step", "gradients")
    assert leave.host.peak_bytes_per_rank >= stay.host.peak_bytes_per_rank


@properties
@given(shapes(), levers(("zero3", "fsdp2")), worlds)
def test_offloaded_weights_leave_the_gpu(shape: ModelShape, lever: Levers, world: int) -> None:
    together = {"offload_optimizer": "cpu"} if lever.engine == "fsdp2" else {}
    apart = {"offload_optimizer": "none"} if lever.engine == "fsdp2" else {}
    stay, leave = priced(
        shape, world, replace(lever, offload_param="none", **apart), replace(lever, offload_param="cpu", **together)
    )
    assert leave.gpu.peak_bytes <= stay.gpu.peak_bytes
    assert held(leave, "step", "weights") <= held(stay, "step", "weights")
    assert leave.host.peak_bytes_per_rank >= stay.host.peak_bytes_per_rank


@properties
@given(shapes(), levers(), worlds)
def test_each_stage_shards_more(shape: ModelShape, lever: Levers, world: int) -> None:
    """ZeRO-3 pads every parameter, not the sum. (fp32 adapters stay fp32 under ZeRO-3 alone.)"""
    lora = replace(lever.lora, dtype="bf16") if lever.lora else None
    alike = replace(lever, lora=lora, offload_optimizer="none", offload_param="none")
    one, two, three = priced(shape, world, *(replace(alike, engine=engine) for engine in ("zero1", "zero2", "zero3")))
    padding = len(shape.tensors) * 3 * 3 * FP32
    for component in STATE:
        assert held(two, "step", component) <= held(one, "step", component)
        assert held(three, "step", component) <= held(two, "step", component) + padding


@properties
@given(shapes(), levers(("zero1", "zero2", "zero3", "fsdp2")), worlds, worlds)
def test_more_gpus_hold_less_each(shape: ModelShape, lever: Levers, few: int, many: int) -> None:
    assume(few < many)
    (alone,), (shared) = priced(shape, few, lever), priced(shape, many, lever)
    assert held(shared[0], "step", *STATE) <= held(alone, "step", *STATE)


@properties
@given(shapes(), levers(methods=("lora",)), st.sampled_from([1, 2, 4, 8]))
def test_packed_weights_are_smaller(shape: ModelShape, lever: Levers, world: int) -> None:
    """Up to dozens of GPUs: their quantisation constants are never sharded, nor offloaded."""
    lever = replace(lever, offload_param="none")
    lora, qlora = priced(shape, world, lever, replace(lever, method="qlora"))
    for phase in TRAINING:
        assert held(qlora, phase, "weights") <= held(lora, phase, "weights")


@properties
@given(shapes(), levers(), worlds, st.sampled_from([1, 10**4, 10**6]), st.integers(2, 100))
def test_a_smaller_reduce_bucket(shape: ModelShape, lever: Levers, world: int, size: int, times: int) -> None:
    small, large = priced(
        shape,
        world,
        *(replace(lever, buckets=replace(lever.buckets, reduce_bucket=each)) for each in (size, size * times)),
    )
    assert small.gpu.peak_bytes <= large.gpu.peak_bytes


@properties
@given(
    shapes(ONE_PARAMETER_A_MODULE),
    levers(("zero3",), ("full",)),
    worlds,
    st.sampled_from(["prefetch_bucket", "max_live_parameters"]),
)
def test_without_prefetching_least_is_gathered(shape: ModelShape, lever: Levers, world: int, limit: str) -> None:
    """Where each module owns one parameter; several that are fetched at once need a flat buffer beside them. With
    prefetching the head may be there before its turn, and another matrix gone at the loss."""
    head = shape.vocab_size * shape.hidden_size * 4
    without = replace(lever, buckets=replace(lever.buckets, **{limit: 0}))
    least, other = priced(shape, world, without, lever)
    for phase in ("forward", "loss"):  # as a whole: what is whole and what the layer holds are weighed together
        spare = head if phase == "loss" else 0
        assert least.gpu.phases[phase].total_bytes <= other.gpu.phases[phase].total_bytes + spare


# --- sizes that cost ----------------------------------------------------------------------------


@properties
@given(shapes(), levers(), worlds, st.sampled_from([1, 8, 100, 1000]))
def test_longer_sequences_take_more(shape: ModelShape, lever: Levers, world: int, more: int) -> None:
    assume(not (shape.scans and lever.scan == "tightfit"))  # where it cuts time, and with how much room, goes by steps
    short, long = priced(shape, world, lever, replace(lever, sequence=lever.sequence + more))
    check_growth(short, long)


@properties
@given(shapes(), levers(), worlds)
def test_larger_batches_take_more(shape: ModelShape, lever: Levers, world: int) -> None:
    small, large = priced(shape, world, lever, replace(lever, micro_batch=lever.micro_batch + 1))
    check_growth(small, large)


@properties
@given(st.sampled_from(FAMILIES), st.integers(3, 6), st.booleans(), levers(ample=True), worlds)
def test_deeper_models_take_more(family: str, layers: int, tied: bool, lever: Levers, world: int) -> None:
    """From a depth at which the two ends of the model do not meet, and within ZeRO-3's limits: beyond them a
    parameter may be too far from its next use to be kept."""
    shallow, deep = (built(family, depth, 64, 4, 5_000, tied) for depth in (layers, layers + 1))
    (low,), (high,) = priced(shallow, world, lever), priced(deep, world, lever)
    check_growth(low, high)


def check_growth(small: Footprint, large: Footprint) -> None:
    for name, phase in small.gpu.phases.items():
        assert phase.total_bytes <= large.gpu.phases[name].total_bytes, name
    assert small.host.peak_bytes_per_rank <= large.host.peak_bytes_per_rank


def test_a_cpu_has_no_context() -> None:
    """A rank there is a process, which held half a GiB before it had a model."""
    cpu = Hardware(gpu=Gpu(name="CPU", memory_bytes=8 * 2**30, vendor="cpu"), gpus_per_node=2)
    held = estimate(load_model("tiny_mamba"), Levers(engine="fsdp2", sequence=128), 2, cpu).gpu
    assert held.overhead["communicator"] == 0
    assert 2**29 <= held.required_bytes < 0.7 * 2**30, "0.55 GiB were measured"
