"""What `tightfit train` shows: the plan in short, a line that moves while it runs, and at the end what came of it.

On a terminal the line is drawn anew in place. In a pipe or a log every line stays, so there is one for each thing that
happens once, and for what goes on at most one in ten seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tightfit.inputs.occupancy import Occupancy
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, amounts, strategy_name
from tightfit.runs.events import (
    Ended,
    Evaluation,
    Event,
    Failed,
    MemoryMark,
    Other,
    Probe,
    Progress,
    Proof,
    Saved,
    Started,
    Step,
    Warned,
)
from tightfit.runs.failure import Failure
from tightfit.runs.reservations import Reservation
from tightfit.runs.tally import Tally
from tightfit.runs.worker_file import WorkerFile
from tightfit.screen import draw_list, say, table_of
from tightfit.screen_plan import draw_levers
from tightfit.screen_plan_words import duration_words, hardware_words, lever_flags, model_words, reason_lines

MIB = 2**20
EVERY_S = 10.0
"""In a pipe, what goes on is said so often."""
MILESTONES = {
    "init": "engine ready",
    "forward": "first forward",
    "backward": "first backward",
    "step": "first optimizer step",
}


# --- before -------------------------------------------------------------------------------------


def draw_start(console: Console, plan: Plan, folder: str) -> None:
    """What is about to run, and why so. All other ways that were priced are in PLAN.md."""
    way = plan.chosen
    assert way is not None, "what does not fit is an error before anything is drawn"
    tokens = f"{plan.effective_batch} × {way.levers.sequence} tokens a step"
    say(console, f"{model_words(plan)}, on {hardware_words(way.hardware)}: {tokens}", style="bold")
    needed, size = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
    pace = f"{way.pace.tokens_per_s:,.0f} tokens/s in {needed} of {size} GiB{duration_words(plan)}"
    say(console, f"{strategy_name(way.levers)}: {pace}.", style="bold green")
    draw_levers(console, [flag for flag in lever_flags(plan, way) if not flag.startswith("--world ")])
    draw_list(console, "IT CHANGES THE TRAINING:", [f"{change}." for change in way.changes])
    draw_list(console, "Because:", reason_lines(plan))
    draw_list(console, "Never run by us:", plan.unproven)
    console.print()
    say(console, f"The run's folder: {folder}", indent="  ", first="")


def draw_occupancy(
    console: Console, found: Occupancy, live: Sequence[Reservation], ram_bytes: int | None, free_ram_bytes: int | None
) -> None:
    """What is free, and who holds the rest."""
    for device in found.devices:
        say(console, f"GPU {device.number}, {device.name}: {_free(device.free_bytes, device.total_bytes)}")
        for holder in device.holders:
            held = "?" if holder.held_bytes is None else f"{holder.held_bytes / MIB:,.0f}"
            who = "  ".join((holder.user or "unknown user", holder.command or "unknown command"))
            say(console, f"{held:>8} MiB  process {holder.pid}  {who}", first="  ", indent=" " * 16)
        for entry in live:
            if device.key in entry.gpus:
                say(console, f"taken by {entry.words}", first="  ", indent="    ")
    if not found.devices:
        say(console, "There is no GPU here: training runs on the CPU, in host RAM.")
    say(console, f"Host RAM: {_free(free_ram_bytes, ram_bytes)}")
    for entry in live:
        say(console, f"{_size(entry.host_bytes)} are reserved by {entry.words}", first="  ", indent="    ")


def _free(free_bytes: int | None, total_bytes: int | None) -> str:
    total = "an unknown size" if total_bytes is None else f"{total_bytes / MIB:,.0f} MiB"
    free = "an unknown part" if free_bytes is None else f"{free_bytes / MIB:,.0f} MiB"
    return f"{free} of {total} free"


# --- while it runs ------------------------------------------------------------------------------


class Board:
    """Shows events as they come. Leaving the `with` block leaves the last state on the screen."""

    def __init__(self, console: Console, worker: WorkerFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._worker, self._clock = console, worker, clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._said_at = -math.inf
        self._about = ""
        self._held: str | None = None
        """The line that was passed over last, so that the end of something is always said."""

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if kind is None or not issubclass(kind, BrokenPipeError):
            self._say_held()

    def show(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._going_on(event.what, _progress_line(event))
        elif isinstance(event, Step):
            self._going_on("step", step_line(event, self._worker.peak_bytes))
        else:
            line, style = _line(event)
            if line:
                self._once(line, style)

    def _going_on(self, about: str, line: str) -> None:
        if self._live is not None:
            self._held = line
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        now = self._clock()
        if about != self._about:
            self._say_held()
        elif now - self._said_at < EVERY_S:
            self._held = line
            return
        self._about, self._said_at, self._held = about, now, None
        self._console.print(Text(line), soft_wrap=True)

    def _once(self, line: str, style: str) -> None:
        if self._live is None:
            self._say_held()
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _say_held(self) -> None:
        if self._held is not None:
            self._console.print(Text(self._held), soft_wrap=True)
            self._held = None


def _line(event: Event) -> tuple[str, str]:
    """What is said once, and how it looks."""
    if isinstance(event, Proof):
        return f"{'✓' if event.ok else '✗'} {event.text}", "" if event.ok else "bold red"
    if isinstance(event, MemoryMark):
        return _memory_line(event) if event.measured_bytes is not None else "", ""
    if isinstance(event, Probe):
        took = "" if event.seconds is None else f" in {duration(event.seconds)}"
        peak = "" if event.peak_bytes is None else f", peak {_size(event.peak_bytes)}"
        return f"✓ the largest batch passed{took}{peak}", ""
    if isinstance(event, Evaluation):
        step = "" if event.step is None else f" at step {event.step:,}"
        perplexity = "" if event.perplexity is None else f", perplexity {event.perplexity:.4g}"
        return f"evaluation{step}: loss {_loss(event.loss)}{perplexity}", "bold"
    if isinstance(event, Warned):
        return f"! {event.text}", "yellow"
    if isinstance(event, Saved):
        size = "" if event.written_bytes is None else f" ({_size(event.written_bytes)})"
        return f"saved {event.folder}{size}", ""
    if isinstance(event, Other):
        return f"{event.name}: {event.text}", ""
    assert isinstance(event, Started | Ended | Failed | Progress | Step)
    return "", ""


def _memory_line(event: MemoryMark) -> str:
    name = MILESTONES.get(event.milestone, event.milestone)
    measured = _size(event.measured_bytes or 0)
    predicted = "" if event.predicted_bytes is None else f" (planned {_size(event.predicted_bytes)})"
    return f"  memory, {name}: {measured}{predicted}"


def _progress_line(event: Progress) -> str:
    if event.total == 1 and event.done == 0:  # one thing, of which nobody knows how far it is
        return f"{event.what} …"
    if event.total is not None and event.total > 0 and event.done is not None:
        return f"{event.what}: {100 * min(1.0, event.done / event.total):.0f} %"
    return event.what if event.done is None else f"{event.what}: {event.done:,.0f}"


def step_line(step: Step, predicted_bytes: int) -> str:
    """The line that moves."""
    parts = [f"step {step.step:,}" + ("" if step.steps is None else f"/{step.steps:,}"), f"loss {_loss(step.loss)}"]
    if step.tokens_per_s is not None:
        parts.append(f"{step.tokens_per_s:,.0f} tokens/s")
    if step.seconds_left is not None:
        parts.append(f"{duration(step.seconds_left)} left")
    if step.peak_bytes:
        now = "" if step.now_bytes is None else f"{_size(step.now_bytes)} now, "
        parts.append(f"memory {now}{_size(step.peak_bytes)} peak, {_size(predicted_bytes)} planned")
    elif step.host_bytes is not None:
        parts.append(f"{_size(step.host_bytes)} of RAM")
    if step.loss_scale is not None:
        parts.append(f"scale {step.loss_scale:,.0f}")
    if step.skipped:
        parts.append("skipped")
    return "  ".join(parts)


# --- after --------------------------------------------------------------------------------------


def draw_summary(console: Console, worker: WorkerFile, tally: Tally, folder: str) -> None:
    """Predicted against measured, and what to do with what came out."""
    console.print()
    last = tally.last
    if last is not None:
        first = "" if tally.first_loss is None or last.step <= 1 else f"{_loss(tally.first_loss)} → "
        steps = f"{last.step:,} step{'' if last.step == 1 else 's'}"
        say(console, f"Trained {worker.model} for {steps}: loss {first}{_loss(last.loss)}.", style="bold green")
        console.print()
    _draw_table(console, worker, tally)
    model = f"{folder}/model"
    if worker.method == "full":
        use = f"transformers' AutoModelForCausalLM.from_pretrained({model!r}) loads it"
        draw_list(console, "What came out:", [f"The model is in {model}; {use}."])
        return
    next_step = f"tightfit export {folder} --merge"
    draw_list(console, "What came out:", [f"The adapters are in {model}.", f"As one model with its base: {next_step}"])


def _draw_table(console: Console, worker: WorkerFile, tally: Tally) -> None:
    rows: list[tuple[str, float | None, float | None, str]] = []
    for mark in tally.marks:
        if mark.measured_bytes is None:  # on the CPU nobody counts
            continue
        name = MILESTONES.get(mark.milestone, mark.milestone)
        rows.append((f"memory, {name}", mark.predicted_bytes, mark.measured_bytes, "bytes"))
    if tally.peak_bytes is not None:
        rows.append(("memory, peak of the steps", worker.peak_bytes, tally.peak_bytes, "bytes"))
    rows.append(("a step", worker.step_s, tally.step_s, "seconds"))
    rows.append(("tokens a second", worker.tokens_per_s, tally.tokens_per_s, ""))
    table = table_of("", "predicted", "measured", "")
    shown = {
        "bytes": lambda value: _size(int(value)),
        "seconds": lambda value: f"{value:.3g} s",
        "": lambda value: f"{value:,.0f}",
    }
    for name, predicted, measured, unit in rows:
        cells = ["-" if value is None else shown[unit](value) for value in (predicted, measured)]
        known = predicted is not None and measured is not None and predicted > 0
        table.add_row(name, *cells, f"{100 * (measured or 0) / (predicted or 1):.0f} %" if known else "")
    console.print(table)
    if worker.vendor == "cpu":
        say(console, "No rates of the CPU are known, so its predicted pace compares ways and no more.", style="dim")


def draw_failure(console: Console, failure: Failure) -> None:
    """The sentence of the rank that failed first, and what it printed last."""
    console.print(Text(f"tightfit: the training failed: {failure.sentence.rstrip('.')}", style="bold"), soft_wrap=True)
    if failure.tail:
        console.print(Text(f"The last lines of {failure.log}:"), soft_wrap=True)
    for line in failure.tail:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s" if seconds >= 1 else f"{max(0.0, seconds):.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400 * 3:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86_400:.1f} days"


def _loss(loss: float | None) -> str:
    return "?" if loss is None else f"{loss:.4f}"


def _size(size_bytes: int) -> str:
    """GiB, except for what is so small that it would be nought."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB // 2 else f"{size_bytes / MIB:.1f} MiB"
