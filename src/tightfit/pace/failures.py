"""What failures cost a long training, and how often a checkpoint is worth its time.

A job ends when any of its GPUs, nodes or links does, so the mean time between failures falls as one over the number of
GPUs. What was computed since the last checkpoint that stands is then computed again. Saving often costs time, saving
seldom costs work, and the best interval lies between: about the square root of twice the cost times the mean time
(Young, 1974). Where the cost is not small beside that time, Daly's higher-order form (2006) is closer.

Failures are taken to be independent, their times exponential. The share of the time that is lost is then exact, also
for checkpoints that are written while training goes on: such a one counts from the moment at which all of it is on the
disk, which is as if each restart took that much longer. So the time until it stands moves the best interval only where
it is longer than that: the next checkpoint waits for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

PUBLISHED = {1_024: 7.9 * 3600, 16_384: 54 * 86_400 / 419}
"""Seconds between failures on so many GPUs. 1,024: jobs on Meta's research clusters (Kokolis et al., 'Revisiting
Reliability in Large-Scale Machine Learning Research Clusters', 2024). 16,384: 419 unexpected interruptions in 54 days
('The Llama 3 Herd of Models', 2024)."""
GPU_S_PER_FAILURE = 1_024 * PUBLISHED[1_024]
"""Taken from the first of these, shared clusters on which many people train. The second is six times as long, on a
cluster that was watched for one job."""
START_AGAIN_S = 300.0
"""Until a failure is noticed, a node is found in place of the broken one and its processes run. Assumed."""
BESIDE_COPY_S = 1.0
"""What a checkpoint in the background costs beside its copy: ranks meet, and steps are slower while it is written.
Measured on one H200: 0.0 to 1.1 s (docs/checkpoint-speed.md)."""
SHARED_BYTES_PER_S = 1e9
"""Of a file system that several nodes share, what each node gets of it, reading or writing. Published: 2 TB/s for the
2,048 nodes of Llama 3."""
_FOR_EVER = 700.0  # mean times in a row without a failure: e to the power of more is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCosts:
    """What one failure and one checkpoint take, in seconds."""

    mean_s: float  # between two failures
    blocked_s: float  # training waits so long for a checkpoint
    written_s: float  # and it stands so much later; 0: as soon as training goes on
    restart_s: float  # from a failure until training goes on where the checkpoint was taken

    def lost_share(self, every_s: float) -> float:
        """Of all time, what goes into checkpoints, restarts and work that is done again, with so much training between
        two checkpoints."""
        period, after = self.period_s(every_s) / self.mean_s, (self.restart_s + self.written_s) / self.mean_s
        if period + after > _FOR_EVER:
            return 1.0
        return 1 - every_s / (self.mean_s * exp(after) * expm1(period))

    def period_s(self, every_s: float) -> float:
        """From one checkpoint to the next where nothing fails: one that is still being written is waited for."""
        return max(every_s, self.written_s) + self.blocked_s

    @property
    def best_interval_s(self) -> float:
        """The training between two checkpoints with which least is lost, by Daly's formula."""
        half = self.blocked_s / (2 * self.mean_s)
        if half >= 1:
            return max(self.mean_s, self.written_s)
        root = sqrt(2 * self.blocked_s * self.mean_s)
        return max(root * (1 + sqrt(half) / 3 + half / 9) - self.blocked_s, self.written_s)


def mean_time_s(gpus: int) -> float:
    """Seconds between two failures of a job on so many GPUs."""
    return GPU_S_PER_FAILURE / gpus
