"""Every engine and stage follows a plain single-process PyTorch run of the same job, step by step.

Two ranks, two micro batches each, accumulation, clipping that bites, a schedule with warm-up, tied embeddings, half of
the layers recomputing, answers of different lengths. fp32 may differ by the order of sums: one part in a hundred
thousand. bf16 rounds activations and gradients to eight bits, in another order on each engine: two parts in a thousand
of the loss.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from plain import plain_losses, plain_steps, write_examples
from running import Ran, edit, run_ranks, write_plan
from small_models import MIXTRAL, QWEN2_MOE, QWEN3_MOE

from tightfit.hardware.machine import read_text

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
STEPS = 5
LEARNT = 0.05
"""How far the loss must fall, or equal losses would say nothing."""

WITHOUT_BF16 = re.compile(r"^Features\s*:(?!.*\bbf16\b)", re.MULTILINE)
"""An Arm processor on which torch multiplies bf16 number by number, hundreds of times slower than fp32."""

FULL: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "fp32" if WITHOUT_BF16.search(read_text(Path("/proc/cpuinfo"))) else "bf16",
    "seq": 128,
    "effective_batch": 8,
    "micro_batch": 2,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "checkpointing": "layers:2",
}
OFFLOADED = {"offload_optimizer": "cpu"}
LORA = {"method": "lora", "precision": "fp32", "lora_rank": 4, "learning_rate": 3e-2}
SMALL_BUCKETS = {"reduce_bucket": 20_000, "overlap_comm": "on"}
"""Several of them for one model, as large models have."""
GROUPS = {"shard_within": 2, "micro_batch": 1}
"""Four ranks, two and two."""
SHARED = {"sequence_parallel": 2, "precision": "fp32"}
"""Four ranks, of which two and two share each sequence."""
TILED = {"mlp": "tiled", "precision": "fp32"}
"""Each MLP in four tiles, or two."""
SHARED_LAYERS = {"engine": "fsdp2", "precision": "fp32", "tensor_parallel": 2}
"""Four ranks, of which two and two share each layer."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA = {"model_type": "llama", **SMALL, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", **SMALL, "head_dim": 16, "tie_word_embeddings": False}
GEMMA3 = {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 16, "tie_word_embeddings": True}
IN_A_ROW = {"engine": "fsdp2", "pipeline_parallel": 2, "precision": "fp32", "micro_batch": 1}
"""Four ranks: two stages, each of which two ranks share."""
INTERLEAVED = {**IN_A_ROW, "stages_per_gpu": 2, "checkpointing": "layers:1"}
OF_FOUR = {"shard_within", "sequence_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel"}
TIED_ROW = {"model": {**LLAMA, "tie_word_embeddings": True}, "tensor_parallel": 2}
COMPILED = {"compile": "layers", "precision": "fp32"}
WITHOUT_CODE = "import tightfit.train.compile as each; each.BACKEND = 'aot_eager_decomp_partition'"
"""Compiled layers, traced, split and recomputed as they are; only what inductor makes of them is not."""
MAMBA = {"model": "tiny_mamba", "precision": "fp32", "seq": 48}
EXPERTS = {"model": MIXTRAL, "engine": "fsdp2", "precision": "fp32", "expert_parallel": 2}
"""Four ranks, of which two and two share the experts of each layer."""

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp lora": {"engine": "ddp", **LORA},
    "zero0": {"engine": "zero0"},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2", "checkpointing": "select:mlp"},
    "zero3": {"engine": "zero3"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2 in groups": {"engine": "fsdp2", "precision": "fp32", **GROUPS},
    "zero3 in groups": {"engine": "zero3", "precision": "fp32", **GROUPS},
    "zero3 lora in groups": {"engine": "zero3", **LORA, **GROUPS},
    "fsdp2 shares sequences": {"engine": "fsdp2", **SHARED},
    "zero2 shares sequences": {"engine": "zero2", **SHARED, "checkpointing": "select:mlp"},
    "zero3 shares sequences": {"engine": "zero3", **SHARED, "checkpointing": "full"},
    "ddp shares sequences": {"engine": "ddp", **SHARED, "loss": "fused"},
    "zero0 shares sequences": {"engine": "zero0", **SHARED, "precision": "bf16", "attention": "eager"},
    "zero1 shares sequences": {"engine": "zero1", **SHARED, "checkpointing": "select:elementwise"},
    "fsdp2 shares sequences, fused": {"engine": "fsdp2", **SHARED, "loss": "fused", "checkpointing": "full"},
    "fsdp2 shares sequences in groups": {"engine": "fsdp2", **SHARED, **GROUPS},
    "zero3 shares sequences of four": {"engine": "zero3", "precision": "fp32", "sequence_parallel": 4},
    "fsdp2 lora shares sequences": {"engine": "fsdp2", **SHARED, **LORA},
    "zero3 lora shares sequences": {"engine": "zero3", **SHARED, **LORA, "checkpointing": "select:qkv,mlp"},
    "zero3 in tiles": {"engine": "zero3", **TILED},
    "ddp in tiles": {"engine": "ddp", **TILED, "checkpointing": "none"},
    "zero1 in tiles": {"engine": "zero1", **TILED, "precision": "bf16"},
    "zero2 in tiles": {"engine": "zero2", **TILED, "checkpointing": "full"},
    "fsdp2 in tiles": {"engine": "fsdp2", **TILED, "offload_param": "cpu", "checkpointing": "full+offload"},
    "zero3 in tiles, offloaded": {"engine": "zero3", **TILED, **OFFLOADED, "offload_param": "cpu"},
    "zero3 lora in tiles": {"engine": "zero3", **TILED, **LORA},
    "fsdp2 lora in tiles": {"engine": "fsdp2", **TILED, **LORA, "checkpointing": "none"},
    "zero2 lora in tiles": {"engine": "zero2", **TILED, **LORA},
    "fsdp2 in tiles shares sequences": {"engine": "fsdp2", **TILED, **SHARED},
    "zero3 in tiles shares sequences": {"engine": "zero3", **TILED, **SHARED},
    "shares experts": EXPERTS,
    "shares experts, others of a token": {**EXPERTS, "model": QWEN3_MOE, "checkpointing": "full"},
    "shares experts beside a common one": {**EXPERTS, "model": QWEN2_MOE, "checkpointing": "select:mlp"},
    "shares experts of four": {**EXPERTS, "expert_parallel": 4, "loss": "fused", "checkpointing": "none"},
    "shares experts in groups": {**EXPERTS, **GROUPS},
    "shares experts and sequences": {**EXPERTS, **SHARED},
    "shares experts, offloaded": {**EXPERTS, "offload_param": "cpu"},
    "shares experts in bf16": {**EXPERTS, "precision": "bf16"},
    "shares experts, lora": {**EXPERTS, **LORA, "model": QWEN2_MOE},
    "fsdp2 shares layers": {**SHARED_LAYERS},
    "fsdp2 shares layers, bf16": {**SHARED_LAYERS, "precision": "bf16", "checkpointing": "full"},
    "fsdp2 shares layers, fused": {**SHARED_LAYERS, "loss": "fused", "checkpointing": "full"},
    "fsdp2 shares layers, offloaded": {**SHARED_LAYERS, "offload_param": "cpu", "checkpointing": "full+offload"},
    "fsdp2 shares layers in groups": {**SHARED_LAYERS, **GROUPS, "checkpointing": "none"},
    "fsdp2 lora shares layers": {**SHARED_LAYERS, **LORA, "checkpointing": "select:qkv,mlp"},
    "fsdp2 shares layers of four": {**SHARED_LAYERS, "tensor_parallel": 4, "model": LLAMA},
    "fsdp2 shares layers with norms of heads": {**SHARED_LAYERS, "model": QWEN3, "checkpointing": "select:elementwise"},
    "fsdp2 shares layers with norms on both sides": {**SHARED_LAYERS, "model": GEMMA3, "checkpointing": "full"},
    "fsdp2 in a pipeline": {**IN_A_ROW, "stage_layers": "3,1"},
    "fsdp2 in a pipeline of four": {**IN_A_ROW, "pipeline_parallel": 4, "checkpointing": "full"},
    "fsdp2 in a pipeline, interleaved": {**INTERLEAVED, "loss": "fused", "checkpointing": "full"},
    "fsdp2 in a pipeline, fused": {**IN_A_ROW, "precision": "bf16", "loss": "fused", "checkpointing": "select:mlp"},
    "fsdp2 lora in a pipeline": {**IN_A_ROW, **LORA},
    "fsdp2 in a pipeline, in groups": {**IN_A_ROW, "shard_within": 1},
    "fsdp2 mamba in a pipeline": {**IN_A_ROW, **MAMBA},
    "fsdp2 in a pipeline, compiled": {**IN_A_ROW, **COMPILED},
    "fsdp2 shares layers in a pipeline": {**IN_A_ROW, "tensor_parallel": 2, "micro_batch": 2},
    "fsdp2 shares layers in a pipeline, interleaved": {**INTERLEAVED, **TIED_ROW, "loss": "fused"},
    "fsdp2 shares layers in a pipeline, bf16": {**IN_A_ROW, **TIED_ROW, "precision": "bf16", "checkpointing": "full"},
    "fsdp2 lora shares layers in a pipeline": {**IN_A_ROW, **LORA, "tensor_parallel": 2, "checkpointing": "full"},
    "fsdp2 shares sequences in a pipeline": {**INTERLEAVED, "sequence_parallel": 2},
    "shares experts in a pipeline": {**EXPERTS, **IN_A_ROW, "model": MIXTRAL},
    "shares experts in a pipeline, again": {**EXPERTS, **IN_A_ROW, "model": QWEN2_MOE, "checkpointing": "full"},
    "stream": {"engine": "stream", "resident": 1},
    "stream lora": {"engine": "stream", **LORA, "checkpointing": "full"},
    "stream offloaded": {"engine": "stream", "precision": "fp32", "checkpointing": "full+offload", "resident": 0},
    "stream fp32 fused": {"engine": "stream", "precision": "fp32", "loss": "fused", "checkpointing": "none"},
    "stream mamba": {"engine": "stream", **MAMBA, "checkpointing": "full", "resident": 0},
    "stream in tiles": {"engine": "stream", **TILED, "checkpointing": "layers:1"},
    "stream compiled": {"engine": "stream", **COMPILED, "checkpointing": "full", "resident": 0},
    "stream lora compiled": {"engine": "stream", **LORA, **COMPILED, "resident": 2},
    "zero0 fp32 fused": {"engine": "zero0", "precision": "fp32", "loss": "fused"},
    "zero1 fp32": {"engine": "zero1", "precision": "fp32"},
    "zero2 fp32": {"engine": "zero2", "precision": "fp32"},
    "zero3 fp32 fused": {"engine": "zero3", "precision": "fp32", "loss": "fused"},
    "fsdp2 fp32 fused": {"engine": "fsdp2", "precision": "fp32", "loss": "fused", "checkpointing": "none"},
    "zero1 fp32 fused": {"engine": "zero1", "precision": "fp32", "loss": "fused", **SMALL_BUCKETS},
    "zero2 offloaded": {"engine": "zero2", **OFFLOADED},
    "zero2 offloaded fused": {"engine": "zero2", **OFFLOADED, "loss": "fused"},
    "zero3 offloaded": {"engine": "zero3", **OFFLOADED, "offload_param": "cpu", "checkpointing": "full"},
    "fsdp2 offloaded": {"engine": "fsdp2", "offload_param": "cpu", "checkpointing": "full+offload"},
    "zero2 lora": {"engine": "zero2", **LORA},
    "zero3 lora": {"engine": "zero3", **LORA, "checkpointing": "select:elementwise"},
    "fsdp2 lora": {"engine": "fsdp2", **LORA, "checkpointing": "select:qkv,mlp+layers:2"},
    "zero3 mamba": {"engine": "zero3", **MAMBA, "checkpointing": "select:mixer"},
    "fsdp2 mamba": {"engine": "fsdp2", **MAMBA},
    "zero0 compiled": {"engine": "zero0", **COMPILED, "checkpointing": "none"},
    "zero1 compiled": {"engine": "zero1", **COMPILED, "checkpointing": "full"},
    "zero2 compiled": {"engine": "zero2", **COMPILED, "checkpointing": "select:mlp,qkv"},
    "zero2 lora compiled": {"engine": "zero2", **LORA, **COMPILED},
    "fsdp2 compiled": {"engine": "fsdp2", **COMPILED, "offload_param": "cpu", "checkpointing": "full+offload"},
    "fsdp2 lora compiled": {"engine": "fsdp2", **LORA, **COMPILED, "checkpointing": "full"},
    "fsdp2 mamba compiled": {"engine": "fsdp2", **MAMBA, **COMPILED, "scan": "tightfit"},
}
SLOW = (
    *("stream offloaded", "stream fp32 fused", "stream mamba", "stream in tiles", "stream compiled"),
    *(
        "stream lora compiled",
        "ddp lora",
        "zero0",
        "zero1",
        "zero3",
        "zero0 fp32 fused",
        "zero1 fp32",
        "zero2 fp32",
        "fsdp2 fp32 fused",
    ),
    *("zero0 compiled", "zero1 compiled", "zero2 compiled", "zero2 lora compiled", "fsdp2 compiled"),
    *(
        "fsdp2 mamba compiled",
        "zero3 offloaded",
        "fsdp2 offloaded",
        "zero3 mamba",
        "fsdp2 mamba",
        "zero2 lora",
        "zero3 lora",
        "fsdp2 lora",
        "zero3 lora in groups",
        "fsdp2",
        "zero2 offloaded fused",
        "zero3 in groups",
        "zero3 fp32 fused",
        "zero1 fp32 fused",
    ),
    *(way for way in WAYS if "in tiles" in way and way != "zero3 in tiles"),
    *(
        way
        for way in WAYS
        if any(word in way for word in ("shares ", "pipeline"))
        and way not in ("fsdp2 shares sequences", "shares experts")
        and way != "fsdp2 shares layers in a pipeline"  # either alone, and uneven stages: test_crossing
    ),
)
"""What another way covers nearly as well."""
NEUTRAL = ("zero0", "zero1", "zero2", "zero3 offloaded")
"""Where a run without the probe is compared too; test_resume does so with others."""
UNPROBED = ("fsdp2", "fsdp2 lora")
"""Those others: here the probe is left out."""

