"""A preview of training data on a terminal: what is learned stands in ⟦brackets⟧, and in colour where there is any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tightfit.messages import Listing, Message, text
from tightfit.screen import TABLE, say, table_of

OPEN, CLOSE = "⟦", "⟧"


def draw_preview(
    console: Console,
    head: Mapping[str, Any],
    examples: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
) -> None:
    """Examples with their loss mask, then what was counted, as the worker printed them."""
    console.print(
        Text(text("screen.sequences-of", source=head["source"], n=head["sequence"]), style="bold"), soft_wrap=True
    )
    layout = "" if head["format"] == "text" else Message("screen.laid-out-by", template=head["template"])
    say(console, text("screen.tokenizer", name=head["tokenizer"], layout=layout))
    for sentence in head["said"]:
        say(console, sentence, style="italic")
    if examples:
        say(console, text("screen.counts-in-loss", open=OPEN, close=CLOSE), style="dim")
    for example in examples:
        console.print()
        cut = example["whole_tokens"] - example["tokens"]
        words = text(
            "screen.example",
            name=example["name"],
            tokens=example["tokens"],
            learned=example["loss_tokens"],
            cut=Message("screen.cut-off", n=cut) if cut > 0 else "",
        )
        console.print(Text(words, style="bold"), soft_wrap=True)
        pieces = Text()
        for piece in example["pieces"]:
            if piece["loss"]:
                pieces.append(f"{OPEN}{piece['text']}{CLOSE}", "green")
            else:
                pieces.append(piece["text"])
        console.print(pieces, soft_wrap=True)
        if example["sections"]:
            parts = [
                f"{each['field']} {each['tokens']}{text('screen.lost', n=each['lost']) if each['lost'] else ''}"
                for each in example["sections"]
            ]
            say(console, text("screen.by-section", parts=Listing(parts)), style="dim")
    console.print()
    console.width = max(console.width, TABLE)
    named = any(summary["ablation"] for summary in summaries)
    heads = [text("screen.examples"), text("screen.samples"), "tokens", text("screen.learned"), text("screen.cut")]
    table = table_of(text("screen.ablation") if named else "", *heads, text("screen.skipped"))
    for summary in summaries:
        counts = ("examples", "samples", "tokens", "loss_tokens", "cut", "skipped")
        table.add_row(summary["ablation"] or text("screen.seen"), *(f"{summary[name]:,}" for name in counts))
    console.print(table)
    if any(summary["sections"] for summary in summaries):
        console.print()
        table = table_of(
            text("screen.ablation"),
            text("screen.section"),
            text("screen.tokens-each"),
            text("screen.lost-head"),
            text("screen.cut-in"),
            text("screen.gone-in"),
        )
        for summary in summaries:
            for at, each in enumerate(summary["sections"]):
                whole = max(1, each["tokens"] + each["lost"])
                table.add_row(
                    "" if at else summary["ablation"] or "",
                    each["field"],
                    f"{each['tokens'] / max(1, each['examples']):.0f}",
                    f"{100 * each['lost'] / whole:.1f} %",
                    f"{each['cut']}",
                    f"{each['dropped']}",
                )
        console.print(table)
        say(console, text("screen.sections-note"), style="dim")
