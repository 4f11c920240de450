"""The page of the worker's pace is what its rows say, and every run kept its promise of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import worker_pace


def test_the_page_is_what_the_rows_say() -> None:
    text = worker_pace.PAGE.read_text(encoding="utf-8")
    assert text == worker_pace.page(worker_pace.stored()), "run: python benchmarks/worker_pace.py page"


def test_every_peak_is_within_five_percent_of_the_plan() -> None:
    for row in worker_pace.stored():
        ours = row["worker"]
        assert abs(ours["peak_gib"] / ours["predicted_peak_gib"] - 1) < 0.05, row["id"]


def test_the_rounds_of_a_side_are_one_median_of_all_their_steps() -> None:
    rounds = [{"seconds": [1.0, 2.0, 9.0], "peak_gib": 5.0}, {"seconds": [3.0, 4.0], "peak_gib": 4.0, "wall_s": 7.0}]
    found = worker_pace.together(rounds)
    assert found["median_s"] == 3.0
    assert found["rounds_s"] == [2.0, 3.5]
    assert found["seconds"] == [1.0, 2.0, 9.0, 3.0, 4.0]
    assert found["peak_gib"] == 5.0
    assert worker_pace.together([rounds[0], {"error": "timed out"}]) == {"error": "timed out"}


@pytest.mark.thorough
def test_only_names_a_part_of_a_folders_name(tmp_path: Path) -> None:
    worker_pace.prepare(tmp_path, "FSDP2,32B")
    assert sorted(place.name for place in tmp_path.iterdir()) == [
        "0.5B_full_one_GPU_FSDP2",
        "32B_LoRA_one_of_8",
        "7.6B_full_one_of_8_FSDP2",
        "7b_mamba_one_of_4_FSDP2_our_scan",
    ]


def test_no_engine_is_slower_than_by_hand_on_a_transformer() -> None:
    """The steps of 7b_mamba are a loop in Python, and the host's noise is greater than the margin."""
    for row in worker_pace.stored():
        if "mamba" not in row["id"]:
            assert row["worker"]["median_s"] <= 1.03 * row["by_hand"]["median_s"], row["id"]
