"""What a failed run of ours was to take is what its plan said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tightfit.model.load import find_config
from tightfit.runs.cause import read_planned_footprint


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder as Hugging Face writes it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(find_config("qwen2.5-7b").config)))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [{}, {"packing": True, "attention": "sdpa"}, {"method": "lora", "seq": 4096}, {"max_grad_norm": 0.0}],
    ids=["plain", "packed", "adapters", "unclipped"],
)
def test_a_job_with_weights_of_its_own_is_predicted_as_planned(
    tmp_path: Path, weights: str, asked: dict[str, Any]
) -> None:
    planned = tightfit.plan(model=weights, gpus="8x80GB", host_ram="512GB", no_calibration=True, **asked)
    planned.write(tmp_path / "plan")
    footprint, chosen = read_planned_footprint(tmp_path / "plan"), planned.chosen
    assert footprint is not None
    assert chosen is not None
    assert footprint.gpu == chosen.footprint.gpu
    assert footprint.host == chosen.footprint.host
