"""What must hold of the pace of every model, every setting and every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, product
from math import isfinite
from typing import Any

import pytest

from tables import table
from tightfit.hardware.words import connect, parse_hardware
from tightfit.inputs.flags import check_levers, released_at_once
from tightfit.model.load import load_model, shape_from_config
from tightfit.model.presets import PRESETS
from tightfit.pace import Clock, KernelChoice, engines, pace, step_seconds
from tightfit.pace.rates import UNKNOWN_FLOPS, rates_of
from tightfit.types import (
    PARTS,
    Buckets,
    Checkpointing,
    Engine,
    Hardware,
    Levers,
    Lora,
    Measured,
    Method,
    ModelShape,
    Offload,
    Optimizer,
    Precision,
    Traced,
    UserError,
)

ENGINES: tuple[Engine, ...] = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
OFFLOADS: tuple[tuple[Offload, Offload], ...] = (
    ("none", "none"),
    ("cpu", "none"),
    ("none", "cpu"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("nvme", "cpu"),
    ("nvme", "nvme"),
)
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw8bit", "paged_adamw8bit", "adafactor", "sgd")
MACHINES = "1xH200 8xH200 4xRTX4090 2x8xA100-80GB 6x32GB 8xK100-64GB 1xT4 8xMI300X 8xB200 3xV100-32GB".split()
NONE, FULL, OFFLOADED = Checkpointing(layers=0), Checkpointing(layers=None), Checkpointing(layers=None, offload=True)

SMALL = {
    "vocab_size": 5_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 512, "n_layer": 3, "n_head": 8},
    "gemma2": {},
    "gemma3_text": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "mamba2": {"state_size": 16, "expand": 2, "conv_kernel": 4, "n_groups": 1, "num_heads": 16},
    "falcon_mamba": {"state_size": 16, "expand": 2, "conv_kernel": 4},
}
"""Kinds of model that no preset is of."""


@cache
def model(name: str) -> ModelShape:
    if name in PRESETS:
        return load_model(name)
    if name == "traced":
        known = model("qwen3_moe")
        seen = Traced(saved_bytes_per_token=9000, forward_bytes_per_token=20_000, backward_bytes_per_token=40_000)
        return replace(known, blocks=tuple(replace(block, mixer=seen, mlp=None) for block in known.blocks))
    return shape_from_config({"model_type": name, **SMALL, **FAMILIES[name]}, name)


MODELS = (*PRESETS, *FAMILIES, "traced")
every_model = table("name", MODELS)


@cache
def machine(word: str) -> Hardware:
    return parse_hardware(word)


def ways(shape: ModelShape, **fixed: Any) -> Iterator[Levers]:
    """Every engine with every offload that it has."""
    for engine, (optimizer, param) in product(ENGINES, OFFLOADS):
        levers = released_at_once(Levers(engine=engine, offload_optimizer=optimizer, offload_param=param, **fixed))
        try:
            check_levers(levers, shape)
        except UserError:
            continue
        yield levers


def adapters(method: Method) -> Lora | None:
    return None if method == "full" else Lora()


def seconds(shape: ModelShape, levers: Levers, hardware: Hardware) -> float:
    """To a billionth of a second: the causes of equal times may add up differently in the last bit."""
    return round(step_seconds(shape, levers, hardware), 9)


# --- every figure -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [19, pytest.param(2, marks=pytest.mark.slow)])
@every_model
def test_causes_are_positive_and_add_up(name: str, stride: int) -> None:
    """Of one way in `stride`, others for each method, precision and optimizer."""
    shape, machines = model(name), [machine(word) for word in MACHINES]
    asked = 0
    for number, (method, precision, optimizer) in enumerate(product(METHODS, PRECISIONS, OPTIMIZERS)):
        fixed = {"method": method, "precision": precision, "optimizer": optimizer, "lora": adapters(method)}
        for levers in islice(ways(shape, sequence=512, **fixed), number % stride, None, stride):
            hardware = machines[asked % len(machines)]
            found = pace(shape, levers, hardware)
            assert found.step_s == step_seconds(shape, levers, hardware)
            assert all(isfinite(each) and each > 0 for each in found.causes.values()), levers
            assert found.step_s == pytest.approx(sum(found.causes.values()))
            assert found.tokens_per_s == pytest.approx(512 * hardware.world / found.step_s)
            asked += 1
    assert asked > 600 // stride


@pytest.mark.thorough
@every_model
@pytest.mark.parametrize(
    "changed",
    [
        {"checkpointing": OFFLOADED},
        {"master_weights": False},
        {"frozen_layers": 2},
        {"trains": "embeddings"},
        {"attention": "eager"},
        {"attention": "flash", "sequence": 5000},
        {"scan": "torch"},
        {"scan": "tightfit"},
        {"sequence": 1},
        {"micro_batch": 64, "sequence": 16_384, "accumulation": 100},
        {"buckets": Buckets(reduce_bucket=1, max_live_parameters=1, persistence_threshold=0)},
    ],
    ids="-".join,
)
def test_odd_settings_have_a_pace(name: str, changed: dict[str, Any]) -> None:
    shape = model(name)
    for levers, word in product(ways(shape, **changed), ("1xH200", "2x8xA100-80GB")):
        found = pace(shape, levers, machine(word))
        assert all(isfinite(each) and each > 0 for each in found.causes.values())
        assert found.step_s == pytest.approx(sum(found.causes.values()))


@pytest.mark.thorough
@every_model
@table("method", METHODS)
def test_all_depths_at_once_are_each_depth_alone(name: str, method: Method) -> None:
    shape = model(name)
    depths = range(shape.n_layers + 1)
    fixed = {"method": method, "lora": adapters(method), "sequence": 1024}
    for asked, plain in islice(enumerate(ways(shape, **fixed)), 0, None, 5):
        odd = {
            "accumulation": 1 + asked % 3,
            "frozen_layers": 2 * (method == "full" and asked % 3 == 1),
            "trains": "embeddings" if method == "full" and asked % 3 == 2 else "all",
            "buckets": Buckets(overlap_comm=(None, True, False)[asked % 3]),
        }
        levers, hardware = replace(plain, **odd), machine(MACHINES[asked % len(MACHINES)])
        alone = [seconds(shape, replace(levers, checkpointing=Checkpointing(layers=k)), hardware) for k in depths]
        choice = KernelChoice(levers.attention, levers.scan, levers.buckets)
        assert Clock(shape, levers, hardware).times(levers, choice) == pytest.approx(alone)
        assert alone == sorted(alone), "more recomputation is never faster"


@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "7b_mamba", "qwen3_moe", "gemma2"])
def test_and_exactly_so_for_compiled_parts(name: str, engine: Engine) -> None:
    """Busy GPUs and busy hosts, with micro batches that add up."""
    shape = model(name)
    for number, select in enumerate([(), *combinations(PARTS, 2)]):
        levers = Levers(
            engine=engine,
            accumulation=1 + number % 3,
            micro_batch=1 + number % 2,
            sequence=(256, 4096)[number % 2],
            scan="tightfit",
            compile=("layers", "off")[number % 5 == 4],
            **(LORA if number % 4 == 1 else {}),  # type: ignore[arg-type]
        )
        rest = replace(levers, checkpointing=Checkpointing(layers=None, select=select))
        hardware, choice = machine(MACHINES[number % 3]), KernelChoice(levers.attention, levers.scan, levers.buckets)
        times = Clock(shape, levers, hardware).times(rest, choice)
        assert list(times) == sorted(times)
        for depth in (0, 1, shape.n_layers):
            way = replace(rest, checkpointing=replace(rest.checkpointing, layers=depth))
            assert times[depth] == pytest.approx(pace(shape, way, hardware).step_s, rel=1e-12)


# --- what a user would expect -------------------------------------------------------------------

some_models = table("name", ["qwen2.5-7b", "7b_mamba", "gemma-3-27b", "tiny_llama", "qwen3_moe", "mamba2", "traced"])
every_machine = table("word", MACHINES)
LORA = {"method": "lora", "lora": Lora()}


@pytest.mark.thorough
@some_models
@every_machine
def test_more_tokens_take_longer(name: str, word: str) -> None:
    shape, hardware = model(name), machine(word)
    for levers in [*ways(shape, sequence=1024), *ways(shape, sequence=1024, **LORA)]:
        one = seconds(shape, levers, hardware)
        assert seconds(shape, replace(levers, micro_batch=2), hardware) >= one
        assert seconds(shape, replace(levers, sequence=2048), hardware) >= one
        assert seconds(shape, replace(levers, accumulation=2), hardware) > one
        assert seconds(shape, replace(levers, micro_batch=100_000), hardware) > one


@pytest.mark.thorough
@some_models
@every_machine
def test_accumulation_saves_optimizer_steps_and_larger_micro_batches_save_passes(name: str, word: str) -> None:
    shape, hardware = model(name), machine(word)
    for levers in ways(shape, sequence=1024):
        accumulated = seconds(shape, replace(levers, accumulation=8), hardware)
        assert accumulated < 8 * seconds(shape, levers, hardware)
        assert seconds(shape, replace(levers, micro_batch=8), hardware) <= accumulated


@pytest.mark.thorough
@some_models
@table("rate", ["bf16_flops", "memory_bytes_per_s", "link_bytes_per_s"])
def test_a_faster_card_is_not_slower(name: str, rate: str) -> None:
    shape, hardware = model(name), machine("4xA100-80GB")
    faster = replace(hardware, gpu=replace(hardware.gpu, **{rate: 2 * getattr(hardware.gpu, rate)}))
    for levers in [*ways(shape), *ways(shape, **LORA)]:
        assert seconds(shape, levers, faster) <= seconds(shape, levers, hardware)


def test_a_faster_card_is_faster_where_the_gpu_is_busy() -> None:
    shape, busy = model("qwen2.5-7b"), Levers(sequence=4096, micro_batch=4)
    order = [seconds(shape, busy, machine(word)) for word in ("1xB200", "1xH200", "1xA100-80GB", "1xRTX4090", "1xT4")]
    assert order == sorted(order)
    assert len(set(order)) == len(order)


@some_models
def test_a_slower_link_is_not_faster(name: str) -> None:
    shape = model(name)
    for levers in ways(shape, sequence=512):
        order = []
        for link, rate in (("pcie5", 63e9), ("pcie4", 31.5e9), ("pcie3", 15.8e9)):
            hardware = machine("8xRTX4090")
            gpu = replace(hardware.gpu, link=link, link_bytes_per_s=rate)
            order.append(seconds(shape, levers, replace(hardware, gpu=gpu)))
        assert order == sorted(order)


@pytest.mark.thorough
@some_models
@every_machine
def test_offload_adds(name: str, word: str) -> None:
    shape, hardware = model(name), machine(word)
    for method in METHODS:
        times = {
            (levers.engine, levers.offload_optimizer, levers.offload_param): seconds(shape, levers, hardware)
            for levers in ways(shape, sequence=1024, method=method, lora=adapters(method))
        }
        for engine in ("zero1", "zero2", "zero3"):
            assert times[engine, "none", "none"] < times[engine, "cpu", "none"]
        assert times["zero3", "none", "none"] < times["zero3", "none", "cpu"]
        assert times["zero3", "cpu", "cpu"] < times["zero3", "nvme", "cpu"]
        if method != "qlora":  # DeepSpeed swaps no 4-bit weights
            assert times["zero3", "nvme", "cpu"] < times["zero3", "nvme", "nvme"]
        assert times["fsdp2", "none", "none"] < times["fsdp2", "cpu", "cpu"]


def test_inputs_on_the_host_add() -> None:
    shape, hardware = model("llama-3.1-8b"), machine("8xH200")
    for levers in ways(shape):
        kept = seconds(shape, replace(levers, checkpointing=FULL), hardware)
        assert kept < seconds(shape, replace(levers, checkpointing=OFFLOADED), hardware)


def test_ranks_of_a_node_share_its_host() -> None:
    """Eight eighths of an optimizer's step take the host as long as the whole of it."""
    shape, levers = model("qwen2.5-7b"), Levers(engine="zero2", offload_optimizer="cpu")
    one, eight, apart = (
        pace(shape, levers, machine(word)).causes["host optimizer"] for word in ("1xH200", "8xH200", "8x1xH200")
    )
    assert one / 8 < eight < one, "a whole server has more cores than the part of it that one GPU is rented with"
    assert apart == pytest.approx(one / 8)
    both = [pace(shape, levers, machine(word)).causes["host optimizer"] for word in ("4xRTX4090", "8xRTX4090")]
    assert both[0] == pytest.approx(both[1]), "cores and memory are one for all ranks"


