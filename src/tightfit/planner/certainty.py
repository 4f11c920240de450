"""Which of two ways is surely the faster, and which is chosen where nobody can tell.

Two ranges that overlap prove little: most of what is not known is common to both ways. They compute the same products
at the same rate, and if that is lower than believed, both take longer. What counts is what a rate leaves open of the
difference: of a way with the optimizer on the host and one without, that of the host's optimizer. So the seconds that
each rate leaves open are subtracted, rate by rate, and what is left of them adds up as independent errors do, with what
the model itself leaves open of a difference.

Of the ways that cannot be told from the fastest the safest is chosen, if it is not much slower in the middle of its
range: one that leaves the host's RAM free, and of those the simplest, since what has fewer moving parts is easier to
live with. `SearchResult.best` stays the fastest, by which searches are bounded and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import hypot
from typing import Literal, NamedTuple

from tightfit.planner.candidates import complexity
from tightfit.planner.plan import Way
from tightfit.planner.search import rank
from tightfit.types import Pace

BETWEEN_SPREAD = 0.03
"""Of a step: what the model leaves open of the difference between two ways of one job, even where its rates are right.
Measured on the H200: with what the rates leave open it covers 152 of 162 pairs of runs of one job, and 16 of the 18
that are predicted to be within 6 % of each other."""
MOST_SLOWER = 0.05
"""By which the safer way may be slower in the middle of its range: what a plan may lose against the fastest."""
TIGHT_RAM = 0.5
"""Of a node's RAM: a way that needs less is safe, since much stays free whatever else runs there."""
MUCH_RAM = 0.1
"""Likewise: a way that needs as much more than another, and is not safe, is the less safe one."""


class Difference(NamedTuple):
    is_sure: bool  # the faster one is the faster, whatever its rates turn out to be
    rate: str  # the one that leaves most open of what lies between them; empty: none leaves more than the model does
    open_s: float  # what all of them leave open


def tell_apart(one: Pace, other: Pace) -> Difference:
    """Whether what is known of the rates is enough to say which is faster."""
    open_s = {
        name: abs(sum(sign * pace.rates[name].open_s for sign, pace in ((1, one), (-1, other)) if name in pace.rates))
        for name in {**one.rates, **other.rates}
    }
    model_s = BETWEEN_SPREAD * min(one.step_s, other.step_s)
    all_s, most = hypot(model_s, *open_s.values()), max(open_s, key=lambda name: open_s[name], default="")
    is_sure = abs(one.step_s - other.step_s) > all_s
    return Difference(is_sure, most if open_s.get(most, 0.0) > model_s else "", all_s)


def choose(ways: Iterable[Way]) -> Way | None:
    """The fastest that fits, or the safest that cannot be told from it; None: nothing fits."""
    fitting = sorted((way for way in ways if way.fits), key=rank)
    if not fitting:
        return None
    near = _near(fitting)
    return min((way for way in near if not any(_spares_ram(other, way) for other in near)), key=_moving_parts)


def _near(fitting: Sequence[Way]) -> list[Way]:
    """Of ways that stand in order, those that may be chosen: the fastest, and what cannot be told from it and is not
    much slower."""
    fastest = fitting[0]
    most_s = (1 + MOST_SLOWER) * fastest.pace.step_s
    return [way for way in fitting if way.pace.step_s <= most_s and not tell_apart(fastest.pace, way.pace).is_sure]


def _moving_parts(way: Way) -> tuple[int, ...]:
    return complexity(way.levers, way.world)


def _spares_ram(way: Way, other: Way) -> bool:
    """Whether it leaves much more of the host's RAM free than another that leaves little."""
    ram, needed = way.hardware.host_ram_bytes, other.footprint.host.peak_bytes_per_node
    return ram is not None and needed > TIGHT_RAM * ram and spared_bytes(way, other) > MUCH_RAM * ram


def spared_bytes(way: Way, other: Way) -> int:
    """What it leaves more of a node's RAM than another."""
    return other.footprint.host.peak_bytes_per_node - way.footprint.host.peak_bytes_per_node


Merit = Literal["ram", "simplicity", "pace"]


def find_merit(chosen: Way, equal: Iterable[Way]) -> tuple[Merit, Way, list[Way]]:
    """For what a way was chosen of those that cannot be told from it, which of them would be chosen otherwise, and all
    that might have been."""
    near = _near(sorted((chosen, *equal), key=rank))
    fastest, simplest = near[0], min(near, key=_moving_parts)
    others = [way for way in near if way is not chosen]
    if simplest is not chosen:  # which takes more of the host's RAM
        return "ram", simplest, others
    if _spares_ram(chosen, fastest):
        return "ram", fastest, others
    return ("simplicity" if others else "pace"), fastest, others
