"""Which samples make up a step: a function of the step's number alone.

Every epoch is one seeded permutation of all samples, and the epochs follow each other as one endless row; step `s`
takes the next `window` of it. Nothing but the number of the step has to be kept to go on exactly where a run stopped,
and neither ranks, micro batches nor loading processes can change the order. Where an epoch does not divide into
windows, the window over its end takes its rest from the next epoch: no sample is dropped, none comes twice in one
epoch.

A permutation of 10^8 samples as an array would cost every rank 800 MB. A Feistel network computes the place of any
one sample instead: the number is cut into two halves of equal bits, and in each round one half is mixed with a keyed
hash of the other, which can always be undone, so that no two numbers meet. It permutes 4^k numbers; those that land
outside the wanted range are sent round again until they land inside.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

ROUNDS = 8  # four are enough against guessing; small ranges want some more to look shuffled

Indices = npt.NDArray[np.int64]


class Order:
    """The order in which samples are trained on. `window`: samples a step, the job's effective batch."""

    def __init__(self, samples: int, window: int, seed: int) -> None:
        if samples < 1 or window < 1:
            raise ValueError(f"no order of {samples} samples in windows of {window}")
        self.samples, self.window_samples, self.seed = samples, window, seed

    def window(self, step: int) -> Indices:
        """The samples of optimizer step `step`, counted from 0."""
        places = np.arange(step * self.window_samples, (step + 1) * self.window_samples, dtype=np.int64)
        epochs = places // self.samples
        found = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == epoch
            found[chosen] = permute(places[chosen] % self.samples, self.samples, self.seed, epoch)
        return found

    def steps_in(self, epochs: float) -> int:
        """Steps until every sample has been seen `epochs` times; at least one."""
        return max(1, ceil(round(epochs * self.samples, 6) / self.window_samples))


def permute(places: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Where each of these numbers below `count` goes in the permutation of this seed and epoch."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    start = np.array([(seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % 2**64], dtype=np.uint64)
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0xA24BAED4963EE407)
    keys = _mix(_mix(start) + rounds)
    values = places.astype(np.uint64)
    waiting = np.ones(len(values), dtype=bool)
    while waiting.any():
        moved = values[waiting]
        left, right = moved >> shift, moved & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[waiting] = (left << shift) | right
        waiting = values >= np.uint64(count)
    return values.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: every bit of the input moves about half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
