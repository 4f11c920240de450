"""What is counted for a layer is what its matrices say.

On a card that does one product operation a second, and moves data in no time, seconds are FLOPs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.memory.activations import setting_of
from tightfit.model.load import load_model, shape_from_config
from tightfit.pace import pace
from tightfit.pace.rates import (
    ATTENTION_BACK,
    CLOCK_BY_POWER,
    COMPILED_KERNEL_S,
    CUDA_SCAN_STEPS_BACK_PER_S,
    DIAGONAL_TOKENS,
    GROUPED_SHARE,
    HEAD_SHARES,
    OPERATION_S,
    PACKED_LINEAR_S,
    SCAN_OPERATIONS,
    SCAN_STEPS_BACK_PER_S,
    SCAN_STEPS_PER_S,
    Card,
    rates_of,
)
from tightfit.pace.work import Again, LayerTime, head_time, layer_time, passes_of, recompute_time
from tightfit.types import (
    Attention,
    Block,
    Checkpointing,
    Compile,
    Gpu,
    Hardware,
    Levers,
    Lora,
    Mamba1,
    Measured,
    Method,
    ModelShape,
)

KERNELS = {"flash": 1, "cudnn": 1, "efficient": 1, "masked_cudnn": 1, "masked_efficient": 1}
MEMORY = {
    "memory": 1e30,
    "casting": 1e30,
    "softmax": 1e30,
    "loss": 1e30,
    "capped_loss": 1e30,
    "reducing": 1e30,
    "strided": 1e30,
}
MEMORY |= {"kernel_start_s": 0, "unpacking": 1, "scan_back": 1}
FLOPS = Card(products=1, product_start_s=0, power=1, **KERNELS, **MEMORY)
UNIT = Gpu(name="one", vendor="nvidia", arch="sm_80", memory_bytes=2**40, bf16_flops=1, memory_bytes_per_s=1e30)
COUNTING = replace(UNIT, name="counts", bf16_flops=1 / rates_of(Hardware(gpu=UNIT), "bf16").card.products)
NONE = Checkpointing(layers=0)
LEVERS = Levers(sequence=512, micro_batch=3)
TOKENS = 512 * 3
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def shape(**changed: Any) -> ModelShape:
    return shape_from_config(LLAMA | changed, "model")


def matrices(block: Block) -> int:
    return sum(tensor.numel for tensor in block.tensors if len(tensor.shape) == 2)


def attention_flops(block: Block, keys: float) -> float:
    assert isinstance(block.mixer, Attention)
    return 4 * TOKENS * keys * block.mixer.heads * block.mixer.head_dim


def attention_time(block: Block, keys: float) -> float:
    """Of a fused kernel without a mask: it computes whole blocks around the diagonal."""
    return attention_flops(block, keys + DIAGONAL_TOKENS)


def time_of(model: ModelShape, levers: Levers, card: Card = FLOPS) -> tuple[float, float]:
    layer = layer_time(model.blocks[0], model.hidden_size, setting_of(levers, COUNTING), card)
    return layer.products, layer.products_back


def test_a_layer_is_its_matrices_and_half_of_its_attention() -> None:
    block = (model := shape()).blocks[0]
    linear, attention = 2 * TOKENS * matrices(block), attention_time(block, 512 / 2)
    forward, back = time_of(model, LEVERS)
    assert forward == pytest.approx(linear + attention)
    assert back == pytest.approx(2 * linear + ATTENTION_BACK["flash"] * attention)


def test_eager_attention_computes_what_the_mask_hides() -> None:
    block = (model := shape()).blocks[0]
    forward, back = time_of(model, replace(LEVERS, attention="eager"))
    linear, attention = 2 * TOKENS * matrices(block), attention_flops(block, 512)
    assert forward == pytest.approx(linear + attention)
    assert back == pytest.approx(2 * (linear + attention))


@pytest.mark.parametrize(("window", "keys"), [(512, 256), (4096, 256), (128, 128 - 128**2 / 1024), (1, 1 - 1 / 1024)])
def test_a_window_spares_what_it_hides(window: int, keys: float) -> None:
    model = shape(model_type="mistral", sliding_window=window)
    forward, _ = time_of(model, replace(LEVERS, attention="flash"))
    block = model.blocks[0]
    assert forward == pytest.approx(2 * TOKENS * matrices(block) + attention_time(block, keys))


def test_a_mask_spares_nothing() -> None:
    """SDPA gets a window as a mask, also where the mask hides nothing."""
    model = shape(model_type="mistral", sliding_window=512)
    forward, _ = time_of(model, LEVERS)
    block = model.blocks[0]
    assert forward == pytest.approx(2 * TOKENS * matrices(block) + attention_flops(block, 512) / HEAD_SHARES[64])


def test_frozen_matrices_have_half_a_backward_pass_and_adapters_a_whole_one() -> None:
    block = (model := shape()).blocks[0]
    full, full_back = time_of(model, LEVERS)
    lora = replace(LEVERS, method="lora", lora=Lora(rank=16))
    forward, back = time_of(model, lora)
    adapters = sum(16 * sum(t.shape) for t in block.tensors if len(t.shape) == 2)
    assert forward == pytest.approx(full + 2 * TOKENS * adapters)
    assert back == pytest.approx(full_back - 2 * TOKENS * matrices(block) + 4 * TOKENS * adapters)


def test_experts_count_the_tokens_that_reach_them() -> None:
    config = LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
    model = shape_from_config(config | {"model_type": "qwen3_moe"}, "experts")
    block = model.blocks[0]
    stacked = sum(tensor.numel for tensor in block.tensors if len(tensor.shape) == 3)
    others = sum(tensor.numel for tensor in block.tensors if len(tensor.shape) == 2 and tensor.is_linear)
    router = [tensor for tensor in block.tensors if tensor.name == "mlp.gate.weight"]
    forward, back = time_of(model, LEVERS)
    experts = 2 * TOKENS * (2 / 8) * stacked / GROUPED_SHARE
    attention = attention_time(block, 256)
    assert router
    assert forward == pytest.approx(2 * TOKENS * others + experts + attention, rel=1e-3)
    assert back == pytest.approx(2 * (2 * TOKENS * others + experts) + ATTENTION_BACK["flash"] * attention, rel=1e-3)


def test_the_head_is_one_product_and_its_two_gradients() -> None:
    model, setting = shape(), setting_of(LEVERS, COUNTING)
    once = 2 * TOKENS * 32_000 * 1024
    plain = head_time(model, setting, FLOPS, False, True)
    assert (plain.products, plain.products_back) == (pytest.approx(once), pytest.approx(2 * once))
    frozen = head_time(model, setting, FLOPS, False, False)
    assert frozen.products_back == pytest.approx(once)
    fused = head_time(model, setting, FLOPS, True, True)
    assert fused.products + fused.products_back == pytest.approx(3 * once)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    """Decoding one token reads every weight for two operations each."""
    model, one = shape(), replace(LEVERS, sequence=1, micro_batch=1)
    slow_memory = FLOPS._replace(products=1e30, flash=1e30, memory=1)
    forward, _ = time_of(model, one, slow_memory)
    assert forward == pytest.approx(2 * matrices(model.blocks[0]), rel=0.01)


@pytest.mark.parametrize("preset", ["qwen2.5-7b", "qwen2.5-32b", "llama-3.1-8b", "gemma-3-27b", "7b_mamba", "3b_mamba"])
def test_the_rule_of_six(preset: str) -> None:
    """Training takes six operations for each token and each parameter that is multiplied."""
    model = load_model(preset)
    looked_up = 0 if model.tied else sum(tensor.numel for tensor in model.before)
    few = Levers(sequence=64, checkpointing=NONE)  # so that attention is next to nothing
    counted = pace(model, few, Hardware(gpu=COUNTING)).causes["arithmetic"]
    assert counted == pytest.approx(6 * 64 * (model.parameters - looked_up), rel=0.02)


def test_recomputation_is_a_forward_pass_of_the_layers() -> None:
    model, hardware = shape(), Hardware(gpu=COUNTING)
    again = pace(model, LEVERS, hardware).causes
    once = pace(model, replace(LEVERS, checkpointing=NONE), hardware).causes
    setting = setting_of(LEVERS, COUNTING)
    layer = layer_time(model.blocks[0], model.hidden_size, setting, rates_of(hardware, "bf16").card)
    assert "recomputation" not in once
    assert again["recomputation"] == pytest.approx(4 * (layer.products + layer.traffic))
    assert again["arithmetic"] == pytest.approx(once["arithmetic"])


def test_half_of_the_layers_recompute_half() -> None:
    model, hardware = shape(), Hardware(gpu=COUNTING)
    half = pace(model, replace(LEVERS, checkpointing=Checkpointing(layers=2)), hardware).causes["recomputation"]
    assert half == pytest.approx(pace(model, LEVERS, hardware).causes["recomputation"] / 2)


def test_measured_attention_counts_where_such_numbers_were_measured() -> None:
    """A GPU's kernels are measured in 16 bits; and a CPU, which has not all of them, has none faster than products."""
    known = Measured(on="2026-11-16", machine="", rates={"products.fp32": 1e11, "attention.efficient": 1e14})
    measured = Hardware(gpu=replace(UNIT, bf16_flops=3e14), measured=known)
    assert rates_of(measured, "bf16").card.efficient > 1e14
    assert (
        rates_of(measured, "fp32").card.efficient == rates_of(replace(measured, measured=None), "fp32").card.efficient
    )
    cpu = Hardware(gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=2**34), measured=known)
    assert rates_of(cpu, "fp32").card.efficient > 1e14
    assert rates_of(cpu, "fp32").card.masked_efficient <= 1e11


