"""A Mamba mixer under ZeRO-3 is a leaf: gathered whole, computed as one function, and nobody's losses differ.

Real DeepSpeed on two CPU ranks, with thresholds so small that every parameter is cut, gathered and let go again. Losses
in fp32 may differ by the order of sums: one part in a hundred thousand, as in test_same_losses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plain import plain_losses, write_examples
from running import edit, run_ranks, write_plan
from small_models import config_of, on_meta
from test_resume import cut_off

pytestmark = pytest.mark.thorough

STEPS, MIDDLE, LAYERS = 3, 1, 4
TOLERANCE = 1e-5
LEARNT = 0.05
FLAGS: dict[str, Any] = {
    "precision": "fp32",
    "seq": 48,
    "effective_batch": 8,
    "micro_batch": 2,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "scan": "tightfit",
}
FORWARDS = 2 * STEPS
"""Of a rank: two micro batches a step."""
LETTING_GO = {
    "stage3_prefetch_bucket_size": 10_000,
    "stage3_max_live_parameters": 80_000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
LORA = {"method": "lora", "lora_rank": 4, "learning_rate": 3e-2}


_zero2: dict[str, Ran] = {}


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    mixers: str
    """A letter for each call of a mixer on the first rank: f fused, u by its modules."""
    events: list[dict[str, Any]]


def write(folder: Path, model: str = "tiny_mamba", **flags: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = write_examples(folder / "examples.jsonl")
    if model == "falcon_mamba":
        config_of("falcon_mamba", num_hidden_layers=LAYERS).save_pretrained(folder / "shape")
        model = str(folder / "shape")
    write_plan(folder, 2, **{**FLAGS, "model": model, "data": str(data), **flags})
    if flags["engine"] == "zero3":
        path = folder / "deepspeed.json"
        config = json.loads(path.read_text())
        config["zero_optimization"] |= LETTING_GO
        path.write_text(json.dumps(config))
    return folder


def run(folder: Path, *options: str) -> Ran:
    (folder / "mixed.0").unlink(missing_ok=True)
    ran = run_ranks(folder, "--no-probe", *options, first=f"import mixing\nmixing.note({str(folder / 'mixed')!r})")
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    return Ran(ran.losses, (folder / "mixed.0").read_text(), ran.events)


@pytest.mark.parametrize(
    ("model", "sharded"),
    [
        ("tiny_mamba", "zero3"),
        pytest.param("falcon_mamba", "zero3", marks=pytest.mark.slow),
        pytest.param("tiny_mamba", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_sharded_mixer_is_fused_and_its_losses_are_zero2s(
    tmp_path_factory: pytest.TempPathFactory, model: str, sharded: str
) -> None:
    """FSDP2 gathers a layer at a time, so that all of a mixer is there anyway (as in test_packed_mamba)."""
    if model not in _zero2:
        _zero2[model] = run(write(tmp_path_factory.mktemp("zero2"), model, engine="zero2", checkpointing="layers:2"))
    whole = _zero2[model]
    found = run(write(tmp_path_factory.mktemp(sharded), model, engine=sharded, checkpointing="layers:2"))
    assert found.mixers == whole.mixers == "f" * FORWARDS * (LAYERS + 2)
    assert found.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert found.losses[-1] < found.losses[0] - LEARNT


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"checkpointing": "none"}, marks=pytest.mark.slow),
        pytest.param({"checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param({"offload_optimizer": "cpu", "offload_param": "cpu"}, marks=pytest.mark.slow),
    ],
    ids=["none", "full", "offloaded"],
)
def test_a_leaf_follows_plain_pytorch(tmp_path: Path, flags: dict[str, Any]) -> None:
    folder = write(tmp_path, engine="zero3", **flags)
    leaf = run(folder)
    assert set(leaf.mixers) == {"f"}
    assert leaf.losses == pytest.approx(plain_losses(folder), rel=TOLERANCE)


@pytest.mark.slow
def test_a_leaf_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    folder = write(tmp_path, engine="zero3", checkpointing="full")
    edit(folder, saving__every_steps=MIDDLE, saving__keep_last=9)
    whole = run(folder)
    cut_off(folder / "run", MIDDLE)
    rest = run(folder)
    assert [each["step"] for each in rest.events if each["event"] == "resumed"] == [MIDDLE]
    assert rest.losses == whole.losses[MIDDLE:]
    assert rest.mixers == "f" * 2 * (STEPS - MIDDLE) * 2 * LAYERS


@pytest.mark.slow
def test_frozen_leaves_pass_the_gradient_on(tmp_path: Path) -> None:
    whole = run(write(tmp_path / "zero2", engine="zero2", trains="embeddings"))
    leaf = run(write(tmp_path / "zero3", engine="zero3", trains="embeddings"))
    assert set(leaf.mixers) == {"f"}
    assert leaf.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert leaf.losses[-1] < leaf.losses[0]


@pytest.mark.parametrize(
    ("targets", "under_zero2"),
    [pytest.param("x_proj", "u", marks=pytest.mark.slow), pytest.param("in_proj", "f", marks=pytest.mark.slow)],
)
def test_with_an_adapter_inside_modules_are_called(tmp_path: Path, targets: str, under_zero2: str) -> None:
    """In the lowest layer nothing below an adapter has a gradient, and a leaf would wait for one in vain."""
    flags = {**LORA, "lora_targets": targets, "checkpointing": "none"}
    whole = run(write(tmp_path / "zero2", engine="zero2", **flags))
    sharded = run(write(tmp_path / "zero3", engine="zero3", **flags))
    assert (set(whole.mixers), set(sharded.mixers)) == ({under_zero2}, {"u"})
    assert sharded.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert sharded.losses[-1] < sharded.losses[0] - LEARNT


@pytest.mark.parametrize(("buffers", "leaves"), [(5, LAYERS), (4, 0)])
def test_from_a_disk_a_leaf_must_come_in_one_go(buffers: int, leaves: int) -> None:
    """DeepSpeed raises where parameters that are wanted at once outnumber its buffers; the head has one of them."""
    from deepspeed.utils import get_z3_leaf_modules

    from tightfit.train.engines.deepspeed import gather_mixers_whole

    model = on_meta(config_of("mamba", num_hidden_layers=LAYERS))
    for name, param in model.named_parameters():
        if name.endswith("_proj.weight"):
            param.ds_tensor = SimpleNamespace(final_location="nvme")  # as zero.Init marks them
    gather_mixers_whole(model, {"zero_optimization": {"offload_param": {"device": "nvme", "buffer_count": buffers}}})
    assert len(get_z3_leaf_modules(model)) == leaves
