"""`tightfit rehearse`: the real worker on one GPU, as one rank of many.

Planned as `tightfit plan` does, run by the worker that `tightfit train` starts, under a process group in which every
buffer is allocated and nothing is sent. What it holds is therefore true; what it would send takes no time.

Exit codes: 0 it passed; 1 memory ran out, or the cap was exceeded; 2 something that the user has to change; 3 it failed
for another reason; 130 and 143 it was interrupted.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console

from tightfit.cli.flags import Parser, pick, print_json, read_options
from tightfit.cli.plan import FLAGS, add_flags, job_parser
from tightfit.desk.report import pace_report
from tightfit.desk.request import read_request
from tightfit.formats.plan_folder import write
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.flags import spelt
from tightfit.messages import Message, bare, id_of, text
from tightfit.priced import strategy_name
from tightfit.runs.events import Event, Probe
from tightfit.runs.folder import ClaimedFolder, check_folder
from tightfit.runs.launch import Meeting, Sight, rank_starts, worker_command
from tightfit.runs.lines import MILESTONES, size_words
from tightfit.runs.records import MEMORY, RunFolder, placed
from tightfit.runs.reservations import Reservation, free_port
from tightfit.runs.run import Outcome, run
from tightfit.screen import Comparison, draw_comparisons, draw_list, open_console, open_errors, say
from tightfit.screen.plan import head_words, waiting
from tightfit.screen.train import Board, draw_last_lines
from tightfit.start.machine import reservations
from tightfit.start.rehearse import STEPS, ReadyRehearsal, RehearseOptions, prepare
from tightfit.types import ConfigError, HardwareError, Pace

FAILED_MEMORY = 1
OWN_FLAGS = "cap=SIZE from_plan=DIR full_length steps=N on=N keep=DIR"
WHERE = {
    "init": Message("cli.while-engine-set"),
    "forward": Message("cli.first-forward-pass"),
    "backward": Message("cli.first-backward-pass"),
    "step": Message("cli.after-first-backward"),
    "steps": Message("cli.one-steps"),
}
"""Where memory ran out → in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """How a rehearsal went."""

    verdict: Literal["passed", "out of memory", "over the cap"]
    phase: str | None  # where memory ran out
    error: str | None  # what the worker said
    model: str
    engine: str
    ranks: int
    rank: int  # the one that was rehearsed
    device: str  # what it ran on
    cap_bytes: int
    tensor_bytes: int | None  # what of the cap is left for tensors; None: there is no GPU
    steps: int
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...]
    folder: str | None  # where it was kept; None: it was not
    pace: Pace | None = None  # of the plan, with all of its ranks; None: it was written before, or none is claimed

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def rehearse(argv: Sequence[str]) -> int:
    given = vars(parser().parse(argv))
    request, options = read_request(given), read_options(RehearseOptions, given)
    if options.steps < 1:
        raise ConfigError(Message("cli.steps-must-at", steps=options.steps))
    more = sorted(set(given) - {field.name for field in fields(RehearseOptions)})
    if options.from_plan is not None and more:
        what = text("cli.job-file") if more[0] == "file" else spelt(more[0])
        raise ConfigError(Message("cli.from-plan-decided-already", from_plan=options.from_plan, what=what))
    kept = None if options.keep is None else Path(options.keep).expanduser().absolute()
    if kept is not None:
        check_folder(kept)
        if kept.exists() and any(kept.iterdir()):
            raise ConfigError(Message("cli.empty-name-new", path=kept))
    with waiting(text("cli.planning"), quiet=options.json):
        ready = prepare(request, options)
    with ExitStack() as stack:
        if kept is None:
            folder = RunFolder(Path(stack.enter_context(TemporaryDirectory(prefix="tightfit-rehearse-"))))
        else:
            claimed = ClaimedFolder.claim(kept, overwrite=False)
            stack.callback(claimed.release)
            folder = claimed.folder
        outcome, probe = _play(ready, folder, options.steps, quiet=options.json)
    failure = outcome.failure
    if failure is not None and failure.is_users:
        missing = id_of(failure.sentence) == "data.no-tokenizer"
        raise ConfigError(Message("cli.or-full-length", said=failure.sentence) if missing else failure.sentence)
    if outcome.state == "interrupted":
        print(f"tightfit: {text('cli.interrupted-rehearsal-ended')}", file=sys.stderr)
        return outcome.exit_code
    killed = any(gone.code == -signal.SIGKILL for gone in outcome.exits)
    if failure is not None and not killed and not any(words.kind in MEMORY for words in outcome.words):
        failed = text("screen.rehearsal-failed", why=bare(failure.sentence))
        log = failure.log if kept is not None else Message("screen.its-log")
        draw_last_lines(open_errors(), failed, failure.tail, log)
        return outcome.exit_code
    found = _rehearsal(ready, outcome, probe, None if kept is None else str(kept))
    if options.json:
        print_json(report(found), allow_nan=False)
    else:
        draw_rehearsal(open_console(), found)
    return 0 if found.passed else FAILED_MEMORY


