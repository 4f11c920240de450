"""A replay that begins as one known step and ends as another reports what one from end to end does."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.memory.gathered import (
    GatherLimits,
    Model,
    Passes,
    count_settling_layers,
    replay,
    replay_between,
    stretches,
    summary,
)
from tightfit.memory.zero3 import Style, _model
from tightfit.model.load import shape_from_config
from tightfit.types import Lora

SIZES = (0, 1, 10**5, 10**6, 10**7, 10**9)
"""From nothing to more than any of these models has."""


@lru_cache(maxsize=64)
def model(family: str, layers: int, tied: bool, style: Style, threshold: int) -> Model:
    config: dict[str, Any] = {"model_type": family, "vocab_size": 5000, "hidden_size": 512}
    config |= {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    if family == "mamba":
        config |= {"state_size": 16, "expand": 2, "conv_kernel": 4}
    else:
        config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 1536}
    return _model(shape_from_config(config, family), style, threshold)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Model, Passes, GatherLimits]:
    trains = draw(st.booleans())
    style = Style(
        lora=None if trains else Lora(rank=draw(st.sampled_from([1, 64])), dtype="bf16"),
        method="full" if trains else draw(st.sampled_from(["lora", "qlora"])),
        frozen=not trains,
        scan_kernel=draw(st.booleans()),
        leaf_mixer=trains and draw(st.booleans()),
        leaf_mlp=trains and draw(st.booleans()),
    )
    layers = draw(st.integers(1, 12))
    made = model(
        draw(st.sampled_from(["llama", "mamba"])), layers, draw(st.booleans()), style, draw(st.sampled_from(SIZES))
    )
    passes = Passes(
        recompute=draw(st.integers(0, layers)),
        lowest=draw(st.integers(0, 1)) if trains and layers > 1 else 0,
        input_grad=draw(st.booleans()),
        wrappers=0 if trains else 1,
    )
    limits = GatherLimits(*(draw(st.sampled_from(SIZES)) for _ in range(3)), flat=draw(st.booleans()))
    return made, passes, replace(limits, max_live=max(limits.max_live, 1))


@pytest.mark.thorough
@settings(derandomize=True)
@given(steps())
def test_two_known_steps_make_all_between(drawn: tuple[Model, Passes, GatherLimits]) -> None:
    made, passes, limits = drawn
    first, last = (
        replay(stretches(made, replace(passes, recompute=depth, input_grad=True)), limits)
        for depth in (0, len(made.layers))
    )
    whole = stretches(made, passes)
    logs = replay(whole, limits).logs
    assert replay_between(whole, limits, first, last) == logs
    if passes.recompute <= count_settling_layers(first):
        expected, found = summary(whole, logs), summary(first.whole, first.logs)
        assert (found.loss, found.layers[-1]) == (expected.loss, expected.layers[-1])
