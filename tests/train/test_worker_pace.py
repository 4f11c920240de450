"""The page of the worker's pace is what its rows say, and every run kept its promise of memory."""

from __future__ import annotations

import worker_pace


def test_the_page_is_what_the_rows_say() -> None:
    text = worker_pace.PAGE.read_text(encoding="utf-8")
    assert text == worker_pace.page(worker_pace.stored()), "run: python benchmarks/worker_pace.py page"


def test_every_peak_is_within_five_percent_of_the_plan() -> None:
    for row in worker_pace.stored():
        ours = row["worker"]
        assert abs(ours["peak_gib"] / ours["predicted_peak_gib"] - 1) < 0.05, row["id"]
