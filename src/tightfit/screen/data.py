"""A preview of training data on a terminal: what is learned stands in ⟦brackets⟧, and in colour where there is any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from tightfit.screen import TABLE, say, table_of

OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What the worker printed, by kind."""

    head: Mapping[str, Any]
    examples: tuple[Mapping[str, Any], ...]
    summaries: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(lines: Sequence[Mapping[str, Any]]) -> Preview:
        return Preview(
            head=next(line for line in lines if line["kind"] == "head"),
            examples=tuple(line for line in lines if line["kind"] == "example"),
            summaries=tuple(line for line in lines if line["kind"] == "summary"),
        )


def draw_preview(console: Console, preview: Preview) -> None:
    """Examples with their loss mask, then what was counted."""
    head = preview.head
    console.print(Text(f"{head['source']}, in sequences of {head['sequence']} tokens", style="bold"), soft_wrap=True)
    layout = "" if head["format"] == "text" else f"; chats are laid out by {head['template']}"
    say(console, f"Tokenizer: {head['tokenizer']}{layout}.")
    for sentence in head["said"]:
        say(console, sentence, style="italic")
    if preview.examples:
        say(console, f"What counts in the loss stands in {OPEN}brackets{CLOSE}.", style="dim")
    for example in preview.examples:
        _draw_example(console, example)
    console.print()
    _draw_counts(console, preview.summaries)
    if any(summary["sections"] for summary in preview.summaries):
        console.print()
        _draw_sections(console, preview.summaries)


def _draw_example(console: Console, example: Mapping[str, Any]) -> None:
    console.print()
    cut = example["whole_tokens"] - example["tokens"]
    words = f"{example['name']}: {example['tokens']} tokens, {example['loss_tokens']} learned"
    words += f", {cut} cut off" if cut > 0 else ""
    console.print(Text(words, style="bold"), soft_wrap=True)
    text = Text()
    for piece in example["pieces"]:
        text.append(
            f"{OPEN}{piece['text']}{CLOSE}" if piece["loss"] else piece["text"], "green" if piece["loss"] else ""
        )
    console.print(text, soft_wrap=True)
    if example["sections"]:
        parts = [f"{each['field']} {each['tokens']}{_count_lost(each)}" for each in example["sections"]]
        say(console, f"Tokens by section: {', '.join(parts)}.", style="dim")


def _count_lost(section: Mapping[str, Any]) -> str:
    return f" ({section['lost']} lost)" if section["lost"] else ""


def _draw_counts(console: Console, summaries: Sequence[Mapping[str, Any]]) -> None:
    console.width = max(console.width, TABLE)
    named = any(summary["ablation"] for summary in summaries)
    table = table_of("ablation" if named else "", "examples", "samples", "tokens", "learned", "cut", "skipped")
    for summary in summaries:
        counts = ("examples", "samples", "tokens", "loss_tokens", "cut", "skipped")
        table.add_row(summary["ablation"] or "looked at", *(f"{summary[name]:,}" for name in counts))
    console.print(table)


def _draw_sections(console: Console, summaries: Sequence[Mapping[str, Any]]) -> None:
    table = table_of("ablation", "section", "tokens each", "lost", "cut in", "gone in")
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
    say(console, "Lost: share of a section's tokens that did not fit; cut in, gone in: examples.", style="dim")
