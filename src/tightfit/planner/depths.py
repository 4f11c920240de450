"""How many layers must recompute: the fewest with which a corner of the levers fits.

Time only grows with every layer that recomputes, so the fewest that fit are the fastest. Memory does not quite only
shrink. A layer that recomputes holds its own input meanwhile, which a layer that kept everything does not: so the
need falls with each layer more, and from where a recomputing layer is itself the peak (usually the topmost) it rises
again by about one layer's input. That is a valley, and `in_a_valley` finds its first fitting place by bisection.
No recomputing layer at all is a case of its own (masks need not wait for a second call, adapters need no gradient
of the embedding), and is asked first.

ZeRO-3 is rougher. What it has gathered at a layer depends on what it fetches next, and that changes with the depth:
with short sequences the need jumps up and down by more than a layer's activations. There every depth is tried, from
the first at which the loss alone would fit: `past_a_floor`.
"""

from __future__ import annotations

from collections.abc import Callable

Excess = Callable[[int], int]
"""How far the corner is from fitting at the depth of this index; 0: it fits."""


def tried_depths(n_layers: int, *, partial: bool = True) -> tuple[int, ...]:
    """Numbers of recomputing layers, from none to all; or only these two, where a trainer knows nothing between."""
    return tuple(range(n_layers + 1)) if partial else (0, n_layers)


def in_a_valley(excess: Excess, last: int, rise: int, *, late: bool = False) -> int | None:
    """The first index up to `last` that fits, where the need falls and then rises by `rise` at most; None: none.

    `late`: it is probably `last` or little before, so that is where the search begins.
    """
    if excess(0) == 0:
        return 0
    if last == 0:
        return None
    fitting: int | None = last
    if excess(last):
        falling = excess(last) > rise or (last > 1 and excess(last - 1) > excess(last))
        fitting = None if falling else _bottom(excess, last)
    if fitting is None:
        return None
    return _first_from_above(excess, 1, fitting) if late else _first(excess, 1, fitting)


def _bottom(excess: Excess, last: int) -> int | None:
    """Some index that fits, between the two ends, which do not."""
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        here, next_one = excess(middle), excess(middle + 1)
        if here == 0:
            return middle
        if next_one == 0:
            return middle + 1
        low, high = (middle + 1, high) if next_one < here else (low, middle)
    return None


def _first(excess: Excess, low: int, fitting: int) -> int:
    """The first that fits, where all from there up to `fitting` do."""
    high = fitting
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if excess(middle) else (low, middle)
    return high


def _first_from_above(excess: Excess, low: int, fitting: int) -> int:
    """The same, in growing steps down from `fitting`."""
    high, step = fitting, 1
    while high - step >= low and excess(high - step) == 0:
        high, step = high - step, 2 * step
    return _first(excess, max(low, high - step + 1), high)


def past_a_floor(excess: Excess, last: int, floor: Excess, replayed_floor: Excess) -> int | None:
    """The first index up to `last` that fits. `floor`: an excess that is never too high and only falls with the depth;
    `replayed_floor`: one that is never too high, nearer to the truth and dearer to ask."""
    if excess(0) == 0:
        return 0
    if last == 0 or floor(last):
        return None
    for index in range(_first(floor, 1, last), last + 1):
        if replayed_floor(index) == 0 and excess(index) == 0:
            return index
    return None
