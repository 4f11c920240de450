"""The units that stream are the whole model, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tightfit.memory import weights
from tightfit.memory.units import stays, units_of
from tightfit.model.load import load_model
from tightfit.types import Levers, Lora


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen1.5-0.5b", "7b_mamba", "gemma-3-27b"])
@pytest.mark.parametrize(
    "levers",
    [
        Levers(),
        Levers(precision="fp32"),
        Levers(frozen_layers=3),
        Levers(trains="embeddings"),
        Levers(trains="layers"),
        Levers(method="lora", lora=Lora()),
        Levers(method="qlora", lora=Lora()),
    ],
    ids=["full", "fp32", "frozen", "embeddings", "layers", "lora", "qlora"],
)
def test_units_add_up_to_the_model(model: str, levers: Levers) -> None:
    shape = load_model(model)
    units, all_weights = units_of(shape, levers), weights.of(shape, levers)
    every = [units.before, *units.layers, units.after]
    adapters = 0 if levers.method == "full" else all_weights.trainable_numel * all_weights.trainable_width
    assert sum(unit.numel for unit in every) == shape.parameters
    assert sum(unit.bytes for unit in every) == all_weights.bytes - adapters - all_weights.scales_bytes
    if levers.method == "full":
        assert sum(unit.trained for unit in every) == all_weights.trainable_numel
        assert sum(unit.tensors for unit in every if unit.trained) == len(all_weights.trainable)
    else:
        assert not any(unit.trained for unit in every)


@pytest.mark.parametrize("layers", [1, 7, 32])
def test_resident_layers_are_spread_over_the_depth(layers: int) -> None:
    for resident in range(layers + 1):
        chosen = [layer for layer in range(layers) if stays(layer, resident, layers)]
        assert len(chosen) == resident
        gaps = [after - before for before, after in pairwise(chosen)]
        assert max(gaps, default=1) - min(gaps, default=1) <= 1
