"""Which samples make up a step: every sample once an epoch, whatever is asked for first."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.train.data.order import Order, permute


@pytest.mark.thorough
@given(count=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_an_epoch_has_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))


@pytest.mark.thorough
@given(samples=st.integers(1, 50), window=st.integers(1, 60), steps=st.integers(1, 12))
def test_windows_are_one_row_of_epochs(samples: int, window: int, steps: int) -> None:
    order = Order(samples, window, 3)
    row = np.concatenate([order.window(step) for step in range(steps)])
    for start in range(0, len(row) - samples + 1, samples):
        assert sorted(row[start : start + samples].tolist()) == list(range(samples))


def test_a_step_needs_no_step_before_it() -> None:
    straight = [Order(1000, 32, 7).window(step).tolist() for step in range(100)]
    assert Order(1000, 32, 7).window(99).tolist() == straight[99]
    assert Order(1000, 32, 8).window(99).tolist() != straight[99]


def test_epochs_and_seeds_differ() -> None:
    epochs = [permute(np.arange(500), 500, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in epochs}) == 9


def test_it_looks_shuffled() -> None:
    """Neighbours of a random permutation are a third of the range apart on average, and hardly any are neighbours."""
    order = permute(np.arange(10_000), 10_000, 1, 0)
    gaps = np.abs(np.diff(order))
    assert 3_100 < gaps.mean() < 3_600
    assert (gaps == 1).mean() < 0.002
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_a_hundred_million_samples_cost_nothing() -> None:
    order = Order(10**8, 1024, 42)
    began = time.process_time()
    windows = [order.window(step) for step in (0, 50_000, 97_655, 97_656, 200_000)]
    assert time.process_time() - began < 1
    assert all(len(np.unique(window)) == 1024 for window in windows[:2])
    assert max(window.max() for window in windows) < 10**8


@pytest.mark.parametrize(
    ("samples", "window", "epochs", "steps"),
    [(10, 4, 1, 3), (10, 4, 2, 5), (8, 4, 3, 6), (3, 8, 1, 1), (10, 4, 0.3, 1)],
)
def test_steps_see_every_sample(samples: int, window: int, epochs: float, steps: int) -> None:
    assert Order(samples, window, 0).steps_in(epochs) == steps
