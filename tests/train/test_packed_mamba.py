"""Mamba on packed rows trains as on its documents one by one: our scan and convolution stop at every border.

Each window holds all documents, packed or not, so the loss of every step is the mean over the same tokens; that the
later ones agree says that the gradients did. What they are held against is transformers' own scan on single documents.
Two ranks, accumulation, recomputation. In fp32 sums come in another order: one part in a hundred thousand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Ran, run_ranks, write_plan
from small_models import config_of

ROUNDING = 1e-5
STEPS = 3
LEARNT = 0.05
"""How far the loss must fall, or equal losses would say nothing."""
DOCUMENTS, ROWS = 8, 4
"""One long document and one short one fill a row."""

FLAGS: dict[str, Any] = {
    "precision": "fp32",
    "seq": 68,
    "micro_batch": 1,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
}
ALONE = {"engine": "zero2", "scan": "torch", "effective_batch": DOCUMENTS}
PACKED = {"scan": "tightfit", "packing": True, "effective_batch": ROWS}
WAYS: dict[str, dict[str, Any]] = {
    "zero2": {"engine": "zero2", "checkpointing": "layers:1"},
    "zero3 fused": {"engine": "zero3", "checkpointing": "full", "loss": "fused"},
    "fsdp2": {"engine": "fsdp2", "checkpointing": "full+offload"},
}

pytestmark = pytest.mark.thorough
_references: dict[str, list[float]] = {}


def write(folder: Path, model: str, **flags: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if model == "falcon_mamba":
        config_of(model, tie_word_embeddings=True).save_pretrained(folder / "shape")
        model = str(folder / "shape")
    lines = []
    for number in range(DOCUMENTS):
        words = " ".join(f"word{(number * 7 + at) % 23:02}" for at in range(7 if number % 2 else 2))
        lines.append(json.dumps({"text": words}))
    data = folder / "texts.jsonl"
    data.write_text("\n".join(lines) + "\n")
    return write_plan(folder, 2, **{"model": model, "data": str(data), **FLAGS, **flags})


def run_well(folder: Path, *options: str) -> Ran:
    noting = f"import mixing\nmixing.note({str(folder / 'mixed')!r})"
    ran = run_ranks(folder, *options, first=noting)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    assert len(ran.losses) == STEPS
    assert ran.of("step")[-1]["epoch"] == STEPS  # each of its windows held everything
    return ran


def reference(folder: Path, model: str) -> list[float]:
    if model not in _references:
        _references[model] = run_well(write(folder, model, **ALONE), "--no-probe").losses
    return _references[model]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "fsdp2" else [pytest.mark.slow]) for way in WAYS])
def test_packed_documents_train_as_single_ones(tmp_path: Path, way: str) -> None:
    expected = reference(tmp_path / "alone", "tiny_mamba")
    packed = run_well(write(tmp_path / "packed", "tiny_mamba", **PACKED, **WAYS[way]))
    assert set((tmp_path / "packed" / "mixed.0").read_text()) == {"f"}, "a sharded mixer is one function here too"
    assert packed.losses == pytest.approx(expected, rel=ROUNDING)
    assert expected[-1] < expected[0] - LEARNT


@pytest.mark.slow
def test_falcon_mamba_too(tmp_path: Path) -> None:
    expected = reference(tmp_path / "alone", "falcon_mamba")
    packed = run_well(write(tmp_path / "packed", "falcon_mamba", **PACKED, **WAYS["zero3 fused"]))
    assert packed.losses == pytest.approx(expected, rel=ROUNDING)
    assert expected[-1] < expected[0] - LEARNT


def test_another_scan_refuses_packed_rows(tmp_path: Path) -> None:
    ran = run_ranks(write(tmp_path / "torch", "tiny_mamba", **PACKED | {"scan": "torch"}, engine="zero2"))
    assert ran.codes[0] == 2
    assert "use --scan tightfit" in ran.stderr[0]
    assert "Traceback" not in "".join(ran.stderr)
