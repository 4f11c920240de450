"""What failures cost: the formulas against a simulation, and the page of both."""

from __future__ import annotations

import failures
import pytest
from failures import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.pace.failures import GPU_S_PER_FAILURE, PUBLISHED, FailureCosts, mean_time_s

NEIGHBOURS = (0.25, 0.5, 2.0, 4.0)
NOISE = 0.002  # of all time: what the simulation of a hundred mean times or more leaves open between two intervals

costs = st.builds(
    FailureCosts,
    mean_s=st.floats(1e4, 1e6),
    blocked_s=st.floats(0.5, 600),
    written_s=st.floats(0, 600),
    restart_s=st.floats(60, 1200),
)


@given(costs)
def test_no_neighbour_of_the_best_interval_is_better(each: FailureCosts) -> None:
    best = each.best_interval_s
    assert all(each.lost_share(best) <= each.lost_share(times * best) for times in (*NEIGHBOURS, 0.9, 1.1))


@settings(max_examples=25, deadline=None)
@given(costs)
def test_no_neighbour_is_better_in_the_simulation(each: FailureCosts) -> None:
    days = 100 * each.mean_s / failures.DAY

    def lost(every_s: float) -> float:
        return simulate(each, every_s, days=days, runs=20)

    best = each.best_interval_s
    assert all(lost(best) <= lost(times * best) + NOISE for times in NEIGHBOURS)


@settings(max_examples=25, deadline=None)
@given(costs, st.sampled_from([0.5, 1.0, 3.0]))
def test_the_share_that_is_lost_is_the_simulated_one(each: FailureCosts, times: float) -> None:
    every_s = times * each.best_interval_s
    simulated = simulate(each, every_s, days=100 * each.mean_s / failures.DAY, runs=50)
    assert simulated == pytest.approx(each.lost_share(every_s), abs=0.01)


def test_twice_the_gpus_fail_twice_as_often() -> None:
    assert mean_time_s(1_024) == PUBLISHED[1_024] == GPU_S_PER_FAILURE / 1_024
    assert mean_time_s(512) == 2 * mean_time_s(1_024)


def test_small_costs_give_youngs_interval() -> None:
    each = FailureCosts(mean_s=1e8, blocked_s=1.0, written_s=0.0, restart_s=0.0)
    assert each.best_interval_s == pytest.approx((2 * 1e8) ** 0.5, rel=1e-3)


def test_a_checkpoint_waits_for_the_one_before() -> None:
    each = FailureCosts(mean_s=28_440.0, blocked_s=1.0, written_s=900.0, restart_s=300.0)
    assert each.best_interval_s == 900.0
    assert each.period_s(60.0) == 901.0


def test_a_job_that_never_gets_through_loses_all() -> None:
    assert FailureCosts(mean_s=1.0, blocked_s=1.0, written_s=0.0, restart_s=1e6).lost_share(10.0) == 1.0


@pytest.mark.thorough
def test_the_page_is_current() -> None:
    assert failures.main(["--check"]) == 0, "run: python benchmarks/failures.py"