pytestmark = pytest.mark.thorough
_references: dict[tuple[str, ...], list[float]] = {}
_norms: dict[tuple[str, ...], list[float]] = {}


def write(folder: Path, world: int, **flags: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = write_examples(folder / "examples.jsonl")
    return write_plan(folder, world, **{**FULL, "data": str(data), **flags})


def reference(folder: Path, flags: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and norms of the plain program; the engine and how it is fed make no difference to it."""
    key = tuple(str({**FULL, **flags}[name]) for name in ("model", "precision", "seq", "learning_rate"))
    if key not in _references:
        _references[key], _norms[key] = (list(each) for each in zip(*plain_steps(folder), strict=True))
    return _references[key], _norms[key]


def run_well(folder: Path, *options: str) -> Ran:
    ran = run_ranks(folder, *options, first=WITHOUT_CODE)
    assert ran.codes == [0] * len(ran.codes), "\n".join(ran.stderr)
    assert len(ran.losses) == STEPS
    return ran


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS])
def test_an_engine_follows_plain_pytorch(tmp_path: Path, way: str) -> None:
    folder = write(tmp_path, 4 if OF_FOUR & WAYS[way].keys() else 2, **WAYS[way])
    expected, norms = reference(folder, WAYS[way])
    ran = run_well(folder, *(["--no-probe"] if way in UNPROBED else []))
    tolerance = TOLERANCE[{**FULL, **WAYS[way]}["precision"]]
    assert ran.losses == pytest.approx(expected, rel=tolerance)
    # What is clipped hides in the losses by which factor a gradient is too large or too small.
    found = [each["grad_norm"] for each in ran.of("step")]
    assert found == [None] * STEPS or found == pytest.approx(norms, rel=100 * tolerance)
    assert expected[-1] < expected[0] - LEARNT
    assert not [each for each in ran.of("warning") if "torch.compile" in each["text"]]
    if way in NEUTRAL:
        (tmp_path / "run" / "events.jsonl").unlink()
        (tmp_path / "run" / "model").rename(tmp_path / "run" / "first")
        assert run_well(folder, "--no-probe", "--resume", "none").losses == ran.losses, (
            "the probe left something behind"
        )


@pytest.mark.parametrize(
    ("world", "engine"),
    [
        (1, "ddp"),
        pytest.param(1, "zero1", marks=pytest.mark.slow),
        pytest.param(1, "fsdp2", marks=pytest.mark.slow),
        (3, "zero2"),
        pytest.param(3, "zero3", marks=pytest.mark.slow),
        pytest.param(3, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_trains_the_same(tmp_path: Path, world: int, engine: str) -> None:
    flags = {"engine": engine, "precision": "fp32", "effective_batch": 6, "micro_batch": 1}
    folder = write(tmp_path, world, **flags)
    key = (FULL["model"], "fp32", "six", "")
    if key not in _references:
        _references[key] = plain_losses(folder)
    assert run_well(folder, "--no-probe").losses == pytest.approx(_references[key], rel=TOLERANCE["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("engine", "layouts"),
    [
        ("ddp", ["sequence_parallel"]),
        ("fsdp2", ["tensor_parallel"]),
        ("fsdp2", ["pipeline_parallel"]),
        ("fsdp2", ["pipeline_parallel", "tensor_parallel"]),
        ("fsdp2", ["pipeline_parallel", "sequence_parallel"]),
    ],
)
def test_ranks_that_read_the_same_pack_count_and_evaluate_alike(
    tmp_path: Path, engine: str, layouts: list[str], packing: bool
) -> None:
    """Of a length that does not divide, too."""
    found = {}
    for ranks in (1, 2):
        flags = {"engine": engine, "precision": "fp32", "seq": 125, **dict.fromkeys(layouts, ranks), "packing": packing}
        plan = write(tmp_path / str(ranks), ranks ** len(layouts), **flags)
        ran = run_well(edit(plan, evaluation__split=0.2), "--no-probe")
        counted = [each["tokens"] for each in ran.of("step")]
        found[ranks] = counted, [*ran.losses, *(each["loss"] for each in ran.of("eval"))]
    assert found[2][0] == found[1][0]
    assert found[2][1] == pytest.approx(found[1][1], rel=TOLERANCE["fp32"])


@pytest.mark.slow
def test_four_bit_weights_train_the_same_on_every_engine(tmp_path: Path) -> None:
    flags = {"method": "qlora", "lora_rank": 4, "learning_rate": 3e-2}
    found = {}
    for engine, again in {"zero1": "layers:2", "zero3": "select:mlp", "fsdp2": "select:out", "stream": "full"}.items():
        found[engine] = run_well(write(tmp_path / engine, 2, engine=engine, checkpointing=again, **flags)).losses
    assert found["zero3"] == pytest.approx(found["zero1"], rel=TOLERANCE["bf16"])
    assert found["fsdp2"] == pytest.approx(found["zero1"], rel=TOLERANCE["bf16"])
    assert found["stream"] == pytest.approx(found["zero1"], rel=TOLERANCE["bf16"])
    assert found["zero1"][-1] < found["zero1"][0] - LEARNT


@pytest.mark.slow
def test_mambas_scan_makes_no_difference(tmp_path: Path) -> None:
    """Our scan and the plain program's follow each other; the largest batch is tried first with it too."""
    flags = {**MAMBA, "engine": "fsdp2", "scan": "tightfit"}
    folder = write(tmp_path, 2, **flags)
    expected, _ = reference(folder, flags)
    assert run_well(folder).losses == pytest.approx(expected, rel=TOLERANCE["fp32"])
