"""Which of two ways is surely the faster, and which is chosen where nobody can tell.

Two ranges that overlap prove little: most of what is not known is common to both ways. They compute the same products
at the same rate, and if that is lower than believed, both take longer. What counts is what a rate leaves open of the
difference: of a way with the optimizer on the host and one without, that of the host's optimizer. So the seconds that
each rate leaves open are subtracted, rate by rate, and what is left of them adds up as independent errors do.

The simplest of the ways that cannot be told from the fastest is chosen, if it is not much slower in the middle of its
range: what has fewer moving parts is easier to live with. `SearchResult.best` stays the fastest, by which searches are
bounded and compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot
from typing import NamedTuple

from tightfit.planner.candidates import complexity
from tightfit.planner.plan import Way
from tightfit.planner.search import rank
from tightfit.types import Pace

MOST_SLOWER = 0.05
"""By which the simpler way may be slower in the middle of its range: what a plan may lose against the fastest."""


class Difference(NamedTuple):
    is_sure: bool  # the faster one is the faster, whatever its rates turn out to be
    rate: str  # the one that leaves most open of what lies between them; empty: none does


def tell_apart(one: Pace, other: Pace) -> Difference:
    """Whether what is known of the rates is enough to say which is faster."""
    open_s = {
        name: sum(sign * pace.rates[name].open_s for sign, pace in ((1, one), (-1, other)) if name in pace.rates)
        for name in {**one.rates, **other.rates}
    }
    apart = abs(one.step_s - other.step_s)
    most = max(open_s, key=lambda name: abs(open_s[name]), default="")
    return Difference(apart > hypot(*open_s.values()), most if open_s and open_s[most] else "")


def choose(ways: Iterable[Way]) -> Way | None:
    """The fastest that fits, or the simplest that cannot be told from it; None: nothing fits."""
    fitting = sorted((way for way in ways if way.fits), key=rank)
    if not fitting:
        return None
    fastest, *others = fitting
    equal = [way for way in others if way.pace.step_s <= (1 + MOST_SLOWER) * fastest.pace.step_s]
    equal = [way for way in equal if not tell_apart(fastest.pace, way.pace).is_sure]
    return min((fastest, *equal), key=lambda way: complexity(way.levers, way.world))
