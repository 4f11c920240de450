"""What others measured, read as our levers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import published
import pytest
from published import compare, is_explained, peak_range
from published_rows import InexpressibleError, make_row, read, read_rows

from tightfit.types import Hardware, Levers, Lora

ROWS = read_rows()
STATED = re.compile(r"\(([\d,]+) params\)")


def row_of(**words: Any) -> Any:
    """A row of a source that no rule knows."""
    said = {"source": "somebody/else", "hardware": "H100 80GB", "gpus": 8, "seq": 4096, "micro_batch": 2}
    return make_row({"model": "Llama-3.1-8B", "engine": "FSDP2", "checkpointing": "full", **said, **words}, 1)


def first(pattern: str) -> Any:
    """The first row whose source and engine have these words."""
    return next(row for row in ROWS if re.search(pattern, f"{row.source}; {row.engine}; {row.checkpointing}"))


# --- reading ------------------------------------------------------------------------------------


def test_parameters_and_use_of_the_card_are_those_of_the_publisher() -> None:
    """llm-foundry states parameters to the unit, and its formula for the share of a card's peak."""
    checked = 0
    for row in ROWS:
        stated = STATED.search(row.model)
        if not stated or "fp8" in row.said:
            continue
        shape = read(row).shape
        assert shape.parameters == int(stated[1].replace(",", "")), row.model
        peak = 989.5e12 if "H100" in row.hardware else 312e12
        attention = 12 * shape.n_layers * shape.hidden_size * row.sequence
        assert (6 * shape.parameters + attention) * row.tokens_per_s / peak == pytest.approx(row.mfu, rel=0.02)
        checked += 1
    assert checked > 100


READ: Mapping[str, Mapping[str, object]] = {
    "llm-foundry.*SHARD_GRAD_OP": {"engine": "fsdp2", "attention": "flash", "master_weights": True},
    r"llmq.*ZeRO-3": {
        "engine": "zero3",
        "offload_param": "cpu",
        "loss": "fused",
        "trainer": "llamafactory",
        "master_weights": False,
    },
    r"^QwenLM.*; LoRA;": {"engine": "zero0", "lora": Lora(rank=64, dropout=0.05)},
    r"^QwenLM.*; Q-LoRA": {"engine": "zero2", "method": "qlora", "precision": "fp16"},
    r"torchtune.*single device, full; full": {"engine": "zero0", "method": "full", "master_weights": False},
    r"litgpt LoRA": {"engine": "zero0", "loss": "plain"},
    r"ms-swift examples/train/liger": {"engine": "zero3", "packed": True, "trainer": "trainer"},
}


@pytest.mark.parametrize("pattern", READ)
def test_each_project_is_read_by_its_words(pattern: str) -> None:
    levers: Levers = read(first(pattern)).levers
    assert {name: getattr(levers, name) for name in READ[pattern]} == READ[pattern]