def test_ranks_of_a_node_share_its_drive() -> None:
    shape, levers = model("qwen2.5-7b"), Levers(engine="zero3", offload_optimizer="nvme", offload_param="nvme")
    one, eight, apart = (
        pace(shape, levers, machine(word)).causes["host link"] for word in ("1xH200", "8xH200", "8x1xH200")
    )
    assert eight == pytest.approx(one, rel=0.2)
    assert apart < one / 4


# --- communication ------------------------------------------------------------------------------


@some_models
def test_nobody_to_talk_to(name: str) -> None:
    shape = model(name)
    for levers in ways(shape):
        assert "communication" not in pace(shape, levers, machine("1xH200")).causes
        together = pace(shape, levers, machine("8xH200"))
        rehearsed = pace(shape, levers, machine("8xH200"), rehearsal=True)
        assert together.causes["communication"] > 0
        assert "communication" not in rehearsed.causes
        assert rehearsed.step_s < together.step_s


def test_nodes_talk_more_slowly() -> None:
    shape = model("qwen2.5-7b")
    for levers in ways(shape):
        inside, between = (pace(shape, levers, machine(word)) for word in ("16xH200", "2x8xH200"))
        assert between.causes["communication"] > inside.causes["communication"]


def test_communication_beside_the_backward_pass_is_cheaper() -> None:
    shape, hardware = model("qwen2.5-7b"), machine("8xRTX4090")
    for engine, accumulation in product(("zero1", "zero2"), (1, 8)):
        levers = Levers(engine=engine, accumulation=accumulation)
        beside = replace(levers, buckets=Buckets(overlap_comm=True))
        assert seconds(shape, beside, hardware) < seconds(shape, levers, hardware)


