"""Events as lines of text: what the desk shows, and what a worker says that was started without the desk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tightfit.messages import Listing, Message, Said, text
from tightfit.priced import GIB
from tightfit.runs import events
from tightfit.runs.events import Event, Progress, Step

MIB = 2**20
EVERY_S = 10.0  # what goes on is said so often where every line stays
MILESTONES = {
    "init": Message("runs.engine-ready"),
    "forward": Message("runs.first-forward"),
    "backward": Message("runs.first-backward"),
    "step": Message("runs.first-optimizer-step"),
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
        self._held: str | None = None  # the line that was passed over last, so that the end of something is always said

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
            if about != self._about:
                self.end()
            self._about, self._held = about, None if due else line
            if due:
                self._said_at = self._clock()
                self._say(line, "")
            return
        said, style = line_of(event)
        if said:
            if self._every_steps is None or self._about != "step":
                self.end()
            self._say(str(said), style)

    def end(self) -> None:
        if self._held is not None:
            self._say(self._held, "")
            self._held = None


def moving_line(event: Progress | Step, predicted_bytes: int) -> tuple[str, str]:
    if isinstance(event, Step):
        return "step", step_line(event, predicted_bytes)
    if event.total == 1 and event.done == 0:  # one thing, of which nobody knows how far it is
        return str(event.what), f"{event.what} …"
    if event.total is not None and event.total > 0 and event.done is not None:
        return str(event.what), f"{event.what}: {100 * min(1.0, event.done / event.total):.0f} %"
    return str(event.what), str(event.what) if event.done is None else f"{event.what}: {event.done:,.0f}"


def line_of(event: Event) -> tuple[Said, str]:
    match event:
        case events.Proof():
            id_, style = ("runs.proved", "") if event.ok else ("runs.not-proved", "bold red")
            return Message(id_, said=event.text or event.name), style
        case events.MemoryMark():
            # On a GPU beside the plan; on the CPU what the whole process holds, of which a plan of tensors says nothing
            name = MILESTONES.get(event.milestone, event.milestone)
            if event.measured_bytes is None:
                held = event.host_bytes
                return "" if held is None else Message("runs.held-ram", name=name, size=size_words(held)), ""
            measured = size_words(event.measured_bytes)
            if event.predicted_bytes is None:
                return Message("runs.held-memory", name=name, size=measured), ""
            return Message("runs.held-planned", name=name, size=measured, planned=size_words(event.predicted_bytes)), ""
        case events.Probe():
            peak = "" if event.peak_bytes is None else Message("runs.with-peak", size=size_words(event.peak_bytes))
            return Message("runs.probed", took=_in_time(event.seconds), peak=peak), ""
        case events.Evaluation(step=step, perplexity=value):
            perplexity = "" if value is None else Message("runs.perplexity", value=value)
            loss = loss_words(event.loss)
            return Message("runs.evaluated", at=_at_step(step), loss=loss, perplexity=perplexity), "bold"
        case events.Warned():
            return Message("runs.warned", said=event.text), "yellow"
        case events.Stopping():
            return Message("runs.warned", said=event.text), "bold yellow"
        case events.Saved(written_bytes=written):
            size = "" if written is None else Message("runs.of-size", size=size_words(written))
            return Message("runs.saved", folder=event.folder, size=size), ""
        case events.Pictures():
            return Message("runs.drew", files=", ".join(event.files)) if event.files else "", ""
        case events.PassedOver():
            return Message("runs.passed-over", folder=event.folder, why=event.text), "yellow"
        case events.CheckpointFailed():
            return Message("runs.no-checkpoint", at=_at_step(event.step), why=event.text), "bold red"
        case events.Resumed(from_engine=engine):
            from_step = "" if event.step is None else Message("runs.from-step", step=event.step)
            by = "" if engine is None else Message("runs.written-by", engine=engine)
            if engine is not None and event.from_world is not None:
                by = Message("runs.written-by-ranks", engine=engine, ranks=event.from_world)
            changed = Message("runs.changed-since", changes=Listing(event.changed, ";")) if event.changed else ""
            return Message("runs.resumed", step=from_step, folder=event.folder, by=by, changed=changed), "bold"
        case events.Checkpointed(written_bytes=written, blocked_s=blocked_s):
            size = "" if written is None else Message("runs.and-size", size=size_words(written))
            waited: Said = ""
            if event.background and blocked_s is not None:
                waited = Message("runs.training-waited", time=duration(blocked_s))
            at, took = _at_step(event.step), _in_time(event.seconds)
            return Message("runs.checkpoint", at=at, size=size, took=took, waited=waited), ""
        case events.AttemptBegan(plan=plan):
            if event.changed:
                plan = Message("runs.plan-changed", plan=plan, changes=Listing(event.changed))
            return Message("runs.attempt-begins", number=event.number, plan=plan), "bold"
        case events.AttemptFailed():
            return Message(
                "runs.attempt-failed",
                number=event.number,
                at=after_step(event.step),
                kept="" if event.kept_step is None else Message("runs.checkpoint-kept", step=event.kept_step),
                cause=event.text,
                action=action_words(event.action),
                wait=Message("runs.after-wait", time=duration(event.wait_s)) if event.wait_s else "",
                because=event.because,
            ), "bold yellow"
        case events.Other():
            return Message("runs.other-event", name=event.name, said=event.text), ""
    return "", ""  # what is shown as it moves, or when all has ended


def _in_time(seconds: float | None) -> Said:
    return "" if seconds is None else Message("runs.in-time", time=duration(seconds))


def _at_step(step: int | None) -> Said:
    return "" if step is None else Message("runs.at-step", step=step)


def after_step(step: int | None) -> Message:
    return Message("runs.before-first-step") if step is None else Message("runs.after-step", step=step)


def action_words(action: str) -> Said:
    """What was done about a failure; as it is, where a newer version did something else."""
    return {
        "same plan": Message("runs.same-plan"),
        "smaller plan": Message("runs.smaller-plan"),
        "wait": Message("runs.wait"),
        "make room": Message("runs.make-room"),
        "skip data": Message("runs.skip-data"),
        "precision": Message("runs.other-precision"),
        "older checkpoint": Message("runs.older-checkpoint"),
        "stop": Message("runs.stop"),
    }.get(action, action)


def step_line(step: Step, predicted_bytes: int) -> str:
    at = Message("runs.step", step=step.step)
    if step.steps is not None:
        at = Message("runs.step-of", step=step.step, of=step.steps)
    parts = [str(at), text("runs.loss", loss=loss_words(step.loss))]
    if step.tokens_per_s is not None:
        parts.append(text("runs.pace", tokens=step.tokens_per_s))
    if step.seconds_left is not None:
        parts.append(text("runs.time-left", time=duration(step.seconds_left)))
    if step.peak_bytes:
        peak, planned = size_words(step.peak_bytes), size_words(predicted_bytes)
        if step.now_bytes is None:
            parts.append(text("runs.memory-peak", peak=peak, planned=planned))
        else:
            parts.append(text("runs.memory-now", now=size_words(step.now_bytes), peak=peak, planned=planned))
    elif step.host_bytes is not None:
        parts.append(text("runs.ram", size=size_words(step.host_bytes)))
    if step.loss_scale is not None:
        parts.append(text("runs.scale", scale=step.loss_scale))
    if step.skipped:
        parts.append(text("runs.skipped"))
    return "  ".join(parts)


def duration(seconds: float) -> Message:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return Message("runs.seconds", s=f"{whole}" if seconds >= 1 else f"{max(0.0, seconds):.1f}")
    if whole < 3600:
        return Message("runs.minutes", min=whole // 60, s=whole % 60)
    if whole < 86_400 * 3:
        return Message("runs.hours", h=whole // 3600, min=whole % 3600 // 60)
    return Message("runs.days", days=whole / 86_400)


def loss_words(loss: float | None) -> str:
    return "?" if loss is None else f"{loss:.4f}"


def size_words(size_bytes: int) -> str:
    """GiB, except for what is so small that it would be nought."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB // 2 else f"{size_bytes / MIB:.1f} MiB"