def test_a_card_at_its_power_limit_is_slower_at_products_alone() -> None:
    """What waits for memory lets it cool: a step that is half traffic keeps its clock."""
    model, levers = shape(), replace(LEVERS, checkpointing=NONE)
    hot = FLOPS._replace(power=1.4)
    rates = rates_of(Hardware(gpu=COUNTING), "bf16")
    plain = passes_of(model, levers, COUNTING, rates._replace(card=FLOPS), recomputing=0)
    limited = passes_of(model, levers, COUNTING, rates._replace(card=hot), recomputing=0)
    assert limited.products == pytest.approx(plain.products * 1.4**CLOCK_BY_POWER)
    mixed = FLOPS._replace(power=1.4, memory=plain.products / plain.products_back, kernel_start_s=1e12)
    cool = passes_of(model, levers, COUNTING, rates._replace(card=mixed), recomputing=0)
    assert cool.traffic > 0
    assert 1 <= cool.throttle < limited.throttle


MAMBA = {"model_type": "mamba", "vocab_size": 1000, "hidden_size": 1024, "num_hidden_layers": 2, "state_size": 16}


def mamba_time(levers: Levers, **changed: Any) -> tuple[LayerTime, float, float]:
    """A layer of Mamba's on a card whose scan alone takes time, and that forward and backward."""
    block = shape_from_config(MAMBA | changed, "mamba").blocks[0]
    assert isinstance(block.mixer, Mamba1)
    steps = TOKENS * block.mixer.inner * block.mixer.state
    card = FLOPS._replace(products=1e30, scan_back=CUDA_SCAN_STEPS_BACK_PER_S)
    layer = layer_time(block, 1024, setting_of(levers, COUNTING), card)
    forward, back = SCAN_STEPS_PER_S[levers.scan], SCAN_STEPS_BACK_PER_S[levers.scan]
    return layer, steps / forward, steps / back


