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

- A run of the same training counts nearly in full: it is measured again to within `REPEATS`. What its rates cannot
  explain is the model's own error about this training, and is taken from all of its rates alike.
- One of another training tells less: `MODEL_SPREAD` of its error may be such an error of its own.
- What is off by more than twice counts when a second run has measured it so: a card may have been shared for once.
- Once the rates are measured anew, or the card, the processor, a link or the network are others, what was learned
  against the old ones says nothing any more: see `machine_mark`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import exp, inf, isclose, log, log1p

from tightfit.pace import pace, step_seconds
from tightfit.pace.rates import MODEL_SPREAD
from tightfit.planner.calibration import Calibration, TimedRun, TimedShare, Training, mark, training_of, way_mark
from tightfit.types import Hardware, Levers, ModelShape, Pace, Taught, TaughtRate

MODEL = "model"  # beside the rates: what the model of the pace is off for the training that is planned
REPEATS = 0.01
"""By how much median step times of one job on one machine differ from run to run. Assumed."""
MOST_FACTOR = 1000.0
"""No rate is believed to be further off than that, either way: a card of which nothing is known may be far off."""
LEAST_SHARE = 0.05  # of a step is left, however fast its rates are
NEWEST = 32  # runs of a machine that count
LEAST_CHANGE = 0.005  # of a rate, below which what it changes is lost in rounding
LOOKS = 12  # at each run, around what it has changed


def teach(hardware: Hardware, known: Calibration | None, shape: ModelShape, levers: Levers) -> Hardware:
    """The hardware with what is known from runs on it, for planning this training; as it is where nothing is wanted."""
    if known is None:
        return hardware
    machine = machine_mark(hardware, known.processor)
    runs = tuple(run for run in known.timed if run.machine == machine and run.counts)[-NEWEST:]
    if not runs:
        return hardware if hardware.taught is None else replace(hardware, taught=None)
    return _with(hardware, *estimate_rates(runs, training_of(shape, levers, hardware)), on=max(run.day for run in runs))


def machine_mark(hardware: Hardware, processor: str) -> str:
    """The same for machines whose rates are known in the same way from the same source, whatever part of it is used."""
    gpu, measured = hardware.gpu, hardware.measured
    card = (gpu.name, gpu.vendor, gpu.link, gpu.link_bytes_per_s, hardware.network_bytes_per_s)
    return mark(repr((card, processor, measured and (measured.machine, measured.on))))


def timed_run(
    shape: ModelShape, levers: Levers, hardware: Hardware, processor: str, measured_s: float, day: str
) -> TimedRun | None:
    """What a run in which a step took so long has taught; None: nothing is known of what its prediction hangs on."""
    bare = replace(hardware, taught=None)
    predicted = pace(shape, levers, bare)

    def hanging_s(factors: Mapping[str, float]) -> dict[str, float]:
        """The seconds that hang on each rate: what a step changes when they are so much slower, one after another, over
        that. So what overlaps is counted once."""
        rates, last_s, found = list[TaughtRate](), predicted.step_s, dict[str, float]()
        for name, factor in factors.items():
            rates.append(TaughtRate(name=name, factor=factor, spread=0.0))
            step_s = step_seconds(shape, levers, _with(bare, *rates))
            found[name], last_s = max(0.0, (step_s - last_s) / (factor - 1)), step_s
        return found

    spreads = {name: rate.spread for name, rate in predicted.rates.items() if rate.spread > 0}
    run = TimedRun(
        machine=machine_mark(hardware, processor),
        training=training_of(shape, levers, hardware),
        way=way_mark(levers),
        day=day,
        predicted_s=predicted.step_s,
        measured_s=measured_s,
        shares=tuple(
            TimedShare(
                rate=name,
                spread=spread,
                slower_s=hanging_s({name: 1 + spread})[name],
                faster_s=hanging_s({name: 1 / (1 + spread)})[name],
            )
            for name, spread in spreads.items()
        ),
    )
    # What runs beside something longer hangs on a rate from somewhere on. So the run is looked at where it says that
    # the rates are, half way from the last place, and what comes nearest to it is kept.
    at, best, least = dict.fromkeys(spreads, 1.0), run, inf
    for _ in range(LOOKS):
        rates = estimate_rates((run,), run.training)
        miss = abs(log(step_seconds(shape, levers, _with(bare, *rates)) / measured_s))
        best, least = (run, miss) if miss < least else (best, least)
        at = {rate.name: (at[rate.name] * rate.factor) ** 0.5 for rate in rates}
        seen = hanging_s({name: at[name] for name in spreads if abs(at[name] - 1) > LEAST_CHANGE})
        run = replace(run, shares=tuple(_seen_at(share, at[share.rate], seen.get(share.rate)) for share in run.shares))
    return best if best.shares else None