def parser() -> Parser:
    usage = "[JOB.yaml | --from-plan DIR] [--cap SIZE] [--steps N] [flags]"
    example = "tightfit rehearse --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB --cap 24GB"
    made = job_parser("rehearse", usage, example, "JOB.yaml", steps=STEPS)
    question = re.sub(r"max=\S+ ", "", FLAGS["the question"])
    add_flags(made, {"the rehearsal": OWN_FLAGS, **FLAGS, "the question": question})
    return made.ends_with("0", "1", "2", "3")


def _play(ready: ReadyRehearsal, folder: RunFolder, steps: int, *, quiet: bool) -> tuple[Outcome, Probe | None]:
    """How the worker ended, and what the trial of the largest batch found."""
    write({**ready.files, WORKER_FILE: placed(ready.files[WORKER_FILE], folder.path)}, folder.plan, force=True)
    options = ["--rehearse", "--steps", str(steps)]
    options += [] if ready.tensor_bytes is None else ["--cap-bytes", str(ready.tensor_bytes)]
    probes: list[Probe] = []
    with _reserve(ready, folder), ExitStack() as stack:
        words = None if ready.device is None else (ready.device.word,)
        sight, command = Sight(variable=ready.variable, words=words), worker_command(folder, options)
        start = rank_starts(ready.worker, Meeting(port=free_port()), sight, folder, command)[0]
        board = None
        if not quiet:
            console, said = open_console(), ready.said
            if ready.plan is not None and ready.plan.chosen is not None:
                way = ready.plan.chosen
                head = str(head_words(ready.plan, way.hardware, way.levers.sequence))
                said = head, text("cli.one-rank", levers=strategy_name(way.levers), world=way.world)
            for sentence in said:
                say(console, sentence)
            console.print()
            board = stack.enter_context(Board(console, ready.worker))

        def show(event: Event) -> None:
            if isinstance(event, Probe):
                probes.append(event)
            if board is not None:
                board.show(event)

        outcome = run([start], folder, show)
    return outcome, probes[-1] if probes else None


@contextmanager
def _reserve(ready: ReadyRehearsal, folder: RunFolder) -> Iterator[None]:
    """What the rehearsal takes of this machine, written down for trainings that start meanwhile."""
    registry, keys = reservations(), () if ready.device is None else (ready.device.key,)
    ours = Reservation.ours(folder.path, ready.ram_bytes, keys, None)
    with registry.alone():
        taken = next((entry for entry in registry.live() for key in keys if key in entry.gpus), None)
        if taken is not None:
            raise HardwareError(Message("cli.gpu-just-taken", words=taken.words))
        registry.add(ours)
    try:
        yield
    finally:
        registry.remove(ours)