@pytest.mark.parametrize("compile", ["layers", "off"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_our_scan_runs_again_with_the_mixer_alone(compile: Compile, method: Method) -> None:  # noqa: A002
    lora = Lora() if method == "lora" else None
    layer, scan, _ = mamba_time(replace(LEVERS, scan="tightfit", compile=compile, method=method, lora=lora))
    assert recompute_time(layer, ("elementwise", "qkv")).others == pytest.approx(0, abs=scan / 1e6)
    assert recompute_time(layer, ("mixer",)).others == pytest.approx(scan)
    assert recompute_time(layer, ()).others == pytest.approx(scan)
    kept, again = (recompute_time(layer, parts).host for parts in (("qkv",), ("qkv", "mixer")))
    assert again - kept > 0.99 * SCAN_OPERATIONS * OPERATION_S


def test_the_official_scan_always_runs_again_and_with_it_what_it_fuses() -> None:
    layer, scan, _ = mamba_time(replace(LEVERS, scan="official"))
    block = shape_from_config(MAMBA, "mamba").blocks[0]
    for parts in (("elementwise",), ("qkv",), ("mixer",)):
        assert recompute_time(layer, parts).others == pytest.approx(scan)
    setting = setting_of(replace(LEVERS, scan="official"), COUNTING)
    counted = recompute_time(layer_time(block, 1024, setting, FLOPS), ("elementwise",)).products
    inside = sum(t.numel for t in block.tensors if t.name.startswith(("mixer.x_", "mixer.dt_", "mixer.out_")))
    biases = sum(t.numel for t in block.tensors if t.name == "mixer.dt_proj.bias")
    assert counted == pytest.approx(2 * TOKENS * (inside - biases))


@pytest.mark.parametrize(
    ("changed", "levers", "by_cuda"),
    [
        ({}, LEVERS, True),
        ({}, replace(LEVERS, precision="fp32"), False),
        ({"state_size": 8}, LEVERS, False),
        ({"hidden_size": 1040}, LEVERS, False),
    ],
)
def test_our_scan_goes_back_by_the_kernel_that_is_for_it(
    changed: dict[str, Any], levers: Levers, by_cuda: bool
) -> None:
    layer, _, back = mamba_time(replace(levers, scan="tightfit"), **changed)
    faster = CUDA_SCAN_STEPS_BACK_PER_S / SCAN_STEPS_BACK_PER_S["tightfit"]
    assert layer.traffic_back == pytest.approx(back / faster if by_cuda else back)


def test_which_cards_have_that_kernel() -> None:
    for word, by_cuda in {"h200": True, "rtx3090": True, "v100-32gb": False, "t4": False, "mi300x": False}.items():
        rate = rates_of(parse_hardware(word), "bf16").card.scan_back
        assert rate == (CUDA_SCAN_STEPS_BACK_PER_S if by_cuda else SCAN_STEPS_BACK_PER_S["tightfit"]), word


def recomputed(model: ModelShape, levers: Levers, *parts: str, card: Card = FLOPS) -> Again:
    return recompute_time(layer_time(model.blocks[0], model.hidden_size, setting_of(levers, COUNTING), card), parts)


@pytest.mark.parametrize("compile", ["layers", "off"])
def test_the_last_product_runs_again_only_where_it_is_read(compile: Compile) -> None:  # noqa: A002
    """By a norm after it, or a router's weight; the mixer's, where something but an addition reads it."""
    levers = replace(LEVERS, compile=compile)
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    read = {
        "llama": (shape(), ("gate_proj", "up_proj"), ("o_proj",)),
        "gemma2": (
            shape(model_type="gemma2", head_dim=64, sliding_window=None),
            ("gate_proj", "up_proj", "down_proj"),
            ("o_proj",),
        ),
        "qwen3_moe": (shape(**experts, head_dim=64), ("gate_up_proj", "down_proj"), ("o_proj",)),
        "gpt_neox": (shape(model_type="gpt_neox"), ("dense_h_to_4h",), ()),
    }
    for model, feeds, outs in read.values():
        for part, names in (("mlp", feeds), ("out", outs)):
            weights = [t for t in model.blocks[0].tensors if any(f"{name}" in t.name for name in names)]
            flops = sum(
                2 * TOKENS * t.numel * (2 / 8 / GROUPED_SHARE if len(t.shape) == 3 else 1)
                for t in weights
                if len(t.shape) > 1
            )
            assert recomputed(model, levers, part).products == pytest.approx(flops), (model.name, part)


def test_only_the_products_that_run_again_are_launched_again() -> None:
    model, levers = shape(), replace(LEVERS, compile="layers")
    light, qkv, mlp = (recomputed(model, levers, part).host for part in ("elementwise", "qkv", "mlp"))
    assert qkv - light == pytest.approx(3 * COMPILED_KERNEL_S)
    assert mlp - light == pytest.approx(2 * COMPILED_KERNEL_S)
    whole = recomputed(model, levers).host
    assert whole - light == pytest.approx((3 + 1 + 1 + 2) * COMPILED_KERNEL_S)


def test_packed_weights_are_unpacked_again_for_the_products_that_run_again() -> None:
    """As many as these have, however long attention takes; and bitsandbytes has its work for each of them."""
    model = shape()
    for compile in ("layers", "off"):  # noqa: A001
        levers = replace(LEVERS, method="qlora", lora=Lora(targets=("q_proj",)), compile=compile)
        numel = {t.name.split(".")[1]: t.numel for t in model.blocks[0].tensors if len(t.shape) == 2}
        light = recomputed(model, levers, "elementwise")
        for part, names in {"mlp": ("gate_proj", "up_proj"), "out": ("o_proj",), "mixer": ()}.items():
            again = recomputed(model, levers, part)
            assert again.others - light.others == pytest.approx(2 * sum(numel[name] for name in names))
            if compile == "layers":
                each = PACKED_LINEAR_S + COMPILED_KERNEL_S
                assert again.host - light.host == pytest.approx(len(names) * each or COMPILED_KERNEL_S)


def test_layers_without_known_parts_recompute_whole() -> None:
    """PEFT's adapters on stacked experts."""
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    model, levers = shape(**experts, head_dim=64), replace(LEVERS, method="lora", lora=Lora())
    assert recomputed(model, levers, "mlp") == recomputed(model, levers)


def test_liger_reads_and_writes_once_for_a_norm() -> None:
    """Its norms, rotations and activations move less; our own worker has them by a lever of their own."""
    model, fused = shape(), replace(LEVERS, loss="fused")
    card = FLOPS._replace(memory=1, casting=1, reducing=1, strided=1, softmax=1)
    own, theirs = (setting_of(replace(fused, trainer=trainer), COUNTING) for trainer in ("tightfit", "llamafactory"))
    assert (own.liger, theirs.liger) == (False, True)
    asked = replace(LEVERS, kernels="fused")
    assert setting_of(asked, COUNTING, "llama").liger
    assert not setting_of(asked, COUNTING, "llama").liger_loss
    for other in ({"compile": "layers"}, {"checkpointing": Checkpointing(select=("mlp",))}):
        assert not setting_of(replace(asked, **other), COUNTING, "llama").liger
    assert not setting_of(asked, COUNTING, "stablelm").liger
    plain, liger = (layer_time(model.blocks[0], model.hidden_size, setting, card) for setting in (own, theirs))
    assert liger.traffic < plain.traffic / 2
    assert liger.traffic_back < plain.traffic_back / 2
    assert liger.products == plain.products
    assert liger.host < plain.host
