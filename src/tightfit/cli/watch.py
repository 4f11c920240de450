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
from pathlib import Path
from typing import Any, TextIO

from tightfit.cli.flags import CHANGE, Parser, print_json
from tightfit.inputs.spelling import seconds_in
from tightfit.inputs.surroundings import cache_folder
from tightfit.messages import Message, id_of, text
from tightfit.runs.lines import Lines
from tightfit.runs.machine_eye import MachineEye
from tightfit.runs.reservations import Reservations
from tightfit.runs.watching import Look, RunEye, Watcher, check_run
from tightfit.types import ConfigError

EXAMPLE = "tightfit watch runs/first --log watched.jsonl"
EXIT_CODES = {"0": Message("help.watch-exit-0"), "1": Message("help.watch-exit-1"), **CHANGE}
UNWELL = 1
LEAST_S, MOST_S = 0.1, 3600.0
ONCE_S = 0.2
"""How busy the CPU is shows only over some time."""
LIGHT_S = 60.0
"""In a pipe, a light that changes is worth a line so often, and one that turns red always."""
MACHINE_EVERY_S = 60.0
"""In a pipe, a machine without a run is worth a line so often."""


def watch(argv: Sequence[str]) -> int:
    """The verb."""
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
        log = stack.enter_context(_Log(Path(args.log))) if hasattr(args, "log") else None
        eye = MachineEye(interval)
        watcher = Watcher(eye, run, Reservations(cache_folder() / "reservations"))
        if hasattr(args, "once"):
            time.sleep(ONCE_S)
            look = watcher.look()
            if log is not None:
                log.add(look)
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
        stack.enter_context(eye)
        with suppress(KeyboardInterrupt):
            return _follow(watcher, interval, log)
    return 0


def parser() -> Parser:
    usage = "[RUN] [--interval S] [--log FILE] [--once [--json]]"
    made = Parser("watch", text("help.watch-does"), EXAMPLE, usage)
    made.add_argument("run", metavar="RUN", nargs="?", help=text("help.watch-run"))
    made.add_argument("--interval", metavar="S", help=text("help.interval"))
    made.add_argument("--log", metavar="FILE", help=text("help.log"))
    made.add_argument("--once", action="store_true", help=text("help.once"))
    made.add_argument("--json", action="store_true", help=text("help.watch-json"))
    return made.ends_with(EXIT_CODES, text("help.watch-writes"))


# --- once, and again and again ------------------------------------------------------------------


def _follow(watcher: Watcher, interval: float, log: _Log | None) -> int:
    """Until the run has ended, or for ever."""
    from tightfit.screen import open_console

    console = open_console()
    with _Screen(console) if console.is_terminal else _Plain(watcher) as shown:
        while True:
            began = time.monotonic()
            look = watcher.look()
            if log is not None:
                log.add(look)
            shown.show(look)
            if look.run is not None and look.run.ended is not None:
                break
            time.sleep(max(0.0, interval - (time.monotonic() - began)))
    run = look.run
    words = text("cli.run-ended", folder=run.folder, ended=run.ended)
    if not run.well:
        words = text("cli.tightfit-diagnose-says", words=words, folder=run.folder)
    print(f"tightfit: {words}", flush=True)
    return 0 if run.well else UNWELL


