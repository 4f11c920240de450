"""What the Plan view asks, and keeps for a while: the answer of `tightfit plan` to an address."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

from tightfit.desk.plan import answered, check_flags
from tightfit.desk.plan_files import files_of
from tightfit.inputs.models import load_model
from tightfit.inputs.presets import PRESETS, checkpoint_named
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import worth_showing
from tightfit.types import UserError
from tightfit.web.plan_question import Asked

KEPT = 64
KEPT_S = 60.0
"""Answers are forgotten after a while: a run that ends meanwhile may have taught something."""


@dataclass(frozen=True)
class Answered:
    """One answer, and what was asked for it."""

    asked: Asked
    plan: Plan

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """What is drawn: the chosen way first, then its rivals."""
        rivals = [way for way in worth_showing(self.plan) if way is not self.plan.chosen]
        return (*((self.plan.chosen,) if self.plan.chosen else ()), *rivals)

    @cached_property
    def files(self) -> dict[str, str] | str:
        """The files that `--write` would write, by name; or the sentence that says why there are none."""
        if self.plan.chosen is None:
            return {}
        try:
            return files_of(self.plan)
        except UserError as error:
            return str(error)


_kept: OrderedDict[tuple[str, bool], tuple[float, Answered]] = OrderedDict()
_lock = threading.Lock()


def answer_to(asked: Asked, *, advice: bool) -> Answered:
    """The answer, from the last minute or anew. `advice`: also what would make it fit, where nothing does."""
    key = (asked.address(), advice)
    known = _remembered(key) or (None if advice else _remembered((key[0], True)))
    if known is not None:
        return known
    args = asked.args()
    check_flags(args)
    plan, _ = answered(args, advice=advice)
    assert isinstance(plan, Plan), "neither a tier nor a limit can be asked for in an address"
    made = Answered(asked, plan)
    with _lock:
        _kept[key] = (time.monotonic(), made)
        if plan.fits:  # there is nothing to advise, so it is the answer to both questions
            _kept[key[0], True] = _kept[key]
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def _remembered(key: tuple[str, bool]) -> Answered | None:
    with _lock:
        since, known = _kept.get(key, (0.0, None))
        if known is None or time.monotonic() - since > KEPT_S:
            return None
        _kept.move_to_end(key)
        return known


def remembered(address: str) -> Answered | None:
    """An answer of the last minute."""
    return _remembered((address, False)) or _remembered((address, True))


def is_at_hand(asked: Asked) -> bool:
    """No network has to be asked for the model."""
    return (
        asked.block is not None or asked.get("model").lower() in PRESETS or bool(checkpoint_named(asked.get("model")))
    )


def check_model(asked: Asked) -> None:
    """Fetch the config of a Hugging Face id, which may take as long as the network lets it."""
    if not is_at_hand(asked):
        load_model(asked.get("model"))
