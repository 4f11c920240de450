"""What `tightfit checkpoints` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tightfit.messages import Listing, Message, end_sentence, text
from tightfit.runs.checkpoints import Goner, Inventory, Maker, name_part
from tightfit.runs.lines import MIB, size_words
from tightfit.screen import draw_list, say, table_of, widen


def draw_inventory(console: Console, there: Inventory, holder: str | None) -> None:
    """The table, the sum, and what is wrong. `holder`: who writes there now."""
    if not there.checkpoints and not there.orphans:
        say(console, text("screen.no-checkpoints", run=there.run))
        return
    widen(console)
    table = table_of("screen.step-head", "screen.size", "screen.written", "screen.plan", "")
    for found in there.checkpoints:
        if found.problem is not None:
            state = Text(text("screen.not-whole-mark" if found.certain else "screen.unknown-mark"), "bold red")
        elif found.part is not None:
            numbers = {"number": found.part.number, "count": len(found.part.hosts)}
            words = "screen.part-alone" if found.lacking else "screen.part-enough"
            state = Text(text(words, **numbers), "yellow" if found.lacking else "green")
        else:
            state = Text(text("screen.verified" if found.verified else "screen.complete"), "green")
        cells = (f"{found.step:,}", size(found.bytes), found.written or "?", maker_words(found.maker))
        table.add_row(*cells, state)
    if there.checkpoints:
        console.print(table)
    count, broken = len(there.checkpoints), len(there.broken)
    said = {"n": count, "size": size(there.bytes)}
    say(console, text("screen.some-broken", **said, broken=broken) if broken else text("screen.checkpoints", **said))
    alone = [
        text("screen.rest-is-on", name=found.folder.name, parts=Listing(wanted, "and"))
        for found in there.checkpoints
        if found.part is not None
        and found.problem is None
        and (wanted := [name_part(found.part, number) for number in found.lacking])
    ]
    draw_list(console, text("screen.parts-alone"), alone)
    problems = [text("screen.problem", name=found.folder.name, problem=found.problem) for found in there.broken]
    draw_list(console, text("screen.not-whole"), problems)
    left = Message("screen.left-by-killed" if holder is None else "screen.left-by-live")
    half = [text("screen.named-size", name=each.path.name, size=size(each.bytes), said=left) for each in there.orphans]
    draw_list(console, text("screen.half-done"), half)
    if holder is not None:
        console.print()
        say(console, end_sentence(holder), style="dim")


def maker_words(maker: Maker | None) -> str:
    """`zero2 × 4, bf16, lora`."""
    if maker is None:
        return "?"
    ranks = "" if maker.world is None else f" × {maker.world}"
    parts = [f"{maker.engine or '?'}{ranks}", maker.precision, maker.method if maker.method != "full" else None]
    return ", ".join(part for part in parts if part)


def draw_pruned(console: Console, gone: Sequence[Goner], stay: int, *, dry: bool) -> None:
    """What went, and what that freed."""
    stays = Message("screen.stays", n=stay)
    if not gone:
        console.print()
        say(console, text("screen.nothing-to-remove", stays=stays))
        return
    lines = [text("screen.named-size", name=each.path.name, size=size(each.bytes), said=each.because) for each in gone]
    draw_list(console, text("screen.would-go" if dry else "screen.removed"), lines)
    freed = size(sum(each.bytes for each in gone))
    say(console, text("screen.would-be-freed" if dry else "screen.freed", size=freed, stays=stays), style="bold")


def size(size_bytes: int) -> str:
    """As everywhere, and KiB for what is so small that it would be nought."""
    return size_words(size_bytes) if size_bytes >= MIB // 2 else f"{size_bytes / 1024:.1f} KiB"
