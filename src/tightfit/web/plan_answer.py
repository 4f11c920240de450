"""What the Plan view asks, and keeps for a while: the answer of `tightfit plan` to an address."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property

from tightfit.desk.plan import answered
from tightfit.desk.plan_files import files_of
from tightfit.messages import Message, Said
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import worth_showing
from tightfit.planner.tiers import Tiered
from tightfit.types import UserError
from tightfit.web.plan_question import AddressQuestion

KEPT = 64
KEPT_S = 60.0
"""Answers are forgotten after a while: a run that ends meanwhile may have taught something."""


@dataclass(frozen=True)
class Answered:
    """One answer, and what was asked for it."""

    asked: AddressQuestion
    plan: Plan
    tiered: Tiered | None = None
    """Where a tier was asked for: what the command line would answer."""

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """What is drawn: the chosen way first, then its rivals; of a tier's, what would be chosen without it."""
        rivals = [way for way in worth_showing(self.plan) if way is not self.plan.chosen]
        free = self.tiered.free.chosen if self.tiered is not None and self.tiered.free is not None else None
        return (*((self.plan.chosen,) if self.plan.chosen else ()), *rivals, *((free,) if free else ()))

    @cached_property
    def files(self) -> dict[str, str] | Said:
        """The files that `--write` would write, by name; or the sentence that says why there are none."""
        if self.plan.chosen is None:
            return {}
        try:
            return files_of(self.plan)
        except UserError as error:
            why: Said = error.said
            return why


_kept: OrderedDict[tuple[str, bool], tuple[float, Answered]] = OrderedDict()
_lock = threading.Lock()


def answer_to(asked: AddressQuestion, *, advice: bool) -> Answered:
    """The answer, from the last minute or anew. `advice`: also what would make it fit, where nothing does."""
    key = (asked.address(), advice)
    known = _recall(key) or (None if advice else _recall((key[0], True)))
    if known is not None:
        return known
    found, _ = answered(asked.request(), advice=advice)
    made = Answered(asked, found) if isinstance(found, Plan) else _of_a_tier(asked, found)
    with _lock:
        _kept[key] = (time.monotonic(), made)
        if made.plan.fits:  # there is nothing to advise, so it is the answer to both questions
            _kept[key[0], True] = _kept[key]
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def _of_a_tier(asked: AddressQuestion, found: object) -> Answered:
    assert isinstance(found, Tiered), "neither all tiers nor a limit can be asked for in an address"
    plan = found.plan
    assert plan is not None, "what a tier cannot run is an error before"
    about = Message("web.tier", name=found.tier.name, about=found.tier.about)
    return Answered(asked, replace(plan, because=(about, *found.because, *plan.because)), found)


def _recall(key: tuple[str, bool]) -> Answered | None:
    with _lock:
        since, known = _kept.get(key, (0.0, None))
        if known is None or time.monotonic() - since > KEPT_S:
            return None
        _kept.move_to_end(key)
        return known


def recall(address: str) -> Answered | None:
    """An answer of the last minute."""
    return _recall((address, False)) or _recall((address, True))


def is_at_hand(asked: AddressQuestion) -> bool:
    """No network has to be asked for the model."""
    return asked.block is not None or asked.get("model").lower() in PRESETS or bool(find_checkpoint(asked.get("model")))


def check_model(asked: AddressQuestion) -> None:
    """Fetch the config of a Hugging Face id, which may take as long as the network lets it."""
    if not is_at_hand(asked):
        load_model(asked.get("model"))
