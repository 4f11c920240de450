"""GPUs that cannot work together as they were told to: one sentence, which names what would do."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.inputs.flags import levers_from_flags
from tightfit.inputs.layouts import check_layout, find_pipeline_obstacle
from tightfit.model.load import load_model
from tightfit.types import ConfigError, Levers

ROW = {"pipeline_parallel": 2}
ADD_UP = "give 2 numbers of at least 1 that add up to 32, or leave it out"


@pytest.mark.parametrize(
    ("flags", "why", "fix"),
    [
        ({"pipeline_parallel": 5}, "inputs.layout-sizes", "use 2, 4 or 8, or leave it out"),
        ({"pipeline_parallel": 8, "stages_per_gpu": 8}, "inputs.layout-sizes", "use 2, 3 or 4, or leave it out"),
        ({"pipeline_parallel": 3}, "inputs.layout-sizes", "use 2, 4 or 8, or leave it out"),
        ({**ROW, "engine": "zero2"}, "inputs.layout-needs-engine", "needs --engine fsdp2"),
        ({**ROW, "sequence_parallel": 8}, "inputs.sharing-gpus", "use 1, 2 or 4"),
        ({**ROW, "tensor_parallel": 8}, "inputs.layout-sizes", "use 2 or 4, or leave it out"),
        ({"pipeline_parallel": 5, "tensor_parallel": 2}, "inputs.layout-sizes", "use 2 or 4, or leave it out"),
        ({**ROW, "frozen_layers": 4}, "inputs.layouts-apart", "choose one of them"),
        ({"stages_per_gpu": 2}, "inputs.stages-without-pipeline", "add --pipeline-parallel N"),
        ({"stage_layers": "16,16"}, "inputs.stages-without-pipeline", "add --pipeline-parallel N"),
        ({**ROW, "stage_layers": "16,15"}, "inputs.stage-layers", ADD_UP),
        ({**ROW, "stage_layers": "16,8,8"}, "inputs.stage-layers", ADD_UP),
        ({**ROW, "stage_layers": "32,0"}, "inputs.stage-layers", ADD_UP),
        ({**ROW, "stage_layers": "16;16"}, "inputs.flag-takes", "such as 7,8,9,8, not '16;16'"),
    ],
)
def test_a_row_that_cannot_be(flags: dict[str, Any], why: str, fix: str) -> None:
    shape = load_model("llama-3.1-8b")
    with pytest.raises(ConfigError) as raised:
        check_layout(levers_from_flags(flags, shape, Levers(engine="fsdp2")), shape, 8)
    assert raised.value.said.id == why
    assert str(raised.value.said).endswith(fix)


@pytest.mark.parametrize(
    "flags",
    [
        ROW,
        {**ROW, "stages_per_gpu": 4},
        {"pipeline_parallel": 8},
        {**ROW, "shard_within": 2},
        {**ROW, "stages_per_gpu": 2, "stage_layers": "1,2,3,26"},
        {**ROW, "tensor_parallel": 4},
        {**ROW, "tensor_parallel": 2, "shard_within": 2},
        {**ROW, "sequence_parallel": 2, "stages_per_gpu": 2},
    ],
)
def test_a_row_that_can(flags: dict[str, Any]) -> None:
    shape = load_model("llama-3.1-8b")
    levers = levers_from_flags(flags, shape, Levers(engine="fsdp2"))
    check_layout(levers, shape, 8)
    assert find_pipeline_obstacle(levers, shape, 8) is None
