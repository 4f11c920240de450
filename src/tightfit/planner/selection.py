"""Which parts of a layer to compute again: those that free most for their time.

Elementwise work comes first, which frees much for little; in compiled layers all of them recompute it as soon as one
recomputes anything. Each part beyond that has a price in seconds and frees what it would have kept. They join one by
one, the cheapest byte first, so that there are as many selections to think of as there are parts, each with all that is
cheaper. The whole layer is the last of them. One that frees less than another and costs as much for each byte is never
the better choice: the other one in fewer layers frees the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.memory.operations import Setting
from tightfit.memory.selection import place_of
from tightfit.memory.weights import is_linear
from tightfit.pace.rates import Card, rates_of
from tightfit.pace.work import ELEMENTWISE, layer_time
from tightfit.types import PARTS, Attention, Hardware, Levers, ModelShape, Traced

WORTH = 0.97
"""What a selection must cost for each byte, over one that frees more: less is within what the prices are sure of."""
MOST = 2  # selections of products to try: those that free most; the number of layers does the rest

Selection = tuple[str, ...]


class Price(NamedTuple):
    """Of one part, in all layers together."""

    part: str
    seconds: float
    freed: float  # elements for each token

    @property
    def of_a_byte(self) -> float:
        return self.seconds / self.freed


def selections(shape: ModelShape, levers: Levers, hardware: Hardware) -> tuple[Selection, ...]:
    """Those worth trying beside whole layers, the one that frees least first. Both prices of a part grow with the
    tokens: one sequence tells."""
    setting = setting_of(replace(levers, micro_batch=1), hardware.gpu, shape.model_type)
    return _find(shape, setting, rates_of(hardware, levers.precision).card)


@lru_cache(maxsize=256)
def _find(shape: ModelShape, setting: Setting, card: Card) -> tuple[Selection, ...]:
    if any(isinstance(block.mixer, Traced) for block in shape.blocks):
        return ()
    each = sorted(_prices(shape, setting, card), key=lambda price: price.of_a_byte)
    found: list[Selection] = []
    cheapest = _join(each)
    for count in range(len(each) - 1, 0, -1):
        joined = _join(each[:count])
        if joined.of_a_byte < WORTH * cheapest.of_a_byte:
            found.append(
                tuple(part for part in PARTS if part in (*ELEMENTWISE, *(price.part for price in each[:count])))
            )
            cheapest = joined
    return (ELEMENTWISE, *reversed(found[:MOST]))


def _prices(shape: ModelShape, setting: Setting, card: Card) -> list[Price]:
    prices = []
    for number, part in enumerate(PARTS):
        seconds, freed = 0.0, 0.0
        for kind, block in enumerate(shape.blocks):
            count = shape.pattern.count(kind)
            seconds += count * layer_time(block, shape.hidden_size, setting, card).parts[number]
            linears = [tensor for tensor in block.tensors if is_linear(tensor)]
            made = sum(each.shape[0] for each in linears if place_of(each.name.rpartition(".")[0]) == part)
            if part == "mixer" and isinstance(block.mixer, Attention):
                made += block.mixer.heads * block.mixer.head_dim
            freed += count * made
        if seconds and freed:
            prices.append(Price(part, seconds, freed))
    return prices


def _join(prices: list[Price]) -> Price:
    return Price("", sum(price.seconds for price in prices), sum(price.freed for price in prices) or 1.0)