@pytest.mark.parametrize("overlap", [None, True])
def test_how_often_gradients_are_reduced(overlap: bool | None) -> None:
    """ZeRO-1 waits for the last micro batch, ZeRO-2 does not."""
    shape, hardware = model("qwen2.5-7b"), machine("8xRTX4090")

    def spoken(engine: Engine, accumulation: int) -> float:
        levers = Levers(engine=engine, accumulation=accumulation, buckets=Buckets(overlap_comm=overlap))
        return pace(shape, levers, hardware).causes["communication"]

    assert spoken("zero1", 8) == pytest.approx(spoken("zero1", 1))
    assert spoken("zero2", 1) == pytest.approx(spoken("zero1", 1))
    assert spoken("zero2", 8) > 4 * spoken("zero2", 1)


def test_every_further_micro_batch_is_widened_and_added() -> None:
    """Torch alone adds 16-bit gradients to fp32 ones; without fp32 copies autograd adds them as they are."""
    shape, hardware = model("qwen2.5-7b"), machine("1xH200")
    plain = Levers(engine="ddp", micro_batch=2, checkpointing=NONE)
    for changed, each in (({}, 2 + 4 + 4), ({"master_weights": False}, 3 * 2), ({"precision": "fp32"}, 3 * 4)):
        once, four = (
            pace(shape, replace(plain, **changed, accumulation=times), hardware).causes  # type: ignore[arg-type]
            for times in (1, 4)
        )
        memory = rates_of(hardware, changed.get("precision", "bf16")).card.memory  # type: ignore[arg-type]
        added = four["memory traffic"] - 4 * once["memory traffic"]
        assert added == pytest.approx(3 * each * shape.parameters / memory)
        assert four["optimizer"] == once["optimizer"]


