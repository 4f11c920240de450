"""Saved under one engine, stage and number of ranks, loaded under another: every bit of it, and the run goes on.

Each of seven engines saves from two ranks, and FSDP2 from four as well: in two groups that have a copy of the model
each, or that share their sequences, their layers or the experts of a model that has some, or in a pipeline whose stages
may do the same. Each of them, with one, two and three ranks, loads all and saves them again at once: weights, fp32
copies and moments must be the same bytes in the file. The loss of the next step may differ by the order in which an
engine adds: two parts in a thousand in bf16, as in test_same_losses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from running import edit, run_ranks, write_plan
from small_models import MIXTRAL

pytestmark = pytest.mark.thorough

GROUPS = "fsdp2 in groups"
SHARED = "fsdp2 shares sequences"
LAYERS = "fsdp2 shares layers"
ROW = "fsdp2 in a pipeline"
OF_FOUR: dict[str, dict[str, Any]] = {
    GROUPS: {"shard_within": 2},
    SHARED: {"sequence_parallel": 2},
    LAYERS: {"tensor_parallel": 2},
    ROW: {"pipeline_parallel": 2, "stage_layers": "3,1"},
    "fsdp2 interleaved": {"pipeline_parallel": 2, "stages_per_gpu": 2},
    "fsdp2 shares layers in a pipeline": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "fsdp2 shares sequences in a pipeline": {"pipeline_parallel": 2, "sequence_parallel": 2},
}
WORLDS = {engine: (4,) if "shares" in engine and "pipeline" in engine else (2, 4) for engine in OF_FOUR}
ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "stream", *OF_FOUR)
QUICKLY = (("zero3", 1, ("fsdp2", ROW)), ("fsdp2", 2, ("zero3",)), ("ddp", 2, ("zero3", "fsdp2")))
QUICKLY += (("stream", 2, ("zero3", "stream")), ("fsdp2", 2, ("stream",)))
QUICKLY += ((ROW, 4, ("zero3", ROW)), (LAYERS, 4, ("zero3", LAYERS)))
"""What `make test` has of it: both ways of cutting, each from the other."""
MODEL = {"model": MIXTRAL}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ddp of experts": MODEL,
    "zero3 of experts": MODEL,
    "fsdp2 of experts": MODEL,
    "fsdp2 shares experts": {**MODEL, "expert_parallel": 2},
    "fsdp2 shares experts of 4": {**MODEL, "expert_parallel": 4},
    "fsdp2 shares experts in groups": {**MODEL, "expert_parallel": 2, "shard_within": 2},
    "fsdp2 shares experts in a pipeline": {**MODEL, "expert_parallel": 2, "pipeline_parallel": 2},
    "fsdp2 shares experts in 8 bits": {**MODEL, "expert_parallel": 2, "optimizer": "adamw8bit"},
}
QUICKLY += (("fsdp2 shares experts", 4, ("fsdp2 of experts",)), ("fsdp2 of experts", 2, ("fsdp2 shares experts",)))
STEP, TOLERANCE = 2, 2e-3
FLAGS = {
    "model": "tiny_llama",
    "precision": "bf16",
    "seq": 32,
    "micro_batch": 1,
    "max_steps": STEP + 1,
    "learning_rate": 3e-3,
}


def plan_for(folder: Path, world: int, engine: str, batch: int, **edits: Any) -> Path:
    flags = {**FLAGS, "engine": engine.split(maxsplit=1)[0], **OF_FOUR.get(engine, {}), **OF_EXPERTS.get(engine, {})}
    return edit(write_plan(folder, world, **flags, effective_batch=batch), training__schedule="constant", **edits)


Saved = Callable[[str, int], tuple[Path, float]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of an engine, and rows a step, its checkpoint of step 2, and the loss of step 3 as it would have gone on."""

    @cache
    def save(engine: str, batch: int) -> tuple[Path, float]:
        folder = tmp_path_factory.mktemp("saved") / engine
        world = 4 if engine in OF_FOUR or "expert_parallel" in OF_EXPERTS.get(engine, {}) else 2
        plan_for(folder, world, engine, batch, saving__every_steps=1, saving__keep_last=5)
        ran = run_ranks(folder, "--no-probe")
        assert ran.codes == [0] * world, "\n".join(ran.stderr)
        return ran.folder / "checkpoints" / f"step-{STEP:08d}", ran.losses[STEP]

    return save


def tensors(folder: Path) -> dict[str, bytes]:
    """The files with tensors in them, to the byte."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("engine", "world", "sources"),
    [
        *QUICKLY,
        *(
            pytest.param(engine, world, ENGINES, marks=pytest.mark.slow)
            for engine in ENGINES
            for world in WORLDS.get(engine, (1, 2, 3))
        ),
        *(pytest.param(engine, 4, tuple(OF_EXPERTS)[:-1], marks=pytest.mark.slow) for engine in tuple(OF_EXPERTS)[:-1]),
        pytest.param(tuple(OF_EXPERTS)[-1], 4, tuple(OF_EXPERTS)[-1:], marks=pytest.mark.slow),
    ],
)
def test_any_engine_goes_on_from_any_other(
    tmp_path: Path, saved: Saved, engine: str, world: int, sources: tuple[str, ...]
) -> None:
    batch = 12 if world == 3 else 4  # whichever number of ranks has saved and loads
    checkpoints = {source: saved(source, batch) for source in sources}
    plan = plan_for(tmp_path / "plan", world, engine, batch)
    out = tmp_path / "out"
    folders = ", ".join(f"Path({str(folder)!r})" for folder in (plan, out, *(each for each, _ in checkpoints.values())))
    ran = run_ranks(plan, first=f"from pathlib import Path\nfrom crossing import go_on\ngo_on({folders})")
    assert ran.codes == [0] * world, "\n".join(ran.stderr)
    losses = json.loads((out / "losses.json").read_text())
    for name, (folder, loss) in checkpoints.items():
        again = tensors(out / name / "checkpoints" / folder.name)
        expected = tensors(folder)
        assert again.keys() == expected.keys()
        assert [file for file in again if again[file] != expected[file]] == [], f"{name} under {engine} on {world}"
        assert losses[name] == pytest.approx(loss, rel=TOLERANCE)
    shutil.rmtree(out)
