"""What others measured, read as our levers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from published import InexpressibleError, compare, read, read_rows
from published import _row as made

ROWS = read_rows()


def test_parameters_are_counted_as_their_publisher_counts_them() -> None:
    """llm-foundry states them to the unit, with a learned position for each token."""
    stated = [(row, re.search(r"\(([\d,]+) params\)", row.model)) for row in ROWS]
    counted = [
        (read(row).shape.parameters, int(found[1].replace(",", "")))
        for row, found in stated
        if found and "fp8" not in row.said
    ]
    assert len(counted) > 100
    assert all(ours == theirs for ours, theirs in counted)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {
            "source": "somebody/else",
            "model": "Llama-3-8B",
            "hardware": "abacus",
            "gpus": 8,
            "seq": 2048,
            "micro_batch": 1,
        },
        {"source": "somebody/else", "model": 7, "hardware": None, "gpus": "8", "seq": "4096", "micro_batch": "auto"},
        {
            "source": "somebody/else",
            "model": "Llama-2-7B",
            "hardware": "A100",
            "gpus": 12,
            "engine": "FSDP",
            "seq": 8,
            "micro_batch": 1,
        },
    ],
)
def test_an_unknown_row_is_left_out_with_a_reason(raw: Mapping[str, Any]) -> None:
    found = compare([made(raw, 1)])
    assert not found.readings
    assert found.left_out[0][1]


def test_a_new_source_is_read_by_its_words() -> None:
    row = made(
        {
            "source": "somebody/else",
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "hardware": "8x H100 SXM5 80GB (3200 Gbps)",
            "gpus": 16,
            "engine": "DeepSpeed ZeRO-3, optimizer+params CPU",
            "seq": 4096,
            "micro_batch": 2,
            "accum": 4,
            "checkpointing": "full",
            "precision": "bf16",
            "tokens_per_s_per_gpu": 1000,
        },
        1,
    )
    reading = read(row)
    assert (reading.levers.engine, reading.levers.offload_param, reading.hardware.world) == ("zero3", "cpu", 16)
    assert reading.hardware.network_bytes_per_s == 400e9


def test_what_cannot_be_expressed_is_said() -> None:
    with pytest.raises(InexpressibleError, match="tensor parallel"):
        read(next(row for row in ROWS if "tensor_model_parallel_size=4" in row.other and "fp8" not in row.source))