def test_adding_up_hides_behind_a_host_that_is_busy() -> None:
    shape, hardware = model("tiny_llama"), machine("1xH200")
    one, four = (pace(shape, Levers(engine="ddp", sequence=64, accumulation=times), hardware) for times in (1, 4))
    step_s = sum(engines.step(shape, Levers(engine="ddp"), hardware, rates_of(hardware, "bf16"), rehearsal=False))
    assert four.step_s - step_s == pytest.approx(4 * (one.step_s - step_s))
    assert four.causes["memory traffic"] > 4 * one.causes["memory traffic"]


def test_torch_alone_sends_what_it_adds_up() -> None:
    shape, hardware = model("qwen2.5-7b"), machine("8xH200")
    rates, plain = rates_of(hardware, "bf16"), Levers(engine="ddp", accumulation=4)
    wide, narrow = (
        engines.traffic(shape, replace(plain, master_weights=copies), hardware, rates, rehearsal=False)
        for copies in (True, False)
    )
    around, latency = shape.parameters * (7 / 8) / rates.link, rates.link_latency_s
    assert wide.reduced == pytest.approx(2 * (4 * around + latency))  # fp32, in one message
    assert narrow.reduced == pytest.approx(2 * (2 * around + len(shape.tensors) * latency))  # one by one
    assert (wide.reductions(4), narrow.reductions(4)) == (1, 1)


