"""`tightfit measure`: what this machine reaches, found by trying.

Exit codes: 0 it was measured, as far as it could be; 2 something that the user has to change; 3 nothing could be
measured; 130 interrupted, and what was found until then is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tightfit.cli.flags import Parser, print_json
from tightfit.cli.progress import ProgressLine
from tightfit.hardware.machine import this_machine
from tightfit.hardware.measured import PARTS, place_of, write_measured
from tightfit.inputs.surroundings import inherited
from tightfit.messages import Listing, Message, say_why, text
from tightfit.start.measure import assumed_rates, find_node, measure_machine
from tightfit.types import ConfigError

WRONG, NOTHING, INTERRUPTED = 2, 3, 130


def measure(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    out = Path(args.out).expanduser() if hasattr(args, "out") else None
    # a device is no file either: what is written would take its place
    if out is not None and ((out.exists() and not out.is_file()) or not out.absolute().parent.is_dir()):
        raise ConfigError(Message("measure.out-is-no-file", path=out))
    node = find_node(inherited({}))
    if node is None:  # the first process of this node measures for all
        return 0
    is_json = hasattr(args, "json")
    with ProgressLine(quiet=is_json or node.number > 0) as progress:

        def tell(part: str, number: int, count: int) -> None:
            progress.say(text("measure.progress", part=PARTS[part].name, number=number, count=count))

        progress.say(text("measure.starting"))
        found, said, interrupted = measure_machine(quick=hasattr(args, "quick"), node=node, tell=tell)
    if node.number > 0:  # one file and one report for all nodes: the first one's
        return INTERRUPTED if interrupted else 0
    parts_by_why = {
        why: Listing(PARTS[part].name for part, other in found.missing.items() if other == why)
        for why in found.missing.values()
    }
    missing = Listing(
        (Message("measure.one-missing", part=parts, why=why or None) for why, parts in parts_by_why.items()), ";"
    )
    if not found.rates:
        nothing = text("measure.interrupted-early") if interrupted else text("measure.nothing", parts=missing)
        print(f"tightfit: {nothing}", file=sys.stderr)
        return INTERRUPTED if interrupted else NOTHING
    if found.missing:
        said.append(Message("measure.missing", parts=missing))
    # What was measured before and could not be now is lost on purpose: a file is of one moment.
    written, failed = list[Message](), list[Message]()
    for path, done, refused in (
        (place_of(found.fingerprint), "measure.kept", "measure.not-kept"),
        (out, "measure.written", "measure.not-written"),
    ):
        if path is not None:
            try:
                write_measured(path, found)
                written.append(Message(done, path=path))
            except OSError as error:
                failed.append(Message(refused, path=path, why=say_why(error)))
    if is_json:
        print_json({**asdict(found), "said": said}, allow_nan=False)
    else:
        from tightfit.screen import open_console
        from tightfit.screen.measure import draw_measurement

        draw_measurement(open_console(), found, assumed_rates(this_machine()), [*said, *written])
    for each in failed:
        print(f"tightfit: {each}", file=sys.stderr)
    if interrupted:
        if written:
            print(f"tightfit: {text('measure.interrupted-kept')}", file=sys.stderr)
        return INTERRUPTED
    asked_for = "measure.kept" if out is None else "measure.written"
    return 0 if any(each.id == asked_for for each in written) else WRONG


def parser() -> Parser:
    made = Parser("measure", "[--quick] [--out FILE] [--json]", "tightfit measure --out cluster.json")
    made.takes("quick out=FILE json")
    return made.ends_with("0", "2", "3", "130")
