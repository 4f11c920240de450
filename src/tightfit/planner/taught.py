"""What step times of finished runs say about the rates of a machine.

A run gives one number, the seconds of a step, and a prediction hangs on many rates. Which of them was wrong is not
measured, but each rate says how far it may be off. So the error goes where it is likely to come from: what a rate
leaves open of the step, squared, is its share of the error. A rate that was measured on this machine hardly moves, one
that was assumed takes most of it; and what runs of other models and ways have taught narrows what is left. That is the
usual estimate from prior and measurements, a Kalman filter whose state is the logarithms of the factors, taken run by
run. A step is a sum of what its rates take, so each run is looked at anew around what it has changed, a few times.

What is learned are factors of rates and not of steps. So the search and the prices that are reported see the same
machine, and a lesson about the host's optimizer says nothing about ways that have none.

How much a run counts:

- A run of the same training counts nearly in full: it is measured again to within `REPEATS`.
- One of another training tells less: `MODEL_ERROR` of its error may be the model of the pace.
- What is off by more than twice counts when a second run has measured it so: a card may have been shared for once.
- Once the rates are measured anew, or the card, the processor, a link or the network are others, what was learned
  against the old ones says nothing any more: see `machine_mark`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp, log, log1p

from tightfit.pace import pace
from tightfit.planner.calibration import Calibration, TimedRun, TimedShare, Training, mark, training_of, way_mark
from tightfit.types import Hardware, Levers, ModelShape, Pace, Taught, TaughtRate

REPEATS = 0.02
"""By how much median step times of one job on one machine differ from run to run. Assumed."""
MODEL_ERROR = 0.05
"""What a pace is off where its rates are right: what the best published predictor reaches (arXiv 2509.22832)."""
MOST_FACTOR = 16.0
"""No rate is believed to be further off than that, either way: that would be another machine, or another training."""
NEWEST = 32  # runs of a machine that count
LOOKS = 6  # at each run, around what it has changed


def teach(hardware: Hardware, known: Calibration | None, shape: ModelShape, levers: Levers) -> Hardware:
    """The hardware with what is known from runs on it, for planning this training; as it is where nothing is wanted."""
    if known is None:
        return hardware
    machine = machine_mark(hardware, known.processor)
    runs = tuple(run for run in known.timed if run.machine == machine and run.counts)[-NEWEST:]
    taught = None
    if runs:
        rates = estimate_rates(runs, training_of(shape, levers, hardware))
        taught = Taught(on=max(run.day for run in runs), rates=rates) if rates else None
    return hardware if taught == hardware.taught else replace(hardware, taught=taught)


def machine_mark(hardware: Hardware, processor: str) -> str:
    """The same for machines whose rates are known in the same way from the same source, whatever part of it is used."""
    gpu, measured = hardware.gpu, hardware.measured
    card = (gpu.name, gpu.vendor, gpu.link, gpu.link_bytes_per_s, hardware.network_bytes_per_s)
    return mark(repr((card, processor, measured and (measured.machine, measured.on))))


def timed_run(
    shape: ModelShape, levers: Levers, hardware: Hardware, processor: str, measured_s: float, day: str
) -> TimedRun | None:
    """What a run in which a step took so long has taught; None: nothing is known of what its prediction hangs on."""
    predicted = pace(shape, levers, replace(hardware, taught=None))
    shares = _shares(predicted)
    if not shares:
        return None
    return TimedRun(
        machine=machine_mark(hardware, processor),
        training=training_of(shape, levers, hardware),
        way=way_mark(levers),
        day=day,
        predicted_s=predicted.step_s,
        measured_s=measured_s,
        shares=shares,
    )


def _shares(predicted: Pace) -> tuple[TimedShare, ...]:
    """The seconds that hang on each rate: what its spread changes, over its spread. What overlaps may count twice, and
    a step is no shorter than what hangs on its rates."""
    rates = predicted.rates.items()
    hanging = {name: rate.open_s / rate.spread for name, rate in rates if rate.spread > 0 and rate.open_s > 0}
    scale = min(1.0, predicted.step_s / max(sum(hanging.values()), 1e-12))
    return tuple(
        TimedShare(rate=name, spread=predicted.rates[name].spread, seconds=seconds * scale)
        for name, seconds in hanging.items()
    )


@lru_cache(maxsize=64)
def estimate_rates(runs: tuple[TimedRun, ...], training: Training) -> tuple[TaughtRate, ...]:
    """The factors of all rates that these runs hang on; of the training that is planned they count in full, and last.
    The newest stand last."""
    spreads = {share.rate: share.spread for run in runs for share in run.shares}
    names = sorted(spreads)
    state = dict.fromkeys(names, 0.0)
    covariance = {one: dict.fromkeys(names, 0.0) for one in names}
    for name in names:
        covariance[name][name] = log1p(spreads[name]) ** 2
    for run in sorted(runs, key=lambda run: run.training == training):
        noise = (REPEATS if run.training == training else MODEL_ERROR) ** 2
        seconds = {share.rate: share.seconds for share in run.shares}
        fixed = max(0.0, run.predicted_s - sum(seconds.values()))
        before, gain, leans = dict(state), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for _ in range(LOOKS):
            takes = {name: size * exp(state[name]) for name, size in seconds.items()}
            step_s = fixed + sum(takes.values())
            leans = {name: takes.get(name, 0.0) / step_s for name in names}
            open_to = {one: sum(covariance[one][other] * leans[other] for other in names) for one in names}
            gain = {
                name: open_to[name] / (noise + sum(leans[each] * open_to[each] for each in names)) for name in names
            }
            error = log(run.measured_s / step_s) - sum(leans[name] * (before[name] - state[name]) for name in names)
            limit = log(MOST_FACTOR)
            state = {name: min(limit, max(-limit, before[name] + gain[name] * error)) for name in names}
        known = {other: sum(leans[name] * covariance[name][other] for name in names) for other in names}
        covariance = {
            one: {other: covariance[one][other] - gain[one] * known[other] for other in names} for one in names
        }
    return tuple(
        TaughtRate(name=name, factor=exp(state[name]), spread=exp(max(covariance[name][name], 0.0) ** 0.5) - 1)
        for name in names
    )
