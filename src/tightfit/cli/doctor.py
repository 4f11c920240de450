"""`tightfit doctor`: this machine, and a job for it, looked over before anything is started.

Exit codes: 0 all lights are green or yellow; 1 a light is red; 2 something that the user has to change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightfit.cli.flags import Parser, pick, print_json
from tightfit.diagnose.masks import masked
from tightfit.hardware.doctor import Checkup, examine, with_disk
from tightfit.hardware.doctor.host import measure_disk
from tightfit.hardware.doctor.row import GROUPS, LIGHTS, Check, worst
from tightfit.hardware.probes.card import CardProcess
from tightfit.inputs.spelling import read_text
from tightfit.messages import Message, change_texts, text
from tightfit.types import ConfigError, HardwareError

RED = 1


def doctor(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    output = getattr(args, "output", None)
    place = Path(output or ".").expanduser()
    if output is not None and place.is_file():
        raise ConfigError(Message("cli.output-file-name", output=output))
    found = _without_secrets(_examine_with_job(args.job, output) if hasattr(args, "job") else examine(place))
    rows = sorted(found.rows, key=lambda row: GROUPS.index(row.group))
    if hasattr(args, "json"):
        print_json(as_json(found, rows), allow_nan=False)
    else:
        from tightfit.screen import open_console
        from tightfit.screen.doctor import draw_checkup

        draw_checkup(open_console(), rows, found.seconds)
    return RED if worst(rows) == "red" else 0


def _examine_with_job(job: str, output: str | None) -> Checkup:
    """The machine first: a tool that hangs is known by then, and planning does not wait for it again."""
    from tightfit.start.doctor import read

    begun = time.monotonic()
    read_text(Path(job), text("cli.job-file"))
    seen = examine(None)
    try:
        check = read(job, output)
    except HardwareError as error:  # of this machine, which is what was asked about
        rows = [Check(id="plan", group="job", light="red", what=text("cli.no-plan", value=str(error).rstrip(".")))]
        seen = with_disk(seen, measure_disk(Path(output or ".").expanduser()))
    else:
        seen = with_disk(seen, measure_disk(check.folder))
        rows = check.rows(seen)
    return replace(seen, rows=(*seen.rows, *rows), seconds=time.monotonic() - begun)


def _without_secrets(found: Checkup) -> Checkup:
    """Commands of other processes may have tokens in them, and a check-up is pasted into issues."""

    def mask_commands(processes: Sequence[CardProcess]) -> tuple[CardProcess, ...]:
        return tuple(replace(each, command=each.command and masked(each.command)) for each in processes)

    cards = tuple(
        card if card.processes is None else replace(card, processes=mask_commands(card.processes))
        for card in found.cards.cards
    )
    seen = replace(found.cards, cards=cards, unplaced=mask_commands(found.cards.unplaced))
    rows = tuple(replace(row, what=change_texts(row.what, masked)) for row in found.rows)
    return replace(found, cards=seen, rows=rows)


def parser() -> Parser:
    made = Parser("doctor", "[JOB] [--output DIR] [--json]", "tightfit doctor job.yaml")
    made.takes("job:JOB? output=DIR json")
    return made.ends_with("0", "1", "2")


def as_json(found: Checkup, rows: Sequence[Check]) -> dict[str, Any]:
    """What `--json` prints: what is not known is null, never zero."""
    torch, driver = found.torch, found.cards.driver
    return {
        "verdict": worst(rows),
        "lights": {light: sum(row.light == light for row in rows) for light in LIGHTS},
        "rows": [asdict(row) for row in rows],
        "cards": [asdict(card) for card in found.cards.cards],
        "processes_on_some_card": [asdict(process) for process in found.cards.unplaced],
        "driver": driver and asdict(driver),
        "torch": torch and pick(torch, "version", "cuda", "hip"),
        "packages": dict(found.packages),
        "seconds": round(found.seconds, 2),
    }
