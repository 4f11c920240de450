"""`tightfit rehearse`: the real worker on one GPU, as one rank of many.

Planned as `tightfit plan` does, run by the worker that `tightfit train` starts, under a process group in which every
buffer is allocated and nothing is sent. What it holds is therefore true; what it would send takes no time.

Exit codes: 0 it passed; 1 memory ran out, or the cap was exceeded; 2 something that the user has to change; 3 it failed
for another reason; 130 and 143 it was interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tightfit.cli.flags import ALIASES, CHANGE, Parser, print_json, read_options
from tightfit.cli.plan import FLAGS, WHOLE, add_data_flags, add_flags
from tightfit.desk.request import read_request
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.flags import spelt
from tightfit.messages import Message, id_of, text
from tightfit.runs.events import Event, Probe
from tightfit.runs.folder import ClaimedFolder, check_folder
from tightfit.runs.launch import Meeting, Sight, rank_starts, worker_command
from tightfit.runs.records import MEMORY, RunFolder, placed
from tightfit.runs.reservations import Reservation, free_port
from tightfit.runs.run import Outcome, run
from tightfit.screen.rehearse import FigureRow, Rehearsal, Unit, Verdict
from tightfit.start.machine import reservations
from tightfit.start.rehearse import STEPS, ReadyRehearsal, RehearseOptions, prepare
from tightfit.types import ConfigError, HardwareError

EXAMPLE = "tightfit rehearse --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB --cap 24GB"
FAILED_MEMORY = 1
EXIT_CODES = {
    "0": Message("help.rehearse-exit-0"),
    "1": Message("help.rehearse-exit-1"),
    **CHANGE,
    "3": Message("help.rehearse-exit-3"),
}

OWN_FLAGS: dict[str, tuple[str | None, Message]] = {
    "cap": ("SIZE", Message("help.cap")),
    "from_plan": ("DIR", Message("help.from-plan")),
    "full_length": (None, Message("help.full-length")),
    "steps": ("N", Message("help.steps", steps=STEPS)),
    "on": ("N", Message("help.on-gpu")),
    "keep": ("DIR", Message("help.keep")),
}
WITH_PLAN = {*OWN_FLAGS, "json"}
"""What may be said beside a plan that is written already."""

WHERE = {
    "init": Message("cli.while-engine-set"),
    "forward": Message("cli.first-forward-pass"),
    "backward": Message("cli.first-backward-pass"),
    "step": Message("cli.after-first-backward"),
    "steps": Message("cli.one-steps"),
}
"""Where memory ran out → in words."""


def rehearse(argv: Sequence[str]) -> int:
    """The verb."""
    given = vars(parser().parse(argv))
    request, options = read_request(given), read_options(RehearseOptions, given)
    if options.steps < 1:
        raise ConfigError(Message("cli.steps-must-at", steps=options.steps))
    if options.from_plan is not None:
        more = sorted(set(given) - WITH_PLAN)
        if more:
            what = text("cli.job-file") if more[0] == "file" else spelt(more[0])
            raise ConfigError(Message("cli.from-plan-decided-already", from_plan=options.from_plan, what=what))
    kept = None if options.keep is None else Path(options.keep).expanduser().absolute()
    if kept is not None:
        check_folder(kept)
        if kept.exists() and any(kept.iterdir()):
            raise ConfigError(Message("cli.empty-name-new", path=kept))
    from tightfit.screen.plan import waiting

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
    place = None if kept is None else str(kept)
    failure = outcome.failure
    if failure is not None and failure.is_users:
        missing = id_of(failure.sentence) == "data.no-tokenizer"
        raise ConfigError(Message("cli.or-full-length", said=failure.sentence) if missing else failure.sentence)
    if outcome.state == "interrupted":
        print(f"tightfit: {text('cli.interrupted-rehearsal-ended')}", file=sys.stderr)
        return outcome.exit_code
    killed = any(gone.code == -signal.SIGKILL for gone in outcome.exits)
    if failure is not None and not killed and not any(words.kind in MEMORY for words in outcome.words):
        from tightfit.screen import open_errors
        from tightfit.screen.rehearse import draw_failure

        draw_failure(open_errors(), failure, place)
        return outcome.exit_code
    found = _rehearsal(ready, outcome, probe, place)
    if options.json:
        print_json(report(found), allow_nan=False)
    else:
        from tightfit.screen import open_console
        from tightfit.screen.rehearse import draw_rehearsal

        draw_rehearsal(open_console(), found)
    return 0 if found.passed else FAILED_MEMORY


# --- the command line ---------------------------------------------------------------------------


def parser() -> Parser:
    usage = "[JOB.yaml | --from-plan DIR] [--cap SIZE] [--steps N] [flags]"
    made = Parser("rehearse", text("help.rehearse-does"), EXAMPLE, usage)
    made.add_file("JOB.yaml", text("help.plan-file"))
    made.add_argument("--model", metavar="MODEL", help=text("help.model"))
    made.add_argument("--trace", action="store_true", help=text("help.trace"))
    add_data_flags(made)
    table = {title: dict(flags) for title, flags in FLAGS.items() if title != "the files"}
    del table["the question"]["max"]
    add_flags(made, {"the rehearsal": OWN_FLAGS, **table}, WHOLE | {"steps", "on"})
    made.knows_as(ALIASES)
    return made.ends_with(EXIT_CODES, text("help.rehearse-writes"))


# --- running ------------------------------------------------------------------------------------


def _play(ready: ReadyRehearsal, folder: RunFolder, steps: int, *, quiet: bool) -> tuple[Outcome, Probe | None]:
    """How the worker ended, and what the trial of the largest batch found."""
    from tightfit.formats.plan_folder import write

    files = {**ready.files, WORKER_FILE: placed(ready.files[WORKER_FILE], folder.path)}
    write(files, folder.plan, force=True)
    options = ["--rehearse", "--steps", str(steps)]
    options += [] if ready.tensor_bytes is None else ["--cap-bytes", str(ready.tensor_bytes)]
    probes: list[Probe] = []
    with _reserve(ready, folder), ExitStack() as stack:
        words = None if ready.device is None else (ready.device.word,)
        sight, command = Sight(variable=ready.variable, words=words), worker_command(folder, options)
        start = rank_starts(ready.worker, Meeting(port=free_port()), sight, folder, command)[0]
        board = None
        if not quiet:
            from tightfit.screen import open_console, say
            from tightfit.screen.train import Board

            console = open_console()
            said: Sequence[str] = ready.said
            if ready.plan is not None and ready.plan.chosen is not None:
                from tightfit.priced import strategy_name
                from tightfit.screen.plan_words import head_words

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
    ours = Reservation.ours(folder.path, ready.host_bytes, keys, None)
    with registry.alone():
        taken = next((entry for entry in registry.live() for key in keys if key in entry.gpus), None)
        if taken is not None:
            raise HardwareError(Message("cli.gpu-just-taken", words=taken.words))
        registry.add(ours)
    try:
        yield
    finally:
        registry.remove(ours)


# --- the end ------------------------------------------------------------------------------------


def _rehearsal(ready: ReadyRehearsal, outcome: Outcome, probe: Probe | None, kept: str | None) -> Rehearsal:
    from tightfit.runs.lines import MILESTONES

    worker, tally, last, failure = ready.worker, outcome.tally, outcome.tally.last, outcome.failure
    peaks = [mark.measured_bytes for mark in tally.marks if mark.milestone != "init"] + [tally.peak_bytes]
    peak = max((size for size in peaks if size is not None), default=None)
    host = None if tally.ended is None else tally.ended.summary.get("host_peak_bytes")
    step_s = tally.step_s or (last.step_s if last else None)
    pace = tally.tokens_per_s or (last.tokens_per_s if last else None)
    largest = None if probe is None else probe.seconds
    named: list[tuple[str, str, Unit, float | None, float | None]] = [
        (
            mark.milestone,
            text("screen.memory-at", what=MILESTONES.get(mark.milestone, mark.milestone)),
            "bytes",
            mark.predicted_bytes,
            mark.measured_bytes,
        )
        for mark in tally.marks
    ]
    named += [
        ("peak", text("cli.memory-peak"), "bytes", worker.peak_bytes, peak),
        ("host", text("cli.ram-rank"), "bytes", ready.host_bytes, host),
        ("largest_step_s", text("cli.step-largest-batch"), "seconds", worker.step_s, largest),
        ("step_s", text("cli.step-median"), "seconds", worker.step_s, step_s),
        ("tokens_per_s", text("cli.tokens-second"), "tokens", worker.tokens_per_s, pace),
    ]
    rows = tuple(
        FigureRow(key=key, name=name, unit=unit, predicted=predicted, measured=measured)
        for key, name, unit, predicted, measured in named
    )
    held = next((row.measured for row in rows if row.key == ("host" if ready.device is None else "peak")), None)
    verdict: Verdict = "passed"
    if failure is not None:
        verdict = "out of memory"
    elif held is not None and held > ready.cap_bytes:
        verdict = "over the cap"
    phase = None
    if failure is not None:  # the milestone that was not reached any more
        reached = {mark.milestone for mark in tally.marks}
        phase = "steps" if tally.began else next((name for name in WHERE if name not in reached), "steps")
    return Rehearsal(
        model=worker.model,
        engine=worker.engine,
        ranks=worker.ranks,
        device=text("cli.the-cpu") if ready.device is None else ready.device.name,
        cap_bytes=ready.cap_bytes,
        tensor_bytes=ready.tensor_bytes,
        verdict=verdict,
        phase=phase,
        where=None if phase is None else WHERE[phase],
        error=None if failure is None else str(failure.sentence),
        steps=0 if last is None else last.step,
        rows=rows,
        notes=ready.notes,
        folder=kept,
    )


def report(found: Rehearsal) -> dict[str, Any]:
    """The contract with programs. The keys here are promised, further ones may come."""
    names = ("passed", "verdict", "phase", "error", "model", "engine", "ranks", "device", "cap_bytes", "tensor_bytes")
    return {
        **{name: getattr(found, name) for name in names},
        "steps": found.steps,
        "figures": {row.key: {"predicted": row.predicted, "measured": row.measured} for row in found.rows},
        "notes": list(found.notes),
        "folder": found.folder,
    }
