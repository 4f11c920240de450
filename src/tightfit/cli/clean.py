"""`tightfit clean`: what dead runs left on this machine, shown first and removed on a yes.

Other people's processes, and other machines' runs, are never touched. Exit codes: 0; 1 something could not be removed;
2 something that the user has to change; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.cli.flags import Parser, pick, print_json
from tightfit.hardware.probes import probe_cards
from tightfit.inputs.surroundings import cache_folder
from tightfit.messages import Message, text
from tightfit.runs.leftovers import FoundLeftovers, Leftover, ask_to_end, cached_things, end, leftovers, remove
from tightfit.runs.lines import MIB, size_words
from tightfit.runs.processes import PROC, mark_of
from tightfit.runs.watching import processes_of
from tightfit.types import ConfigError

LEFT = 1
SMALL = MIB // 10  # what takes less is not worth a figure
TITLES = {
    "process": Message("cli.processes-outlived-their"),
    "shared memory": Message("cli.shared-memory"),
    "staging": Message("cli.half-written-files"),
    "lock": Message("cli.locks"),
    "reservation": Message("cli.reservations"),
    "cache": Message("cli.caches"),
}


class LockHolder(NamedTuple):
    """A process of this user that holds a GPU."""

    pid: int
    mark: str | None
    command: str
    gpus: tuple[int, ...]
    held_bytes: int | None
    run: Path | None  # the live run that it belongs to; None: it is none of ours

    @property
    def words(self) -> str:
        who, gpus = {"pid": self.pid, "command": self.command}, ", ".join(map(str, self.gpus))
        if self.held_bytes is None:
            return text("cli.process-on-gpu", **who, gpus=gpus)
        return text("cli.process-holds", **who, mib=self.held_bytes / MIB, gpus=gpus)


def clean(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    yes, dry_run, caches = (hasattr(args, name) for name in ("yes", "dry_run", "caches"))
    if yes and dry_run:
        raise ConfigError(Message("cli.yes-removes-dry-run"))
    if hasattr(args, "json") and not (yes or dry_run):
        raise ConfigError(Message("cli.json-asks-nothing"))
    places = [Path(word).expanduser() for word in getattr(args, "places", ())]
    for place, word in zip(places, getattr(args, "places", ()), strict=True):
        if not place.is_dir():
            raise ConfigError(Message("cli.file-not-run" if place.exists() else "cli.nothing-at", text=word))
    cache = cache_folder()
    found = leftovers(places or [Path.cwd()], cache, caches=caches)
    holders = _find_holders(found)
    asks = not dry_run and sys.stdin.isatty() and sys.stdout.isatty()
    if hasattr(args, "json"):
        failed = _remove_all(found) if yes else {}
        print_json(report(found, holders, failed, removed=yes))
        return LEFT if failed else 0
    from tightfit.screen import draw_list, open_console, say

    console = open_console()
    if not found.leftovers:
        say(console, text("cli.nothing-left-dead"), style="bold green")
    for kind in dict.fromkeys(each.kind for each in found.leftovers):
        lines = []
        for each in (each for each in found.leftovers if each.kind == kind):
            size = "" if each.bytes is None or each.bytes < SMALL else f", {size_words(each.bytes)}"
            lines.append(f"{each.what}{size}: {each.because}")
        draw_list(console, text("cli.title", title=TITLES[kind]), lines)
    held = sum(each.bytes or 0 for each in found.leftovers)
    if held:
        console.print()
        say(console, text("cli.all-memory-disk", leftovers=len(found.leftovers), held=size_words(held)))
    draw_list(console, text("cli.left-alone-they"), [str(run) for run in found.live])
    unsure = [text("runs.ended-sentence", said=said) for said in found.unsure]
    draw_list(console, text("cli.cannot-judged-here"), unsure)
    if not caches or found.live:
        stay = text("cli.caches-stay-while") if caches else text("cli.caches-stay-unless")
        draw_list(console, stay, [str(path) for path in cached_things(cache)])
    ours = [text("cli.live-run", words=each.words, run=each.run) for each in holders if each.run is not None]
    others = [f"{each.words}." for each in holders if each.run is None]
    draw_list(console, text("cli.your-processes-gpus"), [f"{each[0].upper()}{each[1:]}" for each in (*ours, *others)])
    failed = {}
    if found.leftovers and (yes or (asks and _agrees(text("cli.remove-all-type")))):
        failed = _remove_all(found)
        gone = [each for each in found.leftovers if each not in failed]
        freed = size_words(sum(each.bytes or 0 for each in gone))
        print("\n" + text("cli.removed", gone=len(gone), all=len(found.leftovers), freed=freed))
        for leftover, why in failed.items():
            print(f"tightfit: {text('cli.could-removed', what=leftover.what, why=why)}", file=sys.stderr)
    elif found.leftovers:
        print(text("cli.nothing-removed-yes"))
    if asks:
        # One yes a process, typed by a person; first it is asked to end, and only a second yes ends it at once.
        for holder in (each for each in holders if each.run is None):
            print()
            if not _agrees(text("cli.end-process-one", pid=holder.pid, command=holder.command)):
                continue
            refused = ask_to_end(holder.pid, holder.mark)
            if refused is not None and _agrees(text("cli.end-at-once", why=refused)):
                refused = end(holder.pid, holder.mark, at_once=True)
            ended = text("cli.process-ended", pid=holder.pid)
            print(ended if refused is None else text("cli.process-why", pid=holder.pid, why=refused))
    return LEFT if failed else 0


def parser() -> Parser:
    usage = "[FOLDER ...] [--dry-run] [--yes] [--caches] [--json]"
    made = Parser("clean", usage, "tightfit clean runs --dry-run")
    made.takes("places:FOLDER* dry_run yes caches json")
    return made.ends_with("0", "1", "2")


def _find_holders(found: FoundLeftovers) -> list[LockHolder]:
    """Of this user, and not already among what goes."""
    going = {each.pid for each in found.leftovers}
    ours = {process.pid: run for run in found.live for process in processes_of(run)}
    held: dict[int, list[tuple[int, int | None]]] = {}
    names: dict[int, str] = {}
    for card in probe_cards().cards:
        for process in card.processes or ():
            try:
                is_mine = (PROC / str(process.pid)).stat().st_uid == os.geteuid() and process.pid != os.getpid()
            except OSError:
                continue
            if process.pid not in going and is_mine:
                held.setdefault(process.pid, []).append((card.index, process.held_bytes))
                names[process.pid] = process.command or text("cli.unknown-command")
    holders = []
    for pid, cards in held.items():
        gpus, size = tuple(index for index, _ in cards), sum(size or 0 for _, size in cards) or None
        holders.append(LockHolder(pid, mark_of(pid), names[pid], gpus, size, ours.get(pid)))
    return holders


def _agrees(question: str) -> bool:
    print(question, end="", flush=True)
    return sys.stdin.readline().strip().lower() == "yes"


def _remove_all(found: FoundLeftovers) -> dict[Leftover, str]:
    """What could not go, and why."""
    tried = {leftover: remove(leftover) for leftover in found.leftovers}
    return {leftover: str(why) for leftover, why in tried.items() if why is not None}


def report(
    found: FoundLeftovers, holders: Sequence[LockHolder], failed: dict[Leftover, str], *, removed: bool
) -> dict[str, Any]:
    """The contract with programs: the keys here are promised, further ones may come."""
    told = ("kind", "what", "bytes", "pid", "because")
    return {
        "removed": removed,
        "leftovers": [{**pick(each, *told), "problem": failed.get(each)} for each in found.leftovers],
        "live": found.live,
        "unsure": found.unsure,
        "gpu_processes": [pick(each, "pid", "command", "gpus", "held_bytes", "run") for each in holders],
    }