def test_a_new_source_is_read_by_its_words() -> None:
    row = row_of(
        model="meta-llama/Llama-3.1-8B-Instruct",
        hardware="8x H100 SXM5 80GB (8x400 Gbps)",
        gpus=16,
        engine="DeepSpeed ZeRO-3, optimizer+params CPU",
        tokens_per_s_per_gpu=1000,
    )
    reading = read(row)
    hardware: Hardware = reading.hardware
    assert (reading.levers.engine, reading.levers.offload_param) == ("zero3", "cpu")
    assert (hardware.nodes, hardware.gpus_per_node, hardware.network_bytes_per_s) == (2, 8, 400e9)
    assert reading.has_pace


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ({"engine": "FSDP2 4 + TP 2"}, {"tensor_parallel": 2}),
        ({"other": "tensor_model_parallel_size=8"}, {"tensor_parallel": 8}),
        ({"engine": "FSDP2 + PP 4"}, {"pipeline_parallel": 4}),
        ({"other": "sequence_parallel_size=8"}, {"sequence_parallel": 8}),
        ({"engine": "FSDP2 4 + CP 2", "other": "TP 1"}, {"sequence_parallel": 2}),
        ({"engine": "FSDP2 8"}, {}),
    ],
)
def test_how_gpus_work_together_is_read(words: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    levers = read(row_of(**words)).levers
    layouts = "tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel"
    assert {name: size for name in layouts if (size := getattr(levers, name)) > 1} == sizes


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"engine": "FSDP2 + TP 3"}, "--tensor-parallel 3"),
        ({"engine": "DeepSpeed ZeRO-3 + TP 8"}, "--tensor-parallel 8"),
        ({"engine": "FSDP2 + TP 2 + CP 2"}, "--tensor-parallel 2"),
        ({"engine": "Unsloth"}, "engine of its own"),
        ({"model": "Qwen/Qwen2.5-VL-7B-Instruct"}, "images"),
        ({"other": "rlhf_type=dpo"}, "preference"),
        ({"checkpointing": None}, "recomputed is not stated"),
        ({"seq": None, "micro_batch": "auto"}, "not stated: sequence, micro batch"),
        ({"model": "Falcon-7B"}, "no family of ours"),
        ({"hardware": "abacus"}, "card"),
        ({"gpus": 12}, "different numbers of GPUs"),
        ({"source": "pytorch/torchtune README.md"}, "without the settings"),
        ({"model": 7, "hardware": ["odd"]}, "no family of ours"),
    ],
)
def test_what_cannot_be_expressed_is_said(words: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InexpressibleError, match=reason):
        read(row_of(**words))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"precision": "bf16 + float8"}, "8 or 4 bits"),
        ({"engine": "Megatron-Core TP2 PP2", "gpus": 8, "other": "GBS 16"}, "Megatron's own engine"),
    ],
)
def test_what_differs_stands_beside_our_nearest_and_in_no_figure(words: Mapping[str, Any], what: str) -> None:
    row = row_of(tokens_per_s_per_gpu=1000, peak_gib=50, **words)
    found = compare([row])
    (reading,) = found.readings
    assert reading.levers.engine == "fsdp2"
    assert any(what in remark for remark in reading.remarks)
    assert not found.paces
    assert not found.peaks
    line = published.rows_table(found, published.section_of(row)).splitlines()[-1]
    assert line.count(f"({reading.pace_ratio:.2f})") == 1
    assert f"({reading.peak_ratio:.2f})" in line


def test_a_pipelines_batch_is_cut_as_its_publisher_does() -> None:
    said = {"source": "pytorch/torchtitan", "engine": "FSDP2 8 + TP 8 + PP 8 Interleaved 1F1B", "gpus": 512}
    titan = read(row_of(**said, model="Llama-3.1-405B", micro_batch=32, accum=1, seq=8192)).levers
    assert (titan.micro_batch, titan.accumulation, titan.stages_per_gpu) == (4, 8, 2)
    said = {"engine": "Megatron-SWIFT full", "other": "pipeline_model_parallel_size=2; global_batch_size=16"}
    assert read(row_of(**said, micro_batch=1)).levers.accumulation == 4


def test_an_empty_row_is_left_out() -> None:
    assert compare([make_row({}, 1)]).left_out


def test_a_row_is_compiled_where_it_says_so() -> None:
    said = {"tokens_per_s_per_gpu": 1, "peak_gib": 1}
    compiled, plain = read(row_of(**said, other="torch.compile")), read(row_of(**said))
    assert (compiled.levers.compile, plain.levers.compile) == ("layers", "off")
    assert compiled.has_pace
    assert compiled.has_peak


def test_a_peak_of_tensors_is_predicted() -> None:
    """Of every source whose script logs `max_memory_allocated`."""
    readings = [read(row) for row in ROWS if row.peak_gib and re.search("litgpt LoRA|Optimization flags", str(row))]
    compared = [reading for reading in readings if reading.has_peak]
    assert len(compared) > 10
    for reading in compared:
        assert reading.peak_kind == "allocated"
        # what a compiled layer keeps depends on its code, which is Hugging Face's here and the publisher's own there
        own_code = reading.levers.compile == "layers" and reading.levers.checkpointing.layers == 0
        assert reading.peak_ratio == pytest.approx(1, abs=0.12 if own_code else 0.03), reading.row


def test_what_the_allocator_keeps_explains_a_driver_and_no_more() -> None:
    reading = read(row_of(peak_gib=10))
    low, high = peak_range(reading)
    for printed, explained in ((low + 0.1, True), (high - 0.1, True), (low - 1, False), (1.1 * high, False)):
        assert is_explained(replace(reading, row=row_of(peak_gib=printed))) == explained


# --- the page -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_page_is_current() -> None:
    assert published.main(["--check"]) == 0, "run: python benchmarks/published.py"


@pytest.mark.thorough
def test_a_stale_page_is_noticed() -> None:
    text = published.PAGE.read_text(encoding="utf-8")
    changed = text.replace("| 636 |", "| 635 |")
    assert changed != text
    assert published.page(changed, compare(ROWS)) == text
