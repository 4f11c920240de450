"""The pace model against every measured run, and the published page of it."""

from __future__ import annotations

from itertools import combinations
from math import log
from statistics import median

import pace_accuracy
import pytest
from pace_accuracy import PUBLISHED, Published, Timed, all_runs, job_of, jobs, pairs
from rows import PACE, read_rows

from tables import table
from tightfit.pace import rates
from tightfit.planner.certainty import tell_apart

RUNS = all_runs()
COUNTED = [run for run in RUNS if run.counts]
ERROR, MEDIAN_ERROR, MEDIAN_FIRST_ERROR = 0.5, 0.15, 0.2
LEAST_PAIRS = 12

every_run = table("run", COUNTED, ids=lambda run: run.row.id)


@every_run
def test_step_time(run: Timed) -> None:
    assert abs(run.error) <= ERROR


def test_half_of_the_step_times_are_close() -> None:
    assert median(abs(run.error) for run in COUNTED) <= MEDIAN_ERROR


def test_what_was_predicted_first() -> None:
    """Of runs that were measured after the constants had been set, as predicted before."""
    later = [run for run in COUNTED if run.row.pace_frozen]
    assert len(later) >= LEAST_PAIRS
    assert all(run.first_s for run in later)
    assert median(abs(run.first_error) for run in later) <= MEDIAN_FIRST_ERROR
    assert all(abs(run.first_error) <= ERROR for run in later)


def test_the_order_is_right() -> None:
    found = [pair for group in jobs(RUNS) for pair in pairs(group)]
    assert len(found) >= LEAST_PAIRS
    assert not [(pair.faster.row.id, pair.slower.row.id) for pair in found if not pair.right]
    later = [pair for pair in found if pair.later]
    assert len(later) >= LEAST_PAIRS
    assert not [(pair.faster.row.id, pair.slower.row.id) for pair in later if not pair.right_first]


def test_what_is_surely_faster_is_faster_and_the_error_of_a_difference_holds() -> None:
    found = [two for group in jobs(RUNS) for two in combinations(group, 2)]
    assert [tell_apart(one.pace, other.pace).is_sure for one, other in found].count(True) >= LEAST_PAIRS
    inside, near = list[bool](), list[bool]()
    for one, other in found:
        told, measured = tell_apart(one.pace, other.pace), one.row.step_s / other.row.step_s
        predicted = one.pace.step_s / other.pace.step_s
        assert not told.is_sure or (predicted > 1) == (measured > 1), (one.row.id, other.row.id)
        inside.append(abs(log(predicted / measured)) <= told.open_s / min(one.pace.step_s, other.pace.step_s))
        if abs(log(predicted)) < 0.06:
            near.append(inside[-1])
    assert sum(inside) / len(inside) >= 0.9
    assert sum(near) / len(near) >= 0.85


def test_the_fastest_is_chosen() -> None:
    for group in jobs(RUNS):
        chosen = min(group, key=lambda run: run.pace.step_s)
        assert chosen.row.step_s <= 1.05 * min(run.row.step_s for run in group)


def test_only_free_levers_differ_within_a_job() -> None:
    rows = {row.id: row for row in read_rows(PACE)}
    assert job_of(rows["A-z3-m2-off"]) == job_of(rows["A-fsdp2-m1a2"])
    assert job_of(rows["B-z0-w1"]) != job_of(rows["B-qlora-z0-w1"]), "quantised"
    assert job_of(rows["B-z0-w1"]) != job_of(rows["B-z2-w4"]), "on other hardware"
    assert job_of(rows["D-z3"]) != job_of(rows["D-full-z3"]), "another method"


def test_a_wrong_order_is_noticed() -> None:
    group = next(iter(jobs(RUNS)))
    pair = next(pairs(group))
    swapped = [Timed(pair.slower.row, pair.faster.pace, None), Timed(pair.faster.row, pair.slower.pace, None)]
    assert pair.right
    assert not next(pairs(swapped)).right


@table("figure", PUBLISHED, ids=lambda figure: figure.what)
def test_others_measured_about_the_same(figure: Published) -> None:
    assert 0.5 <= figure.predicted / figure.tokens_per_s <= 2


# --- the page -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_page_is_current() -> None:
    assert pace_accuracy.main(["--check"]) == 0, "run: python benchmarks/pace_accuracy.py"


@pytest.mark.thorough
def test_a_stale_page_is_noticed() -> None:
    text = pace_accuracy.PAGE.read_text(encoding="utf-8")
    changed = text.replace(f"| `GROUPED_SHARE` | `{rates.GROUPED_SHARE}` |", "| `GROUPED_SHARE` | `0.99` |")
    assert changed != text
    assert pace_accuracy.page(changed, RUNS) == text


@pytest.mark.thorough
def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="no <!-- constants -->"):
        pace_accuracy.page(pace_accuracy.PAGE.read_text(encoding="utf-8").replace("<!-- constants -->", ""), RUNS)


@pytest.mark.thorough
def test_every_constant_is_listed_with_its_source() -> None:
    lines = pace_accuracy.constants().splitlines()[2:]
    listed = {name for line in lines for name in line.split("`")[1].split(", ")}
    assert listed == {name for name in vars(rates) if name.isupper()}
    assert not [line for line in lines if line.endswith("|  |")]
