"""What `tightfit measure` shows: a line for each rate, and what is to be said about them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tightfit.hardware.measured import Measurement
from tightfit.messages import Said
from tightfit.screen import say, table_of

MARK = " *"


def draw_measurement(console: Console, found: Measurement, said: Sequence[Said]) -> None:
    table = table_of("", "screen.measured")
    for name, rate in found.rates.items():
        table.add_row(name, rate_words(name, rate) + (MARK if name in found.marked else ""))
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
    return f"{rate / 1e9:.3g} GB/s"