def test_how_often_gradients_leave_for_the_host() -> None:
    shape, hardware = model("qwen2.5-7b"), machine("1xH200")

    def linked(engine: Engine, accumulation: int) -> float:
        levers = Levers(engine=engine, accumulation=accumulation, offload_optimizer="cpu")
        return pace(shape, levers, hardware).causes["host link"]

    assert linked("zero1", 8) == pytest.approx(linked("zero1", 1))
    assert linked("zero2", 8) > 4 * linked("zero2", 1)


@pytest.mark.parametrize("engine", ["zero0", "fsdp2"])
def test_overlap_comm_is_for_zero(engine: Engine) -> None:
    shape, hardware = model("qwen2.5-7b"), machine("8xRTX4090")
    said = {
        seconds(shape, Levers(engine=engine, buckets=Buckets(overlap_comm=o)), hardware) for o in (None, True, False)
    }
    assert len(said) == 1


# --- kernels and methods ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["7b_mamba", "1b_mamba", "falcon_mamba"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scan_without_a_kernel_is_slow(name: str, engine: Engine) -> None:
    shape, hardware = model(name), machine("4xH200")
    official, torch = (seconds(shape, Levers(engine=engine, scan=scan), hardware) for scan in ("official", "torch"))
    assert torch > 5 * official


def test_frozen_weights_save_time() -> None:
    shape, hardware = model("qwen2.5-7b"), machine("1xH200")
    full = seconds(shape, Levers(), hardware)
    assert seconds(shape, Levers(frozen_layers=14), hardware) < full
    assert seconds(shape, Levers(trains="embeddings"), hardware) < full
    lora = seconds(shape, Levers(**LORA), hardware)
    assert lora < full
    assert seconds(shape, Levers(method="qlora", lora=Lora()), hardware) > lora, "unpacking costs"


def test_precisions() -> None:
    shape = model("qwen2.5-7b")
    wide = Levers(sequence=4096)
    hopper = {p: seconds(shape, replace(wide, precision=p), machine("1xH200")) for p in PRECISIONS}
    assert hopper["bf16"] == hopper["fp16"] < hopper["fp32"]
    old = {p: seconds(shape, replace(wide, precision=p), machine("1xV100-32GB")) for p in PRECISIONS}
    assert old["fp16"] < old["bf16"], "a V100 has no bf16 of its own"


# --- what had to be assumed ---------------------------------------------------------------------


def test_assumptions_are_said() -> None:
    shape = model("tiny_llama")
    assert pace(shape, Levers(), machine("1xH200")).because == ()
    (links,) = map(str, pace(shape, Levers(), machine("8xH200")).because)
    assert "exchange 360 GB/s" in links
    (unknown,) = map(str, pace(shape, Levers(), machine("1x32GB")).because)
    assert f"{UNKNOWN_FLOPS / 1e12:.0f} TFLOP/s" in unknown
    (network,) = map(str, pace(shape, Levers(), machine("2x8xH200")).because)
    assert "3200 Gb/s" in network
    (drive,) = map(str, pace(shape, Levers(engine="zero3", offload_optimizer="nvme"), machine("1xH200")).because)
    assert "NVMe" in drive


def test_the_users_word_on_a_link_wins_over_what_was_measured() -> None:
    measured = Measured(on="2026-11-17", machine="it", rates={"link": 1e9, "network": 1e8})
    hardware = replace(machine("2x8xH200"), measured=measured)
    assert (rates_of(hardware, "bf16").link, rates_of(hardware, "bf16").network) == (1e9, 1e8)
    said = connect(hardware, "8x400Gb", "nvlink")
    assert rates_of(said, "bf16").link > 100e9
    assert rates_of(said, "bf16").network > 100e9


def test_an_unknown_cards_link_is_said_too() -> None:
    said = " ".join(map(str, pace(model("tiny_llama"), Levers(), machine("6x32GB")).because))
    assert "exchange" in said


def test_a_clock_has_compiled_layers_and_others() -> None:
    """Of one strategy a search asks for both: FSDP2 checks every parameter before it runs compiled code."""
    shape, hardware = load_model("llama-3.1-8b"), machine("8xH200")
    clock = Clock(shape, Levers(engine="fsdp2"), hardware)
    for compiled in ("layers", "off"):
        levers = Levers(engine="fsdp2", compile=compiled, sequence=64, checkpointing=Checkpointing(layers=0))
        times = clock.times(levers, KernelChoice(levers.attention, levers.scan, levers.buckets))
        assert times[0] == pytest.approx(step_seconds(shape, levers, hardware), rel=1e-12)
