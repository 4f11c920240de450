"""Who searches beside the one that asks: other processes, where there are any (`desk/searchers.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import NamedTuple, Protocol

from tightfit.planner.plan import Way
from tightfit.planner.question import Question
from tightfit.types import Levers


class Task(NamedTuple):
    """One strategy to be searched."""

    levers: Levers
    most_s: float = inf  # what takes longer is of no interest
    nearest: bool = True  # where it does not fit, what is nearest to it is wanted
    follows: bool = False  # where nothing else fits, this does not either
    part: int = 0  # of its candidates every so many are searched, from this one on
    parts: int = 1

    def beside(self, best_s: float) -> Task:
        """The same where something else that fits takes so long; infinite: nothing does."""
        return self if best_s == inf else self._replace(most_s=min(self.most_s, best_s), nearest=False)


class Found(NamedTuple):
    """Its fastest way that fits, or the one nearest to fitting."""

    way: Way | None
    considered: int  # of so many


class Team(Protocol):
    def search(self, question: Question, tasks: Sequence[Task]) -> list[Found]:
        """What each of the tasks finds, in their order."""


def find_best_s(each: Iterable[Found]) -> float:
    """The seconds of the fastest way that fits; infinite: none does."""
    return min([one.way.pace.step_s for one in each if one.way is not None and one.way.fits], default=inf)


_team: ContextVar[Team | None] = ContextVar("team", default=None)


@contextmanager
def helped_by(team: Team) -> Iterator[None]:
    """What is searched for meanwhile, in this thread, is left to a team."""
    before = _team.set(team)
    try:
        yield
    finally:
        _team.reset(before)


def find_team() -> Team | None:
    return _team.get()
