"""`tightfit checkpoints`: which a run has, whether they are whole, and which may go.

Exit codes: 0, also where one is found that is not whole; 1 `--verify` found one; 2 something that the user has to
change; 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tightfit.cli.flags import CHANGE, Parser, print_json, whole_number
from tightfit.inputs.flags import spelt
from tightfit.messages import Message, text
from tightfit.runs.checkpoints import (
    Goner,
    Inventory,
    Keeping,
    check_goners,
    goners,
    inventory,
    keeping_of,
    remove_goner,
    run_of,
    verified,
)
from tightfit.runs.lock import FolderLock, InUse, check_unlocked
from tightfit.types import ConfigError

EXAMPLE = "tightfit checkpoints runs/first --verify"
EXIT_CODES = {"0": Message("help.checkpoints-exit-0"), "1": Message("help.checkpoints-exit-1"), **CHANGE}
DAMAGED = 1
MAKER = ("engine", "world", "precision", "method")
"""What is told of the plan that wrote a checkpoint."""


def checkpoints(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    if not hasattr(args, "prune"):
        for name in ("dry_run", "keep_last", "keep_every"):
            if hasattr(args, name):
                raise ConfigError(Message("cli.needs-prune-list", name=spelt(name)))
    for name in ("keep_last", "keep_every"):
        if getattr(args, name, 1) < 1:
            raise ConfigError(Message("cli.must-at-least", name=spelt(name), args=getattr(args, name)))
    run = run_of(Path(args.run))
    if not hasattr(args, "prune"):
        there = _look(args, run)
        _show(args, there, None)
    else:
        with _hold(run, dry=hasattr(args, "dry_run")):
            there, told = _look(args, run), keeping_of(run)
            last, every = getattr(args, "keep_last", told.last), getattr(args, "keep_every", told.every_steps)
            gone = goners(there, Keeping(last=last, every_steps=every))
            check_goners(gone)
            if not hasattr(args, "dry_run"):
                for goner in gone:
                    remove_goner(goner)
        _show(args, there, gone)
    return DAMAGED if hasattr(args, "verify") and there.broken else 0


def parser() -> Parser:
    usage = "RUN [--verify] [--prune [--keep-last N] [--keep-every N] [--dry-run]] [--json]"
    made = Parser("checkpoints", text("help.checkpoints-does"), EXAMPLE, usage)
    made.add_argument("run", metavar="RUN", help=text("help.checkpoints-run"))
    made.add_argument("--verify", action="store_true", help=text("help.verify"))
    made.add_argument("--prune", action="store_true", help=text("help.prune"))
    for name, about in (("keep_last", "help.checkpoints-keep-last"), ("keep_every", "help.checkpoints-keep-every")):
        made.add_argument(spelt(name), metavar="N", type=whole_number(name), help=text(about))
    made.add_argument("--dry-run", action="store_true", help=text("help.checkpoints-dry-run"))
    made.add_argument("--json", action="store_true", help=text("help.json"))
    return made.ends_with(EXIT_CODES, text("help.checkpoints-writes"))


@contextmanager
def _hold(run: Path, *, dry: bool) -> Iterator[None]:
    """Nobody else may write or remove checkpoints meanwhile."""
    try:
        lock = None if dry else FolderLock.take(run)
        if dry:
            check_unlocked(run)
    except InUse as error:
        raise ConfigError(Message("cli.wait-end", who=error.who)) from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(Message("cli.cannot-written-so", run=run, why=why)) from None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _look(args: argparse.Namespace, run: Path) -> Inventory:
    there = inventory(run)
    if not hasattr(args, "verify"):
        return there
    from tightfit.screen.checkpoints import Verifying

    total = sum(found.bytes for found in there.checkpoints if found.problem is None)
    with Verifying(total, quiet=hasattr(args, "json")) as line:
        return verified(there, line.heard)


def _show(args: argparse.Namespace, there: Inventory, gone: Sequence[Goner] | None) -> None:
    dry = hasattr(args, "dry_run")
    if hasattr(args, "json"):
        print_json(report(there, gone, dry=dry))
        return
    from tightfit.screen import open_console
    from tightfit.screen.checkpoints import draw_inventory, draw_pruned

    console, holder = open_console(), None
    if gone is None:
        try:
            check_unlocked(there.run)
        except InUse as error:  # somebody writes there now
            holder = str(error.who)
    draw_inventory(console, there, holder)
    if gone is not None:
        paths = {goner.path for goner in gone}
        draw_pruned(console, gone, sum(found.folder not in paths for found in there.checkpoints), dry=dry)


def report(there: Inventory, gone: Sequence[Goner] | None, *, dry: bool) -> dict[str, Any]:
    """The contract with programs. The keys here are promised, further ones may come."""
    plain: dict[str, Any] = {
        "run": str(there.run),
        "checkpoints": [
            {
                "step": found.step,
                "folder": str(found.folder),
                "bytes": found.bytes,
                "written": found.written,
                "plan": None if found.maker is None else {name: getattr(found.maker, name) for name in MAKER},
                "complete": found.problem is None,
                "problem": None if found.problem is None else str(found.problem),
                "verified": found.verified,
            }
            for found in there.checkpoints
        ],
        "orphans": [{"path": str(orphan.path), "bytes": orphan.bytes} for orphan in there.orphans],
        "bytes": there.bytes,
    }
    if gone is not None:
        plain["pruned"] = {
            "dry_run": dry,
            "removed": [{"path": str(each.path), "bytes": each.bytes, "because": str(each.because)} for each in gone],
            "freed_bytes": sum(each.bytes for each in gone),
        }
    return plain
