"""`tightfit doctor`: this machine, and a job for it, looked over before anything is started.

Exit codes: 0 all lights are green or yellow; 1 a light is red; 2 something that the user has to change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tightfit.cli.flags import CHANGE, Parser
from tightfit.diagnose.masks import masked
from tightfit.hardware.doctor import Checkup, examine, with_disk
from tightfit.hardware.doctor.host import measure_disk
from tightfit.hardware.doctor.row import GROUPS, LIGHTS, Row, worst
from tightfit.hardware.probes.card import CardProcess
from tightfit.inputs.spelling import read_text
from tightfit.messages import Message, change_texts, text
from tightfit.types import ConfigError, HardwareError

RED = 1


def doctor(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    output = getattr(args, "output", None)
    if output is not None and Path(output).expanduser().is_file():
        raise ConfigError(Message("cli.output-file-name", output=output))
    found = _with_job(args.job, output) if hasattr(args, "job") else examine(Path(output or ".").expanduser())
    found = _without_secrets(found)
    rows = sorted(found.rows, key=lambda row: GROUPS.index(row.group))
    if getattr(args, "json", False):
        print(json.dumps(as_json(found, rows), indent=2, default=str, ensure_ascii=False, allow_nan=False))
    else:
        from tightfit.screen import open_console
        from tightfit.screen.doctor import draw_checkup

        draw_checkup(open_console(), rows, found.seconds)
    return RED if worst(rows) == "red" else 0


def _with_job(job: str, output: str | None) -> Checkup:
    """The machine first: a tool that hangs is known by then, and planning does not wait for it again."""
    from tightfit.cli.doctor_job import read

    begun = time.monotonic()
    read_text(Path(job), text("cli.job-file"))
    seen = examine(None)
    try:
        check = read(job, output)
    except HardwareError as error:  # of this machine, which is what was asked about
        row = Row(id="plan", group="job", light="red", what=text("cli.no-plan", value=str(error).rstrip(".")))
        seen = with_disk(seen, measure_disk(Path(output or ".").expanduser()))
        return replace(seen, rows=(*seen.rows, row), seconds=time.monotonic() - begun)
    seen = with_disk(seen, measure_disk(check.folder))
    return replace(seen, rows=(*seen.rows, *check.rows(seen)), seconds=time.monotonic() - begun)


def _without_secrets(found: Checkup) -> Checkup:
    """Commands of other processes may have tokens in them, and a check-up is pasted into issues."""

    def mask_command(process: CardProcess) -> CardProcess:
        return process if process.command is None else replace(process, command=masked(process.command))

    cards = tuple(
        card if card.processes is None else replace(card, processes=tuple(map(mask_command, card.processes)))
        for card in found.cards.cards
    )
    seen = replace(found.cards, cards=cards, unplaced=tuple(map(mask_command, found.cards.unplaced)))
    return replace(
        found, cards=seen, rows=tuple(replace(row, what=change_texts(row.what, masked)) for row in found.rows)
    )


def parser() -> Parser:
    parser = Parser(
        "doctor",
        text("help.doctor-does"),
        "tightfit doctor job.yaml",
        "[JOB] [--output DIR] [--json]",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help=text("help.job"))
    parser.add_argument("--output", metavar="DIR", help=text("help.doctor-output"))
    parser.add_argument("--json", action="store_true", help=text("help.json"))
    return parser.ends_with({"0": Message("help.doctor-exit-0"), "1": Message("help.doctor-exit-1"), **CHANGE})


def as_json(found: Checkup, rows: Sequence[Row]) -> dict[str, Any]:
    """What `--json` prints: what is not known is null, never zero."""
    return {
        "verdict": worst(rows),
        "lights": {light: sum(row.light == light for row in rows) for light in LIGHTS},
        "rows": [asdict(replace(row, what=str(row.what), fix=row.fix and str(row.fix))) for row in rows],
        "cards": [asdict(card) for card in found.cards.cards],
        "processes_on_some_card": [asdict(process) for process in found.cards.unplaced],
        "driver": None if found.cards.driver is None else asdict(found.cards.driver),
        "torch": None
        if found.torch is None
        else {"version": found.torch.version, "cuda": found.torch.cuda, "hip": found.torch.hip},
        "packages": dict(found.packages),
        "seconds": round(found.seconds, 2),
    }
