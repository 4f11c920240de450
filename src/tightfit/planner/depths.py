"""How many layers must recompute: the fewest with which a corner of the levers fits.

Time only grows with every layer that recomputes, so the fewest that fit are the fastest. Memory does not quite only
shrink. A layer that recomputes holds its own input meanwhile, which a layer that kept everything does not: so the
need falls with each layer more, and from where a recomputing layer is itself the peak (usually the topmost) it rises
again by about one layer's input. That is a valley, and `in_a_valley` finds its first fitting place by bisection;
`from_below` does where floors have shown that nothing fits before some depth, which most often is near.
No recomputing layer at all is a case of its own (masks need not wait for a second call, adapters need no gradient
of the embedding), and is asked first.

ZeRO-3 is rougher. What it has gathered at a layer depends on what it fetches next, and that changes with the depth:
with short sequences the need jumps up and down by more than a layer's activations. There every depth is tried, from
the first at which a floor would fit: `past_a_floor`.
"""

from __future__ import annotations

from collections.abc import Callable

Excess = Callable[[int], int]
"""How far the corner is from fitting at the depth of this index; 0: it fits."""


FEW = 4
"""Steps after which a search that went up looks whether there is anything to find."""


def depths_to_try(n_layers: int, *, partial: bool = True) -> tuple[int, ...]:
    """Numbers of recomputing layers, from none to all; or only these two, where a trainer knows nothing between."""
    return tuple(range(n_layers + 1)) if partial else (0, n_layers)


def in_a_valley(excess: Excess, last: int, rise: int) -> int | None:
    """The first index up to `last` that fits, where the need falls and then rises by `rise` at most; None: none."""
    if excess(0) == 0:
        return 0
    if last == 0:
        return None
    fitting = last if excess(last) == 0 else _fitting(excess, last, rise)
    return None if fitting is None else first(excess, 1, fitting)


def from_below(excess: Excess, low: int, last: int, rise: int) -> int | None:
    """The same, of indices from `low` on, before which nothing fits; in growing steps, since it is probably near."""
    if excess(low) == 0:
        return low
    index, step = low, 1
    while index < last:
        if step == FEW and excess(last) > rise:
            return None
        before, index, step = index, min(index + step, last), 2 * step
        if excess(index) == 0:
            return first(excess, before + 1, index)
    fitting = None if low == last else _fitting(excess, last, rise)
    return None if fitting is None else first(excess, low, fitting)


def one_by_one(excess: Excess, low: int, last: int, rise: int) -> int | None:
    """The same, where the need may jump, whatever `rise` says."""
    return next((index for index in range(low, last + 1) if excess(index) == 0), None)


def _fitting(excess: Excess, last: int, rise: int) -> int | None:
    """Some index that fits, where the last one does not."""
    if excess(last) > rise or (last > 1 and excess(last - 1) > excess(last)):
        return None  # the need falls to the end
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


def first(excess: Excess, low: int, fitting: int) -> int:
    """The first that fits, where all from there up to `fitting` do."""
    high = fitting
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if excess(middle) else (low, middle)
    return high


def past_a_floor(excess: Excess, last: int, floor: Excess) -> int | None:
    """The first index up to `last` that fits. `floor`: an excess that is never too high and only falls with the
    depth."""
    if excess(0) == 0:
        return 0
    if last == 0 or floor(last):
        return None
    return one_by_one(excess, first(floor, 1, last), last, 0)
