"""Events as lines of text: what the desk shows, and what a worker says that was started without the desk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tightfit.messages import bare
from tightfit.priced import GIB
from tightfit.runs.events import (
    AttemptBegan,
    AttemptFailed,
    Checkpointed,
    CheckpointFailed,
    Ended,
    Evaluation,
    Event,
    Failed,
    MemoryMark,
    Other,
    PassedOver,
    Pictures,
    Probe,
    Progress,
    Proof,
    Resumed,
    Saved,
    Started,
    Step,
    Stopping,
    Warned,
)

MIB = 2**20
EVERY_S = 10.0
"""What goes on is said so often where every line stays."""
MILESTONES = {
    "init": "engine ready",
    "forward": "first forward",
    "backward": "first backward",
    "step": "first optimizer step",
}


class Lines:
    """Where every line stays, in a pipe or a log: one for each thing that happens once, and for what goes on at most
    one in ten seconds, and its last."""

    def __init__(
        self,
        say: Callable[[str, str], None],
        predicted_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        every_steps: int | None = None,
    ) -> None:
        """`say` takes a line and how it looks. `every_steps`: so often a step is said, whatever the clock says."""
        self._say, self._predicted, self._clock, self._every_steps = say, predicted_bytes, clock, every_steps
        self._said_at = -math.inf
        self._about = ""
        self._held: str | None = None
        """The line that was passed over last, so that the end of something is always said."""

    def expect(self, predicted_bytes: int) -> None:
        """Another plan is followed from now on."""
        self._predicted = predicted_bytes

    def show(self, event: Event) -> None:
        if isinstance(event, Progress | Step):
            about, line = moving_line(event, self._predicted)
            if isinstance(event, Step) and self._every_steps is not None:
                due = event.step % self._every_steps == 0
            else:
                due = about != self._about or self._clock() - self._said_at >= EVERY_S
            self._going_on(about, line, due=due)
            return
        line, style = line_of(event)
        if line:
            if self._every_steps is None or self._about != "step":
                self.end()
            self._say(line, style)

    def _going_on(self, about: str, line: str, *, due: bool) -> None:
        if about != self._about:
            self.end()
        self._about, self._held = about, None if due else line
        if due:
            self._said_at = self._clock()
            self._say(line, "")

    def end(self) -> None:
        """Say what was passed over."""
        if self._held is not None:
            self._say(self._held, "")
            self._held = None


def moving_line(event: Progress | Step, predicted_bytes: int) -> tuple[str, str]:
    """What is going on, and how far it is."""
    if isinstance(event, Progress):
        return str(event.what), _progress_line(event)
    return "step", step_line(event, predicted_bytes)


def line_of(event: Event) -> tuple[str, str]:
    """What is said once, and how it looks."""
    if isinstance(event, Proof):
        return f"{'✓' if event.ok else '✗'} {event.text}", "" if event.ok else "bold red"
    if isinstance(event, MemoryMark):
        return _memory_line(event), ""
    if isinstance(event, Probe):
        took = "" if event.seconds is None else f" in {duration(event.seconds)}"
        peak = "" if event.peak_bytes is None else f", peak {size_words(event.peak_bytes)}"
        return f"✓ the largest batch passed{took}{peak}", ""
    if isinstance(event, Evaluation):
        step = "" if event.step is None else f" at step {event.step:,}"
        perplexity = "" if event.perplexity is None else f", perplexity {event.perplexity:.4g}"
        return f"evaluation{step}: loss {loss_words(event.loss)}{perplexity}", "bold"
    if isinstance(event, Warned):
        return f"! {event.text}", "yellow"
    if isinstance(event, Saved):
        size = "" if event.written_bytes is None else f" ({size_words(event.written_bytes)})"
        return f"saved {event.folder}{size}", ""
    if isinstance(event, Pictures):
        return (f"drew {', '.join(event.files)}" if event.files else ""), ""
    if isinstance(event, Checkpointed | CheckpointFailed | Resumed | PassedOver | Stopping):
        return _checkpoint_line(event)
    if isinstance(event, AttemptBegan | AttemptFailed):
        return _attempt_line(event)
    if isinstance(event, Other):
        return f"{event.name}: {event.text}", ""
    assert isinstance(event, Started | Ended | Failed | Progress | Step)
    return "", ""


def _checkpoint_line(event: Checkpointed | CheckpointFailed | Resumed | PassedOver | Stopping) -> tuple[str, str]:
    if isinstance(event, Stopping):
        return f"! {event.text}", "bold yellow"
    if isinstance(event, PassedOver):
        return f"! {event.folder} was passed over: {event.text}", "yellow"
    at = "" if event.step is None else f" at step {event.step:,}"
    if isinstance(event, CheckpointFailed):
        return f"✗ NO CHECKPOINT{at}: {bare(event.text)}; the training goes on", "bold red"
    if isinstance(event, Resumed):
        ranks = "" if event.from_world is None else f" on {event.from_world} rank{'' if event.from_world == 1 else 's'}"
        wrote = "" if event.from_engine is None else f", written by {event.from_engine}{ranks}"
        changed = f"; changed since: {'; '.join(map(str, event.changed))}" if event.changed else ""
        return f"✓ going on{at.replace('at', 'from')} ({event.folder}{wrote}{changed})", "bold"
    size = "" if event.written_bytes is None else f", {size_words(event.written_bytes)}"
    took = "" if event.seconds is None else f" in {duration(event.seconds)}"
    waited = ""
    if event.background and event.blocked_s is not None:
        waited = f", of which the training waited {duration(event.blocked_s)}"
    return f"✓ checkpoint{at}{size}{took}{waited}", ""


def _attempt_line(event: AttemptBegan | AttemptFailed) -> tuple[str, str]:
    if isinstance(event, AttemptBegan):
        changed = f"; {', '.join(map(str, event.changed))}" if event.changed else ""
        return f"→ attempt {event.number}: {event.plan}{changed}", "bold"
    at = "before the first step" if event.step is None else f"after step {event.step:,}"
    kept = "" if event.kept_step is None else f" (the checkpoint of step {event.kept_step:,} is kept)"
    wait = f", in {duration(event.wait_s)}" if event.wait_s else ""
    failed = f"✗ attempt {event.number} failed {at}{kept}: {bare(event.text)}"
    return f"{failed} → {event.action}{wait}: {bare(event.because)}", "bold yellow"


def _memory_line(event: MemoryMark) -> str:
    """On a GPU beside the plan; on the CPU what the whole process holds, which a plan of tensors says nothing about."""
    name = MILESTONES.get(event.milestone, event.milestone)
    if event.measured_bytes is None:
        return "" if event.host_bytes is None else f"  memory, {name}: {size_words(event.host_bytes)} of RAM"
    measured = size_words(event.measured_bytes)
    predicted = "" if event.predicted_bytes is None else f" (planned {size_words(event.predicted_bytes)})"
    return f"  memory, {name}: {measured}{predicted}"


def _progress_line(event: Progress) -> str:
    if event.total == 1 and event.done == 0:  # one thing, of which nobody knows how far it is
        return f"{event.what} …"
    if event.total is not None and event.total > 0 and event.done is not None:
        return f"{event.what}: {100 * min(1.0, event.done / event.total):.0f} %"
    return str(event.what) if event.done is None else f"{event.what}: {event.done:,.0f}"


def step_line(step: Step, predicted_bytes: int) -> str:
    """The line that moves."""
    parts = [
        f"step {step.step:,}" + ("" if step.steps is None else f"/{step.steps:,}"),
        f"loss {loss_words(step.loss)}",
    ]
    if step.tokens_per_s is not None:
        parts.append(f"{step.tokens_per_s:,.0f} tokens/s")
    if step.seconds_left is not None:
        parts.append(f"{duration(step.seconds_left)} left")
    if step.peak_bytes:
        now = "" if step.now_bytes is None else f"{size_words(step.now_bytes)} now, "
        parts.append(f"memory {now}{size_words(step.peak_bytes)} peak, {size_words(predicted_bytes)} planned")
    elif step.host_bytes is not None:
        parts.append(f"{size_words(step.host_bytes)} of RAM")
    if step.loss_scale is not None:
        parts.append(f"scale {step.loss_scale:,.0f}")
    if step.skipped:
        parts.append("skipped")
    return "  ".join(parts)


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


def loss_words(loss: float | None) -> str:
    return "?" if loss is None else f"{loss:.4f}"


def size_words(size_bytes: int) -> str:
    """GiB, except for what is so small that it would be nought."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB // 2 else f"{size_bytes / MIB:.1f} MiB"
