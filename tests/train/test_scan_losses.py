"""Our Mamba trains as transformers' own does: the worker's loss curves of both, step by step.

In fp32 the two differ by the order of their sums. A step adds one rounding to the weights (2^-24 of them) in each run,
and after so many steps the losses may differ by all of these together. That is what splitting a window into other micro
batches does to transformers' own losses as well: 4e-7 of them here, where ours differ from them by 2e-7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import run_ranks, write_plan
from small_models import config_of

STEPS = 12
ROUNDING = 2 * STEPS * 2.0**-24
LEARNT = 1.0
"""How far the loss must fall, or equal losses would say nothing."""

FLAGS: dict[str, Any] = {
    "data": "shipped:text",
    "precision": "fp32",
    "engine": "zero1",
    "seq": 64,
    "micro_batch": 2,
    "effective_batch": 4,
    "max_steps": STEPS,
    "learning_rate": 5e-3,
}


def losses(folder: Path, family: str, scan: str) -> list[float]:
    folder.mkdir()
    model = "tiny_mamba"
    if family != "mamba":
        model = str(folder / "shape")
        config_of(family, tie_word_embeddings=True).save_pretrained(model)
    ran = run_ranks(write_plan(folder, 1, model=model, scan=scan, **FLAGS), "--no-probe")
    assert ran.codes == [0], "\n".join(ran.stderr)
    return ran.losses


@pytest.mark.thorough
@pytest.mark.parametrize("family", [pytest.param("mamba", marks=pytest.mark.slow), "falcon_mamba"])
def test_both_scans_learn_the_same(tmp_path: Path, family: str) -> None:
    ours, theirs = (losses(tmp_path / scan, family, scan) for scan in ("tightfit", "torch"))
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=ROUNDING)
    assert theirs[-1] < theirs[0] - LEARNT
