"""Which parts of a layer to compute again: those that free most for their time.

Elementwise work comes first, which frees much for little; in compiled layers all of them recompute it as soon as one
recomputes anything. Each part beyond that has a price in seconds, and frees what would be kept without it: both are
read from the layer's tape, and those of several parts add up. Parts in one layer fewer free less and cost less, byte
for byte the same. So a selection that frees less than another and costs as much for each byte is never the better
choice, and what is left is a few: from the whole layer, which frees most, down to what is cheapest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.memory.graph import follow_tags, read_graph
from tightfit.memory.layers import has_parts, layer_cost, layer_input_bytes, layer_tape
from tightfit.memory.operations import Setting
from tightfit.pace.rates import Card, rates_of
from tightfit.pace.work import ELEMENTWISE, layer_time
from tightfit.types import PARTS, Block, Hardware, Levers, Mamba1, ModelShape

WORTH = 0.98
"""What a selection must cost for each byte, over one that frees more, to be tried: how broad the search is. Chosen, not
measured: each selection more is a search of its own. Against all selections of a dense model, a mixture of experts, a
Mamba and Gemma-2, on cards of forty sizes, no step was longer by more than 0.6 %; at 0.97 some were by 1.1 %."""

FEW = 2  # parts: elementwise work and one more

Selection = tuple[str, ...]


class Price(NamedTuple):
    """Of one part, or of some together, in all layers."""

    parts: Selection
    seconds: float
    freed: float  # bytes

    @property
    def of_a_byte(self) -> float:
        return self.seconds / self.freed if self.freed > 0 else inf


class Worth(NamedTuple):
    """Selections that are worth trying."""

    alone: tuple[Selection, ...]  # beside whole layers, the one that frees least first
    sending: tuple[Selection, ...]
    """Where the rest waits on the host: few parts, or all but the one that costs most for what it frees. Which is best
    depends on the link, and in between is little to gain."""
    largest: Selection  # the part that frees most, by itself


def selections(shape: ModelShape, levers: Levers, hardware: Hardware) -> Worth:
    """Both prices of a part grow with the tokens: one sequence tells."""
    asked = replace(levers, micro_batch=1)
    if levers.compile == "layers" and any(isinstance(block.mixer, Mamba1) for block in shape.blocks):
        asked = replace(asked, scan="tightfit")  # the only one that can be compiled, whichever stands there yet
    setting = setting_of(asked, hardware.gpu, shape.model_type)
    return _find(shape, setting, rates_of(hardware, levers.precision).card)


@lru_cache(maxsize=256)
def _find(shape: ModelShape, setting: Setting, card: Card) -> Worth:
    if not any(has_parts(block, setting) for block in shape.blocks):
        return Worth((), (), ())
    always, *each = find_prices(shape, setting, card)
    each = [price for price in each if price.freed > 0]
    cheapest, found = _join([always, *each]), list[Selection]()
    some = [_join([always, *chosen]) for count in range(1, len(each)) for chosen in combinations(each, count)]
    for price in sorted(some, key=lambda price: -price.freed):
        if price.of_a_byte < WORTH * cheapest.of_a_byte:
            found.append(price.parts)
            cheapest = price
    alone = ELEMENTWISE, *reversed(found)
    most = _join([always, *sorted(each, key=lambda price: price.of_a_byte)[:-1]]).parts
    sending = [parts for parts in alone if len(parts) <= FEW or parts == most]
    largest = _join([always, *sorted(each, key=lambda price: -price.freed)[:1]]).parts
    return Worth(alone, tuple(sending), largest)


def find_prices(shape: ModelShape, setting: Setting, card: Card) -> list[Price]:
    """Of each part, in the order of `PARTS`, in all layers that have parts. The first goes along with all others; in
    compiled layers it is there whatever is chosen, and so without a price."""
    prices = dict.fromkeys(PARTS, Price((), 0.0, 0.0))
    for kind, block in enumerate(shape.blocks):
        if not has_parts(block, setting):
            continue
        count, hidden = shape.pattern.count(kind), shape.hidden_size
        time, least = layer_time(block, hidden, setting, card), count_kept(block, hidden, setting, ELEMENTWISE)
        for part, again in zip(PARTS, time.parts, strict=True):
            seconds, freed = again.products + again.others, 0
            if part not in ELEMENTWISE:
                freed = least - count_kept(block, hidden, setting, (*ELEMENTWISE, part)) if seconds else 0
            elif setting.compiled:
                seconds = 0.0
            else:
                everything = layer_cost(block, hidden, setting).saved
                freed = everything - least - layer_input_bytes(block, hidden, setting)
            known = prices[part]
            prices[part] = Price((part,), known.seconds + count * seconds, known.freed + count * freed)
    return list(prices.values())


def count_kept(block: Block, hidden: int, setting: Setting, select: Selection) -> int:
    """`saved` of `recompute_cost`, without what it takes to find the peaks beside it."""
    tape, layer_input, _ = layer_tape(block, hidden, setting, True)
    graph = read_graph(tape, layer_input)
    follow_tags(graph, select)
    return sum([value.size for value in graph.values if value.saved])


def _join(prices: list[Price]) -> Price:
    names = {part for price in prices for part in (*ELEMENTWISE, *price.parts)}
    parts = tuple([part for part in PARTS if part in names])
    return Price(parts, sum([price.seconds for price in prices]), sum([price.freed for price in prices]))
