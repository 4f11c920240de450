"""What `tightfit checkpoints` shows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tightfit.priced import GIB
from tightfit.runs.inventory import Found, Goner, Inventory, Maker
from tightfit.screen import MIB, TABLE, draw_list, say, table_of

EVERY_S = 10.0
"""In a pipe, progress is said so often."""


def draw_inventory(console: Console, there: Inventory, holder: str | None) -> None:
    """The table, the sum, and what is wrong. `holder`: who writes there now."""
    if not there.checkpoints and not there.orphans:
        say(console, f"There are no checkpoints in {there.run}.")
        return
    console.width = max(console.width, TABLE)  # narrower, a row would lose its end
    table = table_of("step", "size", "written", "plan", "")
    for found in there.checkpoints:
        table.add_row(
            f"{found.step:,}", size(found.bytes), found.written or "?", maker_words(found.maker), _state(found)
        )
    if there.checkpoints:
        console.print(table)
    count, broken = len(there.checkpoints), len(there.broken)
    words = f"{count} checkpoint{'' if count == 1 else 's'}, {size(there.bytes)} in all"
    if broken:
        words += f"; {broken} cannot be gone on from"
    say(console, f"{words}.")
    draw_list(console, "Not whole:", [f"{found.folder.name}: {found.problem}." for found in there.broken])
    left = "left by a process that was killed" if holder is None else "being written or removed by the run that lives"
    draw_list(
        console,
        "Half-done:",
        [f"{orphan.path.name} ({size(orphan.bytes)}): {left}." for orphan in there.orphans],
    )
    if holder is not None:
        console.print()
        say(console, f"{holder}.", style="dim")


def _state(found: Found) -> Text:
    if found.problem is not None:
        return Text("NOT WHOLE" if found.certain else "UNKNOWN", "bold red")
    return Text("verified" if found.verified else "complete", "green")


def maker_words(maker: Maker | None) -> str:
    """`zero2 × 4, bf16, lora`."""
    if maker is None:
        return "?"
    ranks = "" if maker.world is None else f" × {maker.world}"
    parts = [f"{maker.engine or '?'}{ranks}", maker.precision, maker.method if maker.method != "full" else None]
    return ", ".join(part for part in parts if part)


def draw_pruned(console: Console, gone: Sequence[Goner], stay: int, *, dry: bool) -> None:
    """What went, and what that freed."""
    stays = f"{stay} checkpoint{' stays' if stay == 1 else 's stay'}"
    if not gone:
        console.print()
        say(console, f"Nothing to remove: {stays}.")
        return
    title = "Would go (--dry-run):" if dry else "Removed:"
    draw_list(console, title, [f"{each.path.name} ({size(each.bytes)}): {each.because}." for each in gone])
    freed = size(sum(each.bytes for each in gone))
    say(console, f"{freed} {'would be' if dry else 'were'} freed; {stays}.", style="bold")


class Verifying:
    """How far the hashing is: a line that moves on a terminal, and one in ten seconds in a pipe."""

    def __init__(self, total_bytes: int, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._quiet, self._clock = total_bytes, 0, quiet, clock
        self._said_at = clock()
        self._status: Status | None = None

    def __enter__(self) -> Verifying:
        if not self._quiet and sys.stderr.isatty():
            self._status = Console(stderr=True).status("verifying …", spinner="line")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def heard(self, found: Found, done_bytes: int) -> None:
        self._done += done_bytes
        line = f"verifying {found.folder.name}: {size(self._done)} of {size(self._total)}"
        if self._status is not None:
            self._status.update(line)
        elif not self._quiet and self._clock() - self._said_at >= EVERY_S:
            self._said_at = self._clock()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def size(size_bytes: int) -> str:
    """GiB, except for what is so small that it would be nought."""
    if size_bytes >= GIB // 2:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB // 2 else f"{size_bytes / 1024:.1f} KiB"
