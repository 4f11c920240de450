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

from tightfit.cli.flags import Parser, pick, print_json
from tightfit.cli.progress import ProgressLine
from tightfit.inputs.flags import spelt
from tightfit.messages import Message, say_why, text
from tightfit.runs import checkpoints as on_disk
from tightfit.runs.checkpoints import FoundCheckpoint, Goner, Inventory
from tightfit.runs.lock import FolderLock, InUse, check_unlocked
from tightfit.types import ConfigError

DAMAGED = 1


def checkpoints(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    for name in ("dry_run", "keep_last", "keep_every"):
        if hasattr(args, name) and not hasattr(args, "prune"):
            raise ConfigError(Message("cli.needs-prune-list", name=spelt(name)))
        if name != "dry_run" and getattr(args, name, 1) < 1:
            raise ConfigError(Message("cli.must-at-least", name=spelt(name), args=getattr(args, name)))
    run = on_disk.run_of(Path(args.run))
    if hasattr(args, "gather"):
        _gather(args, run)
    if not hasattr(args, "prune"):
        there = _look(args, run)
        _show(args, there, None)
    else:
        with _hold(run, dry=hasattr(args, "dry_run")):
            there, told = _look(args, run), on_disk.keeping_of(run)
            last, every = getattr(args, "keep_last", told.last), getattr(args, "keep_every", told.every_steps)
            gone = on_disk.goners(there, on_disk.Keeping(last=last, every_steps=every))
            on_disk.check_goners(gone)
            if not hasattr(args, "dry_run"):
                for goner in gone:
                    on_disk.remove_goner(goner)
        _show(args, there, gone)
    return DAMAGED if hasattr(args, "verify") and there.broken else 0


def parser() -> Parser:
    usage = "RUN [--verify] [--gather] [--prune [--keep-last N] [--keep-every N] [--dry-run]] [--json]"
    made = Parser("checkpoints", usage, "tightfit checkpoints runs/first --verify")
    made.takes("run:RUN verify gather prune keep_last=N keep_every=N dry_run json")
    return made.ends_with("0", "1", "2")


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
        raise ConfigError(Message("cli.cannot-written-so", run=run, why=say_why(error))) from None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _gather(args: argparse.Namespace, run: Path) -> None:
    """The newest parts that are enough, into a whole checkpoint."""
    from tightfit.screen.checkpoints import size

    with _hold(run, dry=False), ProgressLine(quiet=hasattr(args, "json")) as line:
        folder = on_disk.put_together(
            run,
            on_disk.inventory(run),
            lambda total, done: line.say(text("screen.putting-together", done=size(done), total=size(total))),
        )
    if not hasattr(args, "json"):
        print(text("cli.parts-put-together", folder=folder, size=size(on_disk.size_of(folder))))


def _look(args: argparse.Namespace, run: Path) -> Inventory:
    there = on_disk.inventory(run)
    if not hasattr(args, "verify"):
        return there
    with ProgressLine(quiet=hasattr(args, "json")) as line:
        return verify(there, line)


def verify(there: Inventory, line: ProgressLine) -> Inventory:
    """Every byte that is there, hashed again; the line says how many were."""
    from tightfit.screen.checkpoints import size

    done, total = 0, sum(found.bytes for found in there.checkpoints if found.problem is None)

    def heard(found: FoundCheckpoint, done_bytes: int) -> None:
        nonlocal done
        done += done_bytes
        line.say(text("screen.verifying-one", name=found.folder.name, done=size(done), total=size(total)))

    return on_disk.verified(there, heard)


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
    found = [
        {
            **pick(each, "step", "folder", "bytes", "written"),
            "plan": each.maker and pick(each.maker, "engine", "world", "precision", "method"),
            "complete": each.problem is None,
            **pick(each, "problem", "verified"),
            "part": each.part and {**pick(each.part, "number", "hosts"), "lacking": each.lacking},
        }
        for each in there.checkpoints
    ]
    orphans = [pick(each, "path", "bytes") for each in there.orphans]
    plain = {"run": there.run, "checkpoints": found, "orphans": orphans, "bytes": there.bytes}
    if gone is not None:
        removed = [pick(each, "path", "bytes", "because") for each in gone]
        plain["pruned"] = {"dry_run": dry, "removed": removed, "freed_bytes": sum(each.bytes for each in gone)}
    return plain
