"""The engine that cuts nothing up: torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import run_ranks, write_plan

from tightfit.train.engines.ddp import Ddp
from tightfit.types import ConfigError, Levers

FLAGS: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "bf16",
    "seq": 32,
    "effective_batch": 4,
    "micro_batch": 1,
    "max_steps": 3,
    "learning_rate": 3e-3,
    "checkpointing": "none",
}


@pytest.mark.parametrize(
    ("levers", "advice"),
    [
        (Levers(engine="ddp", optimizer="adafactor"), "use a ZeRO engine, or --optimizer adamw"),
        (Levers(engine="ddp", precision="fp16", master_weights=False), "or use --precision bf16"),
    ],
)
def test_what_this_engine_cannot_train_is_one_sentence(levers: Levers, advice: str) -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=advice):
        Ddp(nothing, levers, nothing, nothing)


@pytest.mark.thorough
def test_sixteen_bits_train_as_zero1_does(tmp_path: Path) -> None:
    """Four micro batches a step: what they add up is not rounded, and the probe leaves nothing behind."""
    found = {}
    for engine, options in (("ddp", []), ("zero1", ["--no-probe"])):
        ran = run_ranks(write_plan(tmp_path / engine, 1, engine=engine, **FLAGS), *options)
        assert ran.codes == [0], "\n".join(ran.stderr)
        found[engine] = ran.losses
    assert found["ddp"] == pytest.approx(found["zero1"], rel=2e-3)
    assert found["ddp"][-1] < found["ddp"][0]
