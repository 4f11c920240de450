"""What failures cost on 8 to 1,024 GPUs, computed and simulated: writes the tables of docs/failures.md.

    python benchmarks/failures.py            write the page
    python benchmarks/failures.py --check    exit 1 if the page is stale

The planner plans one training for each number of GPUs and says what a checkpoint and a restart take. The share of the
time that is lost comes from the formulas of `tightfit.pace.failures`, and beside it from a simulation, which draws the
times of failures from a seed and follows the training from checkpoint to checkpoint.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocks import fill, write_or_check

from tightfit.job import Job, Machine, Saving
from tightfit.pace.failures import PUBLISHED, FailureCosts
from tightfit.planner import plan
from tightfit.planner.plan import Checkpoints

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
GPUS = (8, 16, 64, 128, 256, 512, 1_024)
LLAMA_70B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DAYS, RUNS, SEED = 30, 400, 1_024
HOUR, DAY = 3600.0, 86_400.0
INTERVALS = (300.0, 900.0, HOUR, 4 * HOUR)
COSTS = (1.0, 10.0, 60.0, 300.0)


@dataclass(frozen=True)
class Scale:
    """One training on so many GPUs."""

    gpus: int
    step_s: float
    checkpoints: Checkpoints

    @property
    def costs(self) -> FailureCosts:
        return self.checkpoints.costs

    @property
    def best_s(self) -> float:
        return self.costs.best_interval_s


def scale(model: str | Mapping[str, Any], gpus: int, *, background: bool) -> Scale | None:
    """None: it does not fit."""
    machine = Machine(gpus=f"{gpus // 8}x8xH100", network="8x400Gb")
    found = plan(Job(model=model, hardware=machine, saving=Saving(async_save=background)), every_gpu=True)
    if found.chosen is None or found.checkpoints is None:
        return None
    return Scale(gpus, found.chosen.pace.step_s, found.checkpoints)


# --- the simulation -------------------------------------------------------------------------------


def simulate(costs: FailureCosts, every_s: float, *, days: float = DAYS, runs: int = RUNS, seed: int = SEED) -> float:
    """Of so many days, the share that was no training or was done again, in the mean of many runs."""
    draws, end, kept = random.Random(seed), days * DAY, 0.0  # noqa: S311 the same ones every time
    for _ in range(runs):
        now = 0.0
        is_first = True
        while now < end:
            fails = now + draws.expovariate(1 / costs.mean_s)
            begins = now if is_first else now + costs.restart_s
            kept += _trained(costs, every_s, min(fails, end) - begins, is_lost=fails < end)
            now, is_first = fails, False
    return 1 - kept / (runs * end)


def _trained(costs: FailureCosts, every_s: float, took_s: float, *, is_lost: bool) -> float:
    """Seconds of training that count, of a stretch without a failure. `is_lost`: at its end goes what no checkpoint has
    that stands."""
    if took_s <= 0:
        return 0.0
    period = costs.period_s(every_s)
    if is_lost:
        return max(0, int((took_s - costs.written_s) // period)) * every_s
    whole, rest = divmod(took_s, period)
    return whole * every_s + min(rest, every_s)


# --- the page -------------------------------------------------------------------------------------


def by_scale(scales: Sequence[Scale]) -> str:
    """A line a number of GPUs: what is lost at the best interval, and at others."""
    lines = [
        "| GPUs | time to failure | blocked, s | stands after, s | restart, s | best interval | in steps "
        "| lost at ¼ of it | at it | at 4 times | every hour | every 500 steps | GPU hours lost in 30 days |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in scales:
        costs, best, lost = each.costs, each.best_s, each.costs.lost_share
        others = (best / 4, best, 4 * best, HOUR, 500 * each.step_s)
        hours = each.gpus * DAYS * 24 * lost(best)
        cells = [f"{each.gpus:,}", duration(costs.mean_s), f"{costs.blocked_s:.1f}", f"{costs.written_s:.1f}"]
        cells += [f"{costs.restart_s:.0f}", duration(best), f"{best / each.step_s:,.0f}"]
        cells += [f"{lost(other):.2%}" for other in others]
        lines.append(f"| {' | '.join(cells)} | {hours:,.0f} |")
    return "\n".join(lines)


def by_simulation(scales: Sequence[Scale]) -> str:
    lines = [
        "| GPUs | ¼ of it: computed | simulated | best: computed | simulated | 4 times: computed | simulated |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in scales:
        cells = []
        for other in (each.best_s / 4, each.best_s, 4 * each.best_s):
            cells += [f"{each.costs.lost_share(other):.2%}", f"{simulate(each.costs, other):.2%}"]
        lines.append(f"| {each.gpus:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def apart(scales: Sequence[Scale]) -> str:
    """How far the two are from each other."""
    far = max(
        abs(each.costs.lost_share(other) - simulate(each.costs, other))
        for each in scales
        for other in (each.best_s / 4, each.best_s, 4 * each.best_s)
    )
    lines = ["| runs | days of each | figures | furthest apart, percentage points |", "|---|---|---|---|"]
    return "\n".join([*lines, f"| {RUNS} | {DAYS} | {3 * len(scales)} | {100 * far:.2f} |"])


def by_cost(each: Scale) -> str:
    """The share that is lost at the largest scale, by what a checkpoint costs and how often one is written."""
    heads = " | ".join(duration(interval) for interval in INTERVALS)
    lines = [f"| a checkpoint blocks, s | {heads} | best interval | lost at it |", "|---|---|---|---|---|---|---|"]
    for cost in COSTS:
        costs = replace(each.costs, blocked_s=cost, written_s=0.0)
        cells = " | ".join(f"{costs.lost_share(interval):.1%}" for interval in INTERVALS)
        best = costs.best_interval_s
        lines.append(f"| {cost:.0f} | {cells} | {duration(best)} | {costs.lost_share(best):.1%} |")
    return "\n".join(lines)


def by_rate(each: Scale) -> str:
    """The same training at each published rate."""
    lines = [
        "| published on | failures | GPU hours for each | time to failure on 1,024 GPUs | best interval | lost at it |",
        "|---|---|---|---|---|---|",
    ]
    for gpus, mean_s in PUBLISHED.items():
        costs = replace(each.costs, mean_s=mean_s * gpus / each.gpus)
        cells = [f"{gpus:,} GPUs", f"one in {duration(mean_s)}", f"{gpus * mean_s / HOUR:,.0f}"]
        cells += [duration(costs.mean_s), duration(costs.best_interval_s)]
        lines.append(f"| {' | '.join(cells)} | {costs.lost_share(costs.best_interval_s):.2%} |")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.1f} d"


def page(text: str) -> str:
    """The page with everything between its markers made anew."""
    small = [found for gpus in GPUS if (found := scale("llama-3.1-8b", gpus, background=True))]
    large = [found for gpus in GPUS[2:] if (found := scale(LLAMA_70B, gpus, background=False))]
    parts = {
        "background": by_scale(small),
        "blocking": by_scale(large),
        "simulated": by_simulation(small),
        "apart": apart([*small, *large]),
        "costs": by_cost(small[-1]),
        "rates": by_rate(small[-1]),
    }
    return fill(text, parts, PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    args = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    return write_or_check(PAGE, text, page(text), __file__, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
