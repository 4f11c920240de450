"""How often a checkpoint is written: what one costs a way, and the interval with which failures cost least.

Nothing of this changes the training. Where the user has said how often, that stays, and the plan says what another
interval would save. Where nothing was said, the usual number of steps stays too unless it is clearly worse: failures at
the published rate are not the only reason why people stop a run, and a number that is always the same is easier to
live with than a better one that is not.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from tightfit.job import Job, Saving
from tightfit.memory.compressed import gradient_messages
from tightfit.messages import Message
from tightfit.pace.failures import (
    BESIDE_COPY_S,
    SHARED_BYTES_PER_S,
    START_AGAIN_S,
    FailureCosts,
    mean_time_s,
)
from tightfit.pace.rates import rates_of
from tightfit.planner.plan import Checkpoints, Plan, Way
from tightfit.planner.reasons import time_words
from tightfit.types import Hardware

ADAM_BYTES = 8  # of Adam's two moments, a parameter; those that are kept in 8 bits are saved in fp32 as well
SPARE_BYTES = 2 * 2**30  # what must stay free on the host beside the buffers, as in train/checkpoint.py
FEW_GPUS = 8
"""So many fail so seldom that other reasons to lose work weigh more: there the usual interval stays, and nothing is
said about it, unless it costs much."""
WORTH, WORTH_ON_FEW = 0.005, 0.05
"""Of all time, what another interval than the usual one must save."""
LONGEST_S = 3600.0
"""More work than this is never left to one checkpoint by our own choice: a full disk, a time limit and a mistake are in
no rate of failures."""


def is_open(explicit: Set[str], job: Job) -> bool:
    """Whether it is ours to choose how often: nobody said, and no number of steps was named whose multiples stay."""
    said = {"saving.every_steps", "saving.every_minutes", "saving.every"} & explicit
    saving, usual = job.saving, Saving()
    is_usual = (saving.every_steps, saving.every_minutes) == (usual.every_steps, usual.every_minutes)
    return not said and saving.keep_every is None and is_usual


def checkpoint_bytes(job: Job, way: Way) -> int:
    """About what one checkpoint takes: weights as they train, fp32 copies and the optimizer's moments."""
    trained = way.footprint.trainable_parameters
    width = 4 if way.levers.precision == "fp32" else 2
    weights = way.shape.parameters * width if way.levers.method == "full" else trained * width
    masters = trained * 4 if way.levers.master_weights and width == 2 else 0
    kept = way.world * gradient_messages(way.shape, way.levers, way.world).kept  # every rank's own
    return weights + masters + kept + (trained * ADAM_BYTES if "adam" in job.optimizer else 0)


def settle_saving(plan: Plan, *, is_open: bool) -> Plan:
    """The plan with what its checkpoints cost; `is_open`: and with the interval that we choose, where it is another
    than the usual."""
    way = plan.chosen
    if way is None or not way.is_paced:
        return plan
    saving, step_s = plan.job.saving, way.pace.step_s
    costs = predict_costs(plan.job, way)
    best_steps = round_steps(min(costs.best_interval_s, LONGEST_S) / step_s)
    best_lost = costs.lost_share(best_steps * step_s)
    found = Checkpoints(
        bytes=checkpoint_bytes(plan.job, way),
        in_background=is_in_background(plan.job, way),
        costs=costs,
        best_steps=best_steps,
        best_lost_share=best_lost,
        every_s=_interval_s(saving, step_s),
    )
    few = way.world <= FEW_GPUS
    said = {"gpus": way.world, "mean": time_words(costs.mean_s / 3600), "lost": best_lost, "steps": best_steps}
    said["time"] = time_words(best_steps * step_s / 3600)
    too_much = found.lost_share is not None and found.lost_share - best_lost > (WORTH_ON_FEW if few else WORTH)
    if is_open and too_much:
        because = Message("plan.saves-chosen", **said, usual=saving.every_steps, usual_lost=found.lost_share)
        job = replace(plan.job, saving=replace(saving, every_steps=best_steps))
        found = replace(found, every_s=best_steps * step_s)
    else:
        job = plan.job
        about = "plan.saves-never" if found.lost_share is None else "plan.saves-well"
        about = "plan.saves-otherwise" if too_much else about
        own = {"own": found.lost_share, "own_time": time_words((found.every_s or 0) / 3600)}
        because = Message(about, **said, **own)
    shown = not few or too_much
    return replace(
        plan,
        job=job,
        checkpoints=replace(found, because=because),
        because=(*plan.because, because) if shown else plan.because,
    )


def predict_costs(job: Job, way: Way) -> FailureCosts:
    """What a failure and a checkpoint take with one way."""
    hardware, rates = way.hardware, rates_of(way.hardware, way.levers.precision)
    size = checkpoint_bytes(job, way)
    write_s = size / _disk_rate(hardware, rates.nvme_write)
    # A node reads what its ranks hold: all of it, where nothing is sharded. The weights under adapters are read too.
    base = 0 if way.levers.method == "full" else 2 * way.shape.parameters
    times = hardware.nodes if way.levers.shards_nothing else 1
    read_s = times * (size + base) / _disk_rate(hardware, rates.nvme_read)
    behind = is_in_background(job, way)
    return FailureCosts(
        mean_s=mean_time_s(way.world),
        blocked_s=BESIDE_COPY_S + (size / way.world / rates.host_link if behind else write_s),
        written_s=write_s if behind else 0.0,
        restart_s=START_AGAIN_S + read_s + way.pace.warm_up_s,
    )


def is_in_background(job: Job, way: Way) -> bool:
    """Whether training goes on while a checkpoint is written, which takes our own worker and room on the host."""
    levers, ram = way.levers, way.hardware.host_ram_bytes
    if (
        job.trainer != "tightfit"
        or not job.saving.async_save
        or "nvme" in (levers.offload_optimizer, levers.offload_param)
    ):
        return False
    held = way.footprint.host.peak_bytes_per_node + checkpoint_bytes(job, way) / way.hardware.nodes + SPARE_BYTES
    return ram is None or held <= ram


def round_steps(steps: float) -> int:
    """To two digits, which people remember; at least one step."""
    return max(1, int(float(f"{steps:.2g}")))


def _disk_rate(hardware: Hardware, local: float) -> float:
    """Of all nodes together: each has a drive of its own only where it is alone."""
    return local if hardware.nodes == 1 else hardware.nodes * SHARED_BYTES_PER_S


def _interval_s(saving: Saving, step_s: float) -> float | None:
    """Seconds between two checkpoints as the job says; None: there are none on the way."""
    by_steps = [] if saving.every_steps is None else [saving.every_steps * step_s]
    by_time = [] if saving.every_minutes is None else [saving.every_minutes * 60]
    return min([*by_steps, *by_time], default=None)