def narrow(found: Pace, known: Calibration | None, shape: ModelShape, levers: Levers, hardware: Hardware) -> Pace:
    """The pace with the range of what has run before: between what is predicted now and what was measured then, and as
    much beyond as runs differ. The same job is known again by the same prediction."""
    if known is None or hardware.taught is None:
        return found
    bare_s = step_seconds(shape, levers, replace(hardware, taught=None))
    machine, training, way = (
        machine_mark(hardware, known.processor),
        training_of(shape, levers, hardware),
        way_mark(levers),
    )
    for run in known.timed:
        same = run.counts and (run.machine, run.training, run.way) == (machine, training, way)
        if same and isclose(run.predicted_s, bare_s, rel_tol=1e-9):
            low_s, high_s = min(found.step_s, run.measured_s), max(found.step_s, run.measured_s)
            return replace(found, low_s=low_s / (1 + 2 * REPEATS), high_s=high_s * (1 + 2 * REPEATS))
    return found


def _seen_at(share: TimedShare, factor: float, seconds: float | None) -> TimedShare:
    """None: too near to tell."""
    if seconds is None:
        return share
    return replace(share, slower_s=seconds) if factor > 1 else replace(share, faster_s=seconds)


def _with(hardware: Hardware, *rates: TaughtRate, on: str = "") -> Hardware:
    return replace(hardware, taught=Taught(on=on, rates=rates))


@lru_cache(maxsize=64)
def estimate_rates(runs: tuple[TimedRun, ...], training: Training) -> tuple[TaughtRate, ...]:
    """The factors of all rates that these runs hang on, for planning this training; the newest run stands last."""
    spreads = {share.rate: share.spread for run in runs for share in run.shares}
    same = any(run.training == training for run in runs)
    names = [*sorted(spreads), *([MODEL] if same else ())]
    state = dict.fromkeys(names, 0.0)
    covariance = {one: dict.fromkeys(names, 0.0) for one in names}
    for name in names:
        covariance[name][name] = log1p(spreads.get(name, MODEL_SPREAD)) ** 2
    for run in sorted(runs, key=lambda run: run.training == training):
        own = run.training == training
        noise = REPEATS**2 + (0.0 if own else MODEL_SPREAD**2)
        before, gain, leans = dict(state), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for _ in range(LOOKS):
            longer_s, slopes = 0.0, dict.fromkeys(names, 0.0)
            for share in run.shares:
                log_factor = state[share.rate]
                is_slower = log_factor > 0 or (log_factor == 0 and run.error > 0)
                seconds = share.slower_s if is_slower else share.faster_s
                longer_s += seconds * (exp(log_factor) - 1)
                slopes[share.rate] = seconds * exp(log_factor)
            step_s = max(run.predicted_s + longer_s, LEAST_SHARE * run.predicted_s)
            leans = {name: slopes[name] / step_s for name in names}
            expected = log(step_s)
            if own:
                leans[MODEL] = 1.0
                expected += state[MODEL]
            open_to = {one: sum(covariance[one][other] * leans[other] for other in names) for one in names}
            doubt = noise + sum(leans[name] * open_to[name] for name in names)
            gain = {name: open_to[name] / doubt for name in names}
            error = log(run.measured_s) - expected - sum(leans[name] * (before[name] - state[name]) for name in names)
            limit = log(MOST_FACTOR)
            state = {name: min(limit, max(-limit, before[name] + gain[name] * error)) for name in names}
        known = {other: sum(leans[name] * covariance[name][other] for name in names) for other in names}
        covariance = {
            one: {other: covariance[one][other] - gain[one] * known[other] for other in names} for one in names
        }
    whole = exp(state.get(MODEL, 0.0))
    return tuple(
        TaughtRate(
            name=name,
            factor=exp(state[name]) * whole,
            spread=exp(max(covariance[name][name], 0.0) ** 0.5) - 1,
        )
        for name in sorted(spreads)
    )
