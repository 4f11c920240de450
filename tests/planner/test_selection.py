"""What a part of a layer costs, what it frees, and which selections are worth a search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from small_questions import GIB, built, card, machine

from tightfit.job import Job
from tightfit.memory.activations import setting_of
from tightfit.memory.layers import layer_cost, layer_input_bytes, recompute_cost
from tightfit.model.load import load_model, shape_from_config
from tightfit.pace.rates import rates_of
from tightfit.pace.work import ELEMENTWISE
from tightfit.planner import candidates, plan
from tightfit.planner.selection import Price, Worth, find_prices, selections
from tightfit.types import PARTS, Compile, Levers, Lora, ModelShape

H200 = machine("1xh200", "512GB")
LORA: dict[str, Any] = {"method": "lora", "lora": Lora()}
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 256_000,
    "hidden_size": 3584,
    "intermediate_size": 14_336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MODELS: dict[str, ModelShape] = {
    "llama-3.1-8b": load_model("llama-3.1-8b"),
    "7b_mamba": load_model("7b_mamba"),
    "gemma-2-9b": shape_from_config(GEMMA2, "gemma-2-9b"),
    "qwen3-30b-a3b": shape_from_config(EXPERTS, "qwen3-30b-a3b"),
    "gpt_neox": built("gpt_neox", 3, 512, 5000, False),
    "mamba2": built("mamba2", 3, 512, 5000, False),
}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", LORA),
    ("llama-3.1-8b", {"engine": "fsdp2"}),
    ("llama-3.1-8b", {**LORA, "method": "qlora"}),
    ("7b_mamba", {"engine": "fsdp2"}),
    ("7b_mamba", LORA),
    ("gemma-2-9b", LORA),
    ("qwen3-30b-a3b", {"engine": "fsdp2"}),
    ("gpt_neox", {}),
    ("mamba2", {}),
]


def prices_of(name: str, levers: Levers) -> dict[str, Price]:
    setting = setting_of(levers, H200.gpu, MODELS[name].model_type)
    return dict(zip(PARTS, find_prices(MODELS[name], setting, rates_of(H200, "bf16").card), strict=True))


@pytest.mark.parametrize("compile", ["layers", "off"])
@pytest.mark.parametrize(("name", "said"), WAYS)
def test_a_part_frees_what_is_kept_without_it(name: str, said: dict[str, Any], compile: Compile) -> None:  # noqa: A002
    """As the footprint counts it; and what several parts free is what each of them does."""
    shape, levers = MODELS[name], Levers(**said, scan="tightfit", compile=compile)
    setting, prices = setting_of(levers, H200.gpu, shape.model_type), prices_of(name, levers)

    def kept(*parts: str) -> int:
        each = [recompute_cost(block, shape.hidden_size, setting, parts).saved for block in shape.blocks]
        return sum([each[kind] for kind in shape.pattern])

    least = kept("elementwise")
    for part in PARTS[1:]:
        assert prices[part].freed == least - kept("elementwise", part)
        assert (prices[part].freed > 0) == (prices[part].seconds > 0)
    together = sum(prices[part].freed for part in PARTS[1:])
    assert together == pytest.approx(least - kept(*PARTS), rel=0.05)
    if compile == "layers":
        assert prices["elementwise"][1:] == (0, 0)
    else:
        whole = [layer_cost(block, shape.hidden_size, setting).saved for block in shape.blocks]
        inputs = [layer_input_bytes(block, shape.hidden_size, setting) for block in shape.blocks]
        assert prices["elementwise"].freed == sum([whole[kind] - inputs[kind] for kind in shape.pattern]) - least


def test_experts_and_capped_attention_and_scans_are_seen() -> None:
    experts = prices_of("qwen3-30b-a3b", Levers(engine="fsdp2", compile="layers"))
    rows = 8 * (2 * 768 + 2048) * 2 * 2048 * 48  # of both products, each token for each of its experts
    assert experts["mlp"].freed == pytest.approx(rows, rel=0.15)  # and what the router's weights are made of
    assert any("mlp" in parts for parts in selections(MODELS["qwen3-30b-a3b"], Levers(compile="layers"), H200).alone)

    capped = prices_of("gemma-2-9b", Levers(**LORA, compile="layers"))
    scores, context = 16 * 2048 * 2, 16 * 256 * 2
    assert capped["mixer"].freed == 42 * 2048 * (scores + context)
    assert ("elementwise", "mixer") in selections(MODELS["gemma-2-9b"], Levers(**LORA, compile="layers"), H200).alone

    # The planner asks before it has chosen a scan: of compiled layers there is only ours.
    asked = Levers(engine="fsdp2", compile="layers")
    assert asked.scan == "official"
    mamba = prices_of("7b_mamba", replace(asked, scan="tightfit"))
    assert mamba["mixer"].of_a_byte > mamba["qkv"].of_a_byte > 0
    assert selections(MODELS["7b_mamba"], asked, H200).alone == (("elementwise",), ("elementwise", "qkv"))


def test_layers_without_known_parts_have_no_selections() -> None:
    """Adapters on stacked experts."""
    assert selections(MODELS["qwen3-30b-a3b"], Levers(**LORA), H200) == ((), (), ())


def test_of_what_is_sent_only_selections_far_apart_are_tried() -> None:
    worth = selections(MODELS["llama-3.1-8b"], Levers(**LORA, compile="layers"), H200)
    assert worth.largest == ("elementwise", "mlp")  # of a dense model nothing is wider than gate and up
    assert {*worth.sending} < {*worth.alone}
    assert {len(parts) for parts in worth.sending} == {1, 2, len(PARTS) - 1}


SLOW = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "gpus", "job", "sizes"),
    [
        ("llama-3.1-8b", "1xh200", {"method": "lora", "effective_batch": 2}, (20, 22)),
        pytest.param(
            "llama-3.1-8b", "1xh200", {"method": "qlora", "effective_batch": 4, "sequence": 4096}, (14, 18), marks=SLOW
        ),
        pytest.param("7b_mamba", "1xh200", {"method": "lora", "effective_batch": 2}, (20, 24), marks=SLOW),
        pytest.param("gemma-2-9b", "1xh200", {"method": "lora", "effective_batch": 2}, (25, 28, 32), marks=SLOW),
        pytest.param(
            "gemma-2-9b", "1xh200", {"method": "lora", "effective_batch": 1, "sequence": 8192}, (32, 40, 60), marks=SLOW
        ),
        ("qwen3-30b-a3b", "8xh200", {"effective_batch": 8, "sequence": 4096}, (70, 76)),
    ],
)
def test_what_is_not_tried_would_win_less_than_a_hundredth(
    name: str, gpus: str, job: dict[str, Any], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = tuple(("elementwise", *parts) for count in range(4) for parts in combinations(PARTS[1:], count))

    def best_s(size: int) -> float:
        pinned = {"attention": "sdpa"}
        way = plan(Job(model=name, levers=pinned, **job), MODELS[name], card(machine(gpus), size * GIB)).chosen
        assert way is not None
        return way.pace.step_s

    few = [best_s(size) for size in sizes]
    monkeypatch.setattr(candidates, "selections", lambda *_: Worth(every, every, ELEMENTWISE))
    for size, seconds in zip(sizes, few, strict=True):
        assert seconds <= 1.01 * best_s(size), size
