"""`tightfit watch`: the machine, or a run, live in the terminal.

On a terminal the picture is drawn anew in place. In a pipe or a log every line stays, so there is one where something
happens, and for what goes on at most one in ten seconds. Exit codes: 0 also after Ctrl-C; 1 the run that was followed
has not ended well; 2 something that the user has to change.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.cli.flags import Parser, pick, print_json
from tightfit.inputs.spelling import seconds_in
from tightfit.inputs.surroundings import cache_folder
from tightfit.messages import Message, say_why, text
from tightfit.runs.machine_eye import MachineEye
from tightfit.runs.reservations import Reservations
from tightfit.runs.watching import Look, RunEye, Watcher, check_run
from tightfit.types import ConfigError

UNWELL = 1
LEAST_S, MOST_S = 0.1, 3600.0
ONCE_S = 0.2  # how busy the CPU is shows only over some time


def watch(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    word = getattr(args, "interval", "1")
    interval = float(word) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", word) else None
    if interval is None and (thousandths := re.fullmatch(r"(\d{1,9})ms", word)):
        interval = int(thousandths[1]) / 1000
    if interval is None:
        interval = seconds_in(word)
    if interval is None:
        raise ConfigError(Message("cli.interval-takes-seconds", text=repr(word)))
    if not LEAST_S <= interval <= MOST_S:
        raise ConfigError(Message("cli.interval-must-seconds", least_s=LEAST_S, most_s=MOST_S, text=word))
    if hasattr(args, "json") and not hasattr(args, "once"):
        raise ConfigError(Message("cli.json-needs-once"))
    run = check_run(Path(args.run)) if hasattr(args, "run") else None
    with ExitStack() as stack:
        add = _open_log(Path(args.log), stack) if hasattr(args, "log") else lambda look: None
        eye = MachineEye(interval)
        watcher = Watcher(eye, run, Reservations(cache_folder() / "reservations"))
        if not hasattr(args, "once"):
            stack.enter_context(eye)
            with suppress(KeyboardInterrupt):
                return _follow(watcher, interval, add)
            return 0
        time.sleep(ONCE_S)
        look = watcher.look()
        add(look)
    if hasattr(args, "json"):
        print_json(report(look), allow_nan=False)
        return 0
    from tightfit.screen import open_console
    from tightfit.screen.watch import picture

    console = open_console()
    for line in picture(look, console.width, plain_letters=console.options.ascii_only):
        line.rstrip()
        console.print(line, soft_wrap=True)
    return 0


def parser() -> Parser:
    usage = "[RUN] [--interval S] [--log FILE] [--once [--json]]"
    made = Parser("watch", usage, "tightfit watch runs/first --log watched.jsonl")
    made.takes("run:RUN? interval=S log=FILE once json")
    return made.ends_with("0", "1", "2")


def _follow(watcher: Watcher, interval: float, add: Callable[[Look], None]) -> int:
    """Until the run has ended, or for ever."""
    from tightfit.screen import open_console
    from tightfit.screen.watch import show_in_place, show_lines

    console = open_console()
    with show_in_place(console) if console.is_terminal else show_lines(watcher, partial(print, flush=True)) as show:
        while True:
            began = time.monotonic()
            look = watcher.look()
            add(look)
            show(look)
            if look.run is not None and look.run.ended is not None:
                break
            time.sleep(max(0.0, interval - (time.monotonic() - began)))
    run = look.run
    words = text("cli.run-ended", folder=run.folder, ended=run.ended)
    if not run.well:
        words = text("cli.tightfit-diagnose-says", words=words, folder=run.folder)
    print(f"tightfit: {words}", flush=True)
    return 0 if run.well else UNWELL


def _open_log(path: Path, stack: ExitStack) -> Callable[[Look], None]:
    """What adds a look, as a JSON object a line. A disk that takes no more is said once, and the watching goes on."""
    try:
        file = path.expanduser().open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(Message("cli.cannot-written-name", path=path, why=say_why(error))) from None
    failed = False

    @stack.callback
    def close() -> None:
        with suppress(OSError):
            file.close()

    def add(look: Look) -> None:
        nonlocal failed
        try:
            file.write(json.dumps(report(look), ensure_ascii=False, allow_nan=False, default=str) + "\n")
            file.flush()
        except OSError as error:
            if not failed:
                print(f"tightfit: {text('cli.lacks-lines-here', path=path, why=say_why(error))}", file=sys.stderr)
            failed = True

    return add


def report(look: Look) -> dict[str, Any]:
    """The contract with programs: the keys here are promised, further ones may come. What nobody knows is null."""
    cards, left_out = [], ("arch", "memory_percent")
    for each in look.cards:
        card = {key: value for key, value in asdict(each.card).items() if key not in left_out}
        cards.append({**card, **pick(each, "peak_bytes", "planned_bytes")})
    return {
        "at": round(look.at, 3),
        "cards": cards,
        "cards_age_s": round(look.cards_age_s, 3),
        "host": asdict(look.host),
        "run": look.run and _run_report(look.run),
        "runs": [pick(entry, "folder", "pid") for entry in look.others],
        "lights": {light.name: pick(light, "colour", "text") for light in look.health.lights},
        "warnings": look.health.warnings,
        "problems": look.problems,
    }


def _run_report(run: RunEye) -> dict[str, Any]:
    step, worker = run.step, run.worker
    names = ("step", "steps", "loss", "tokens_per_s", "seconds_left", "loss_scale")
    steps = pick(step, *names) if step else dict.fromkeys(names)
    if steps["loss"] is not None and not math.isfinite(steps["loss"]):
        steps["loss"] = None
    return {
        "folder": run.folder,
        "state": run.record and run.record.state,
        **pick(run, "ended", "well"),
        "model": worker and worker.model,
        "engine": worker and worker.engine,
        "attempt": run.attempts[-1].number if run.attempts else None,
        **steps,
        "peak_bytes": run.peak_bytes,
        "planned_peak_bytes": worker and worker.peak_bytes,
        "ranks": [asdict(rank) for rank in run.ranks],
        "oom": run.oom,
    }