class _Screen:
    """The picture, in place. What was last seen stays on the screen."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> _Screen:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a terminal that was closed
            self._live.stop()

    def show(self, look: Look) -> None:
        from rich.text import Text

        from tightfit.screen.watch import picture

        console = self._console
        lines = picture(look, console.width, console.height - 1, plain_letters=console.options.ascii_only)
        self._live.update(Text("\n").join(lines), refresh=True)


class _Plain:
    """Lines that stay."""

    def __init__(self, watcher: Watcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._watcher, self._clock = watcher, clock
        self._lines: Lines | None = None
        self._said: dict[str, tuple[str, float]] = {}
        """Each light's colour, and when it was said."""
        self._warned: frozenset[str] = frozenset()
        self._at = -math.inf

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._lines is not None and (kind is None or not issubclass(kind, OSError)):
            self._lines.end()

    def show(self, look: Look) -> None:
        from tightfit.screen.watch import light_words, one_line

        now, run = self._clock(), look.run
        if self._lines is None:
            predicted = 0 if run is None or run.worker is None else run.worker.peak_bytes
            self._lines = Lines(_say, predicted, self._clock)
            if run is not None:
                where = text("cli.at-step", step=run.step.step) if run.step else text("cli.before-its-first-step")
                _say(text("cli.watching-run", folder=run.folder, at=where))
        elif self._watcher.run is not None:
            for event in self._watcher.run.fresh:
                self._lines.show(event)
        if run is None and now - self._at >= MACHINE_EVERY_S:
            self._at = now
            _say(one_line(look))
        for light in look.health.lights:
            colour, at = self._said.get(light.name, ("unknown", -math.inf))
            if light.colour not in ("unknown", colour) and (light.colour == "red" or now - at >= LIGHT_S):
                self._said[light.name] = light.colour, now
                _say(light_words(light))
        # A warning is said once as long as it holds: its figures change all the time.
        kinds = {id_of(warning) or str(warning): warning for warning in look.health.warnings}
        for kind in kinds.keys() - self._warned:
            _say(f"! {kinds[kind]}")
        self._warned = frozenset(kinds)


def _say(line: str, style: str = "") -> None:
    from tightfit.screen.watch import stamp

    del style  # where every line stays there are no colours
    print(f"{stamp()}  {line}", flush=True)


# --- for programs -------------------------------------------------------------------------------


class _Log:
    """A JSON object a line. A disk that takes no more is said once, and the watching goes on."""

    def __init__(self, path: Path) -> None:
        self._path, self._silent = path, False
        try:
            self._file: TextIO = path.expanduser().open("a", encoding="utf-8")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(Message("cli.cannot-written-name", path=path, why=why)) from None

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._file.close()

    def add(self, look: Look) -> None:
        try:
            self._file.write(json.dumps(report(look), ensure_ascii=False, allow_nan=False, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._silent:
                why = (error.strerror or str(error)).lower()
                print(f"tightfit: {text('cli.lacks-lines-here', path=self._path, why=why)}", file=sys.stderr)
            self._silent = True


def report(look: Look) -> dict[str, Any]:
    """The contract with programs: the keys here are promised, further ones may come. What nobody knows is null."""
    return {
        "at": round(look.at, 3),
        "cards": [
            {
                **{key: value for key, value in asdict(each.card).items() if key not in ("arch", "memory_percent")},
                "peak_bytes": each.peak_bytes,
                "planned_bytes": each.planned_bytes,
            }
            for each in look.cards
        ],
        "cards_age_s": round(look.cards_age_s, 3),
        "host": asdict(look.host),
        "run": None if look.run is None else _run_report(look.run),
        "runs": [{"folder": entry.folder, "pid": entry.pid} for entry in look.others],
        "lights": {light.name: {"colour": light.colour, "text": str(light.text)} for light in look.health.lights},
        "warnings": [str(warning) for warning in look.health.warnings],
        "problems": list(map(str, look.problems)),
    }


def _run_report(run: RunEye) -> dict[str, Any]:
    step, worker = run.step, run.worker
    return {
        "folder": str(run.folder),
        "state": None if run.record is None else run.record.state,
        "ended": None if run.ended is None else str(run.ended),
        "well": run.well,
        "model": None if worker is None else worker.model,
        "engine": None if worker is None else worker.engine,
        "attempt": run.attempts[-1].number if run.attempts else None,
        "step": None if step is None else step.step,
        "steps": None if step is None else step.steps,
        "loss": None if step is None or step.loss is None or not math.isfinite(step.loss) else step.loss,
        "tokens_per_s": None if step is None else step.tokens_per_s,
        "seconds_left": None if step is None else step.seconds_left,
        "loss_scale": None if step is None else step.loss_scale,
        "peak_bytes": run.peak_bytes,
        "planned_peak_bytes": None if worker is None else worker.peak_bytes,
        "ranks": [asdict(rank) for rank in run.ranks],
        "oom": run.oom,
    }
