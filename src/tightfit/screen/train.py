"""What `tightfit train` shows: the plan in short, a line that moves while it runs, and at the end what came of it.

On a terminal the line is drawn anew in place. In a pipe or a log every line stays, so there is one for each thing that
happens once, and for what goes on at most one in ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tightfit.diagnose.verdict import Verdict
from tightfit.hardware.machine import Occupancy
from tightfit.hardware.probes.card import CardProcess
from tightfit.messages import Listing, Message, Said, bare, text
from tightfit.planner.plan import Plan
from tightfit.runs.events import Event, Progress, Step, Tally
from tightfit.runs.lines import MIB, MILESTONES, Lines, line_of, loss_words, moving_line, size_words
from tightfit.runs.records import AttemptRecord, WorkerFile
from tightfit.runs.reservations import Reservation
from tightfit.runs.run import Failure, traceback_in
from tightfit.screen import Comparison, draw_comparisons, draw_list, say
from tightfit.screen.plan import draw_chosen, head_words, lever_flags, reason_lines

MOST_FIXES = 4  # remedies that are named at the end; `tightfit diagnose` knows them all


def draw_start(console: Console, plan: Plan, folder: str) -> None:
    """What is about to run, and why so. All other ways that were priced are in PLAN.md."""
    way = plan.chosen
    assert way is not None, "what does not fit is an error before anything is drawn"
    say(console, head_words(plan, way.hardware, way.levers.sequence), style="bold")
    draw_chosen(console, plan, way, [flag for flag in lever_flags(plan, way) if not flag.startswith("--world ")])
    draw_list(console, text("screen.because"), reason_lines(plan))
    draw_list(console, text("screen.never-run"), plan.unproven)
    console.print()
    say(console, text("screen.run-folder", folder=folder), indent="  ", first="")


def draw_occupancy(
    console: Console, found: Occupancy, live: Sequence[Reservation], ram_bytes: int | None, free_ram_bytes: int | None
) -> None:
    """What is free, and who holds the rest."""

    def draw_holders(holders: Sequence[CardProcess]) -> None:
        for holder in holders:
            held = "?" if holder.held_bytes is None else f"{holder.held_bytes / MIB:,.0f}"
            who = process_words(holder.pid, holder.user, holder.command)
            say(console, f"{held:>8} MiB  {who}", first="  ", indent=" " * 16)

    for device in found.devices:
        free = _free(device.free_bytes, device.total_bytes)
        say(console, text("screen.about", name=f"GPU {device.number}, {device.name}", what=free))
        draw_holders(device.holders)
        for entry in live:
            if device.key in entry.gpus:
                say(console, text("screen.taken-by", who=entry.words), first="  ", indent="    ")
    if found.unplaced:
        say(console, text("screen.on-some-gpu"))
        draw_holders(found.unplaced)
    if not found.devices:
        say(console, text("screen.no-gpu"))
    say(console, text("screen.free-ram", what=_free(free_ram_bytes, ram_bytes)))
    for entry in live:
        said = text("screen.reserved-by", size=size_words(entry.host_bytes), who=entry.words)
        say(console, said, first="  ", indent="    ")


def process_words(pid: int, user: str | None, command: str | None) -> str:
    """A process with its owner and its command, as far as they are known."""
    who = user or text("screen.unknown-user")
    return text("screen.process", pid=pid, user=who, command=command or text("screen.unknown-command"))


def _free(free_bytes: int | None, total_bytes: int | None) -> Message:
    total = Message("screen.unknown-size") if total_bytes is None else f"{total_bytes / MIB:,.0f} MiB"
    free = Message("screen.unknown-part") if free_bytes is None else f"{free_bytes / MIB:,.0f} MiB"
    return Message("screen.part-free", free=free, total=total)


class Board:
    """Shows events as they come. Leaving the `with` block leaves the last state on the screen."""

    def __init__(self, console: Console, worker: WorkerFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._worker = console, worker
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last: str | None = None
        self._lines = Lines(self._say, worker.peak_bytes, clock, worker.logging_steps)

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with suppress(OSError):  # a terminal that was closed; how the run ended still has to be written down
            if self._live is not None:
                self._live.stop()
            if kind is not None and issubclass(kind, BrokenPipeError):
                return
            self._lines.end()
            if self._last is not None:
                self._say(self._last)
                self._last = None

    def expect(self, worker: WorkerFile) -> None:
        """The plan that what comes is set against: another attempt may have another one."""
        self._worker = worker
        self._lines.expect(worker.peak_bytes)

    def show(self, event: Event) -> None:
        if self._live is None:
            self._lines.show(event)
        elif isinstance(event, Progress | Step):
            self._last = moving_line(event, self._worker.peak_bytes)[1]
            every = self._worker.logging_steps
            if isinstance(event, Step) and every is not None and event.step % every == 0:
                self._say(self._last)
            self._live.update(Text(self._last, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            said, style = line_of(event)
            if said:
                self._say(str(said), style)

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)


def draw_summary(console: Console, worker: WorkerFile, tally: Tally, folder: str, *, attempts: int = 1) -> None:
    """Predicted against measured, and what to do with what came out."""
    console.print()
    last = tally.last
    if last is not None:
        first = "" if tally.first_loss is None or last.step <= 1 else f"{loss_words(tally.first_loss)} → "
        since: Message | str = ""
        if tally.resumed is not None and tally.resumed.step:
            since = Message("screen.since-attempt" if attempts > 1 else "screen.since-start", step=tally.resumed.step)
        loss = f"{first}{loss_words(last.loss)}"
        said = text("screen.trained", model=worker.model, steps=last.step, since=since, loss=loss)
        say(console, said, style="bold green")
        if attempts > 1:
            say(console, text("screen.took-attempts", n=attempts, folder=folder))
        console.print()
    rows = []
    for mark in tally.marks:
        key, name = mark.milestone, MILESTONES.get(mark.milestone, mark.milestone)
        if mark.measured_bytes is not None:
            at = text("screen.memory-at", what=name)
            rows.append(Comparison(key, at, "bytes", mark.predicted_bytes, mark.measured_bytes))
        elif mark.host_bytes is not None:  # of the whole process: no plan is comparable with it
            rows.append(Comparison(key, text("screen.ram-at", what=name), "bytes", None, mark.host_bytes))
    if tally.peak_bytes is not None:
        rows.append(Comparison("peak", text("screen.memory-peak"), "bytes", worker.peak_bytes, tally.peak_bytes))
    rows.append(Comparison("step_s", text("screen.a-step"), "seconds", worker.step_s, tally.step_s))
    pace, tokens = text("screen.tokens-per-second"), worker.tokens_per_s
    rows.append(Comparison("tokens_per_s", pace, "tokens", tokens, tally.tokens_per_s))
    draw_comparisons(console, rows, "", lambda old, new: f"{100 * new / old:.0f} %")
    if worker.step_s is None:
        say(console, text("screen.no-cpu-rates"), style="dim")
    model = f"{folder}/model"
    if worker.method == "full":
        came_out = [text("screen.model-is-in", model=model, quoted=repr(model))]
    else:
        came_out = [text("screen.adapters-are-in", model=model), text("screen.as-one-model", folder=folder)]
    if tally.pictures:
        came_out.append(text("screen.pictures", names=", ".join(tally.pictures)))
    draw_list(console, text("screen.what-came-out"), came_out)


def draw_last_lines(console: Console, said: str, tail: Sequence[str], log: object) -> None:
    """What failed, and what its log ends with."""
    console.print(Text(f"tightfit: {said}", style="bold"), soft_wrap=True)
    if tail:
        console.print(Text(text("screen.last-lines", log=log)), soft_wrap=True)
    for line in tail:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def draw_failure(console: Console, failure: Failure, records: Sequence[AttemptRecord], verdict: Verdict | None) -> None:
    """What failed first and what that rank printed last, of a bug the whole traceback; why, what was tried, and what
    would help."""
    tail = failure.tail
    if verdict is not None and verdict.kind == "code" and failure.log is not None:
        tail = traceback_in(failure.log) or tail
    draw_last_lines(console, text("screen.training-failed", why=bare(failure.sentence)), tail, failure.log)
    if verdict is None:
        return
    last, same = records[-1].next, bare(verdict.cause).lower() == bare(failure.sentence).lower()
    draw_list(console, text("screen.why"), [] if same else [verdict.cause])
    tried = []
    for record in records if len(records) > 1 else ():
        (at, cause), following = failure_words(record), record.next
        action = "" if following is None or following.action == "stop" else f" → {following.action}"
        changed: Message | str = ""
        if following is not None and following.changed:
            changed = Message("screen.in-brackets", said=Listing(following.changed))
        said = {"number": record.number, "plan": record.plan, "at": at, "cause": cause}
        tried.append(text("screen.attempt-failed", **said, following=action, changed=changed))
    draw_list(console, text("screen.what-was-tried"), tried)
    stopped = [] if last is None else [text("screen.nothing-more-tried", because=bare(last.because))]
    helps = [fix.text if fix.command is None else f"{fix.text} {fix.command}" for fix in verdict.fixes[:MOST_FIXES]]
    draw_list(console, text("screen.what-would-help"), [*stopped, *helps])


def failure_words(record: AttemptRecord) -> tuple[Message, Said]:
    """At which step an attempt failed, and why."""
    step, cause = record.last_step, record.cause
    at = Message("screen.before-first-step") if step is None else Message("screen.after-step", step=step)
    return at, "" if cause is None else Message("screen.colon", said=bare(cause.sentence))