def _rehearsal(ready: ReadyRehearsal, outcome: Outcome, probe: Probe | None, kept: str | None) -> Rehearsal:
    worker, tally, last, failure = ready.worker, outcome.tally, outcome.tally.last, outcome.failure
    way = None if ready.plan is None else ready.plan.chosen
    peaks = [mark.measured_bytes for mark in tally.marks if mark.milestone != "init"] + [tally.peak_bytes]
    peak = max((size for size in peaks if size is not None), default=None)
    host = None if tally.ended is None else tally.ended.summary.get("host_peak_bytes")
    step_s = tally.step_s or (last.step_s if last else None)
    pace = tally.tokens_per_s or (last.tokens_per_s if last else None)
    rows = []
    for mark in tally.marks:
        name = text("screen.memory-at", what=MILESTONES.get(mark.milestone, mark.milestone))
        rows.append(Comparison(mark.milestone, name, "bytes", mark.predicted_bytes, mark.measured_bytes))
    largest = None if probe is None else probe.seconds
    rows += [
        Comparison("peak", text("cli.memory-peak"), "bytes", worker.peak_bytes, peak),
        Comparison("host", text("cli.ram-rank"), "bytes", worker.ram_bytes_per_rank, host),
        Comparison("largest_step_s", text("cli.step-largest-batch"), "seconds", worker.step_s, largest),
        Comparison("step_s", text("cli.step-median"), "seconds", worker.step_s, step_s),
        Comparison("tokens_per_s", text("cli.tokens-second"), "tokens", worker.tokens_per_s, pace),
    ]
    held, phase = host if ready.device is None else peak, None
    if failure is not None:  # the milestone that was not reached any more
        reached = {mark.milestone for mark in tally.marks}
        phase = "steps" if tally.began else next((name for name in WHERE if name not in reached), "steps")
    over = held is not None and held > ready.cap_bytes
    return Rehearsal(
        verdict="out of memory" if failure is not None else "over the cap" if over else "passed",
        phase=phase,
        error=None if failure is None else str(failure.sentence),
        model=worker.model,
        engine=worker.engine,
        ranks=worker.ranks,
        rank=worker.rehearsed_rank,
        device=text("cli.the-cpu") if ready.device is None else ready.device.name,
        cap_bytes=ready.cap_bytes,
        tensor_bytes=ready.tensor_bytes,
        steps=0 if last is None else last.step,
        rows=tuple(rows),
        notes=ready.notes,
        folder=kept,
        pace=way.pace if way is not None and way.is_paced else None,
    )


def report(found: Rehearsal) -> dict[str, Any]:
    """The contract with programs. The keys here are promised, further ones may come."""
    figures = {row.key: pick(row, "predicted", "measured") for row in found.rows}
    told = pick(found, "passed", "verdict", "phase", "error", "model", "engine", "ranks", "rank", "device")
    sizes = pick(found, "cap_bytes", "tensor_bytes", "steps")
    pace = None if found.pace is None else pace_report(found.pace)
    return {**told, **sizes, "figures": figures, "pace": pace, **pick(found, "notes", "folder")}


def draw_rehearsal(console: Console, found: Rehearsal) -> None:
    """Predicted beside measured, the verdict, and what has to be known about the figures."""
    console.print()
    draw_comparisons(console, found.rows, "screen.difference", lambda old, new: f"{100 * (new / old - 1):+.1f} %")
    console.print()
    say(console, verdict_words(found), style="bold green" if found.passed else "bold red")
    if found.error is not None:
        say(console, found.error, style="dim")
    draw_list(console, text("screen.about-figures"), found.notes)
    if found.folder is not None:
        console.print()
        say(console, text("screen.kept", folder=found.folder), indent="  ", first="")


def verdict_words(found: Rehearsal) -> str:
    one = {"rank": found.rank, "ranks": found.ranks}
    who = Message("screen.only-rank") if found.ranks == 1 else Message("screen.one-rank", **one)
    card = size_words(found.cap_bytes)
    if found.verdict == "out of memory":
        return text("screen.ran-out", who=who, where="" if found.phase is None else WHERE[found.phase], card=card)
    peak = next((row.measured for row in found.rows if row.key == ("peak" if found.tensor_bytes else "host")), None)
    held = "" if peak is None else Message("screen.its-peak", size=size_words(int(peak)))
    if found.verdict == "over the cap":
        return text("screen.over-cap", who=who, card=card, held=held)
    room: Message | str = ""
    if found.tensor_bytes is not None and peak is not None:
        room = Message("screen.left-for-tensors", size=size_words(found.tensor_bytes))
    return text("screen.passed", who=who, steps=found.steps, card=card, held=held, room=room)
