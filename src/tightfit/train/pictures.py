"""Pictures of a run, drawn from its events: `loss.png` and `memory.png`.

They are drawn when the training is over, so nothing here may spoil it: a torn line, a loss that is no number or a full
disk costs a picture at most. A long run has more steps than a picture has columns; of those only so many lines are read
as JSON that the rest costs no more than a look at their first letters.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.owned import replace_file
from tightfit.runs import events as told
from tightfit.runs.events import events_of
from tightfit.train.events import EVENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS, MEMORY = "loss.png", "memory.png"
MOST_STEPS = 4000  # that are drawn; between half and all of them, where there are more
BLUE, SKY, ORANGE, VERMILLION, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#666666"
"""Okabe and Ito's colours: told apart by everybody."""
MILESTONES = {
    "init": "engine\nready",
    "forward": "first\nforward",
    "backward": "first\nbackward",
    "step": "first\nstep",
}
GIB, MIB = 2**30, 2**20


@dataclass(slots=True)
class RunHistory:
    """What the events say, later ones winning over earlier ones."""

    start: told.Started = field(default_factory=told.Started)
    steps: list[told.Step] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    marks: dict[str, told.MemoryMark] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)  # the steps from which the run was begun again

    @property
    def model(self) -> str:
        return (self.start.model or "")[:80]


def draw(folder: Path) -> list[Path]:
    """The pictures of the run in this folder. One that cannot be drawn is left out; without matplotlib, all are."""
    made: list[Path] = []
    with suppress(Exception):  # a picture is no reason for a finished training to fail
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        history = read(folder / EVENTS)
        for name, picture in ((LOSS, _loss), (MEMORY, _memory)):
            with suppress(Exception):
                figure = picture(history)
                if figure is not None:
                    drawn = io.BytesIO()
                    FigureCanvasAgg(figure).print_png(drawn)  # type: ignore[no-untyped-call]  # `savefig` draws twice
                    replace_file(folder / name, drawn.getvalue())
                    made.append(folder / name)
    return made


# --- reading ------------------------------------------------------------------------------------


def read(path: Path) -> RunHistory:
    """The events of a file, of which some lines may be torn."""
    history = RunHistory()
    # The lines of the file in their order; of the steps an even choice, and the last one.
    kept: list[tuple[int, bytes]] = []
    others: list[tuple[int, bytes]] = []
    every, seen, last = 1, 0, None
    with path.open("rb", buffering=MIB) as file:
        for number, line in enumerate(file):
            if not line.startswith(b'{"event": "step"'):
                others.append((number, line))
                continue
            last = (number, line)
            if seen % every == 0:
                kept.append(last)
                if len(kept) > MOST_STEPS:
                    kept, every = kept[::2], 2 * every
            seen += 1
    if last is not None and kept[-1] != last:
        kept.append(last)
    for event in events_of([line for _, line in sorted(kept + others, key=lambda each: each[0])]):
        if isinstance(event, told.Started):
            history.start = _clean(event, "limit_bytes", "peak_bytes")
        elif isinstance(event, told.Step):
            steps = history.steps
            if steps and event.step <= steps[-1].step:
                history.restarts.append(event.step)
                while steps and steps[-1].step >= event.step:  # they were lost, and are made again
                    steps.pop()
            steps.append(_clean(event, "loss", "learning_rate", "peak_bytes", "host_bytes"))
        elif isinstance(event, told.Resumed) and event.step is not None:
            # What came after the checkpoint was lost, and is made again: all of it, also where few steps are drawn.
            number = event.step
            if history.steps:
                history.restarts.append(number)
            history.steps[:] = [step for step in history.steps if step.step <= number]
            history.evaluations = {step: loss for step, loss in history.evaluations.items() if step <= number}
        elif isinstance(event, told.Evaluation):
            if event.step is not None and (loss := _number(event.loss)) is not None:
                history.evaluations[event.step] = loss
        elif isinstance(event, told.MemoryMark) and event.milestone in MILESTONES:
            history.marks[event.milestone] = _clean(event, "predicted_bytes", "measured_bytes", "host_bytes")
    return history


def _clean(event: Any, *names: str) -> Any:
    """The same with None for what is no number that can be drawn."""
    return replace(event, **{name: _number(getattr(event, name)) for name in names})


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        if math.isfinite(value) and abs(value) < 1e30:  # larger ones are no quantity, and break the axes
            return float(value)
    return None


# --- drawing ------------------------------------------------------------------------------------


def _figure(width: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5.0), dpi=120, layout="constrained")


