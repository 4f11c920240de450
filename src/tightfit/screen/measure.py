"""What `tightfit measure` shows: a line for each rate, and what is to be said about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from tightfit.hardware.measured import Measurement
from tightfit.messages import Said
from tightfit.screen import say, table_of

MARK = " *"


def draw_measurement(console: Console, found: Measurement, assumed: Mapping[str, float], said: Sequence[Said]) -> None:
    """`assumed`: what plans would go by otherwise, as far as they would."""
    table = table_of("", "screen.measured", *(["screen.assumed"] if assumed else []))
    for name, rate in found.rates.items():
        words = rate_words(name, rate) + (MARK if name in found.marked else "")
        before = [rate_words(name, assumed[name]) if name in assumed else ""] if assumed else []
        table.add_row(name, words, *before)
    console.print(table)
    for sentence in said:
        say(console, sentence)


def rate_words(name: str, rate: float) -> str:
    """A rate with its unit, which follows from its name: see `docs/measure.md`."""
    if name.endswith("_s"):
        return f"{rate * 1e6:.3g} µs"
    if name.startswith(("products.", "attention.")):
        return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"
    if name.startswith("host_optimizer"):
        return f"{rate / 1e9:.3g} G/s"
    return f"{rate / 1e9:.3g} GB/s" if rate < 1e12 else f"{rate / 1e12:.3g} TB/s"