def _loss(history: RunHistory) -> Figure | None:
    if not history.steps and not history.evaluations:
        return None
    figure = _figure(9.0)
    axes = figure.subplots()
    numbers = [step.step for step in history.steps]
    losses = [step.loss for step in history.steps]
    few = "o" if len(numbers) < 40 else ""
    axes.plot(numbers, _gaps(losses), color=SKY, linewidth=1, marker=few, markersize=4, label="loss")
    if len(numbers) > 2:
        axes.plot(numbers, _gaps(smooth(losses)), color=BLUE, linewidth=2, label="loss, smoothed")
    lost = [number for number, loss in zip(numbers, losses, strict=True) if loss is None]
    if lost:
        low, across = [0.02] * len(lost), axes.get_xaxis_transform()
        axes.plot(lost, low, "x", color=VERMILLION, transform=across, label="the loss is no number")
    if history.evaluations:
        places, values = zip(*sorted(history.evaluations.items()), strict=True)
        axes.plot(places, values, "D", color=VERMILLION, markersize=6, label="evaluation")
    for number, restart in enumerate(history.restarts[:50]):
        axes.axvline(restart, color=GREY, linestyle=":", linewidth=1, label="begun again" if number == 0 else None)
    # The learning rate on an axis of its own, and the legend of both.
    lines, names = axes.get_legend_handles_labels()
    if any(step.learning_rate is not None for step in history.steps):
        other = axes.twinx()
        rates, label = _gaps(step.learning_rate for step in history.steps), "learning rate (right)"
        other.plot(numbers, rates, color=ORANGE, linestyle="--", marker=few, markersize=3, label=label)
        other.set_ylabel("learning rate")
        other.set_ylim(bottom=0)
        other.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        more, more_names = other.get_legend_handles_labels()
        lines, names = [*lines, *more], [*names, *more_names]
    axes.legend(lines, names, loc="upper right", framealpha=0.9)
    axes.set_title(history.model or "loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _whole_steps(axes)
    axes.grid(alpha=0.25)
    return figure


def _memory(history: RunHistory) -> Figure | None:
    measured = [mark.measured_bytes for mark in history.marks.values()] + [step.peak_bytes for step in history.steps]
    on_gpu = any(value is not None for value in measured)
    held = [step.peak_bytes if on_gpu else step.host_bytes for step in history.steps]
    if not history.marks and all(value is None for value in held):
        return None
    marks = {text: history.marks[name] for name, text in MILESTONES.items() if name in history.marks}
    bars = [(mark.predicted_bytes, mark.measured_bytes if on_gpu else mark.host_bytes) for mark in marks.values()]
    limit = history.start.limit_bytes if on_gpu else None
    top = max((value for value in (*chain(*bars), *held, limit) if value is not None), default=0)
    unit, word = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    figure = _figure(11.0)
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = ((0, "predicted", ORANGE, "//"), (1, "measured", BLUE, ""))
    for which, label, colour, hatch in kinds:
        places = [place + (which - 0.5) * 0.4 for place in range(len(bars))]
        heights = [(bar[which] or 0) / unit for bar in bars]
        drawn = left.bar(places, heights, 0.38, color=colour, hatch=hatch, edgecolor="white", label=label)
        words = [f"{high:.0f}" if high >= 100 else f"{high:.3g}" for high in heights]
        words = ["-" if bar[which] is None else word for bar, word in zip(bars, words, strict=True)]
        left.bar_label(drawn, labels=words, fontsize=8, padding=2)
    left.set_xticks(range(len(marks)), marks)
    numbers = [step.step for step in history.steps]
    marker = "o" if len(numbers) < 40 else ""
    right.plot(numbers, _gaps(held, unit), color=BLUE, marker=marker, markersize=4, label="measured")
    if history.start.peak_bytes is not None:
        right.axhline(history.start.peak_bytes / unit, color=ORANGE, linestyle="--", label="predicted peak")
    for axes in (left, right):
        if limit is not None:
            axes.axhline(limit / unit, color=VERMILLION, linewidth=2, label="what the plan may use of the card")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, axis="y")
        axes.legend(loc="lower right" if axes is right else "upper left", framealpha=0.9)
    left.set_ylabel(f"{word} of {'the GPU' if on_gpu else 'RAM, all of the process'}")
    left.set_title("up to each milestone" if on_gpu else "at each milestone")
    right.set_title("peak over the steps" if on_gpu else "over the steps")
    right.set_xlabel("step")
    _whole_steps(right)
    figure.suptitle(f"{history.model}: memory of {'rank 0' if on_gpu else 'rank 0, which has no GPU'}".lstrip(": "))
    return figure


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _gaps(values: Iterable[float | None], unit: float = 1) -> list[float]:
    """A line is broken where there is no number."""
    return [math.nan if value is None else value / unit for value in values]


def smooth(values: list[float | None]) -> list[float | None]:
    """The exponential average over about a fiftieth of the run; what is no number is passed over."""
    share = 2 / (max(3.0, len(values) / 50) + 1)
    found: list[float | None] = []
    average, weight = 0.0, 0.0
    for value in values:
        if value is not None:
            average += share * (value - average)
            weight += share * (1 - weight)  # or the first values would pull towards nought
        found.append(average / weight if weight else None)
    return found
