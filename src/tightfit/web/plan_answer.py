"""What the Plan view asks of `tightfit plan`: the answer to an address, kept for a while; a first guess at it; and the
most that fits."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan import answered, files_of
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import REPLACES, read_request
from tightfit.inputs.flags import LEVERS, check_levers, meant
from tightfit.messages import Message, Said
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.pace import pace
from tightfit.planner import question_of
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.planner.reasons import worth_showing
from tightfit.planner.tiers import Tiered
from tightfit.types import Checkpointing, ConfigError, Levers, UserError
from tightfit.web.plan_question import AddressQuestion

KEPT = 64
KEPT_S = 60.0  # answers are forgotten after a while: a run that ends meanwhile may have taught something
_FREE = {lever.block or lever.name for lever in LEVERS.values() if lever.free}
_OWN = tuple(each.name for each in fields(Levers) if each.name not in _FREE - {"deepspeed_version"})
"""The levers that the question decides: the user's, and what follows from the job and what is installed."""


@dataclass(frozen=True)
class Answered:
    """One answer, and what was asked for it."""

    asked: AddressQuestion
    plan: Plan
    tiered: Tiered | None = None  # where a tier was asked for: what the command line would answer

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
    address = asked.address()
    known = _recall(address, advice) or (None if advice else _recall(address, True))
    if known is not None:
        return known
    found, _ = answered(asked.request(), advice=advice)
    if isinstance(found, Plan):
        made = Answered(asked, found)
    else:
        assert isinstance(found, Tiered), "neither all tiers nor a limit can be asked for in an address"
        plan = found.plan
        assert plan is not None, "what a tier cannot run is an error before"
        about = Message("web.tier", name=found.tier.name, about=found.tier.about)
        made = Answered(asked, replace(plan, because=(about, *found.because, *plan.because)), found)
    with _lock:
        _kept[address, advice] = (time.monotonic(), made)
        if made.plan.fits:  # there is nothing to advise, so it is the answer to both questions
            _kept[address, True] = _kept[address, advice]
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def _recall(address: str, advice: bool) -> Answered | None:
    with _lock:
        since, known = _kept.get((address, advice), (0.0, None))
        if known is None or time.monotonic() - since > KEPT_S:
            return None
        _kept.move_to_end((address, advice))
        return known


def recall(address: str) -> Answered | None:
    """An answer of the last minute."""
    return _recall(address, False) or _recall(address, True)


def is_at_hand(asked: AddressQuestion) -> bool:
    """No network has to be asked for the model."""
    return asked.block is not None or asked.get("model").lower() in PRESETS or bool(find_checkpoint(asked.get("model")))


def check_model(asked: AddressQuestion) -> None:
    """Fetch the config of a Hugging Face id, which may take as long as the network lets it."""
    if not is_at_hand(asked):
        load_model(asked.get("model"))


def guessed(asked: AddressQuestion, last: Answered) -> Answered:
    """A first word while every way is priced: the ways that were shown last, for the new question, of which nobody has
    chosen any yet. An estimate takes milliseconds and a search some tenths of a second, and whoever moves a slider
    looks at it meanwhile. A UserError: the question makes no sense."""
    request = asked.request()
    settled = resolve_request(request, for_others=True)
    known = Bounds(calibration=calibration_of(request, settled.job))
    question = question_of(settled.job, settled.shape, settled.hardware).within(known)
    shown = [way.levers for way in last.ways] or [question.base]
    ways = [_price(question, shown[0])]
    for levers in shown[1:]:
        with suppress(UserError):  # it does not go with what was just named
            ways.append(_price(question, levers))
    plan = replace(
        last.plan,
        job=settled.job,
        shape=question.shape,
        hardware=question.hardware,
        effective_batch=question.effective_batch,
        chosen=None,
        alternatives=tuple(ways),
        because=(),
        remedies=(),
    )
    return Answered(asked, plan)


def _price(question: Question, last: Levers) -> Way:
    levers = replace(last, **{name: getattr(question.base, name) for name in (*_OWN, *question.pinned)})
    if (levers.checkpointing.layers or 0) > question.shape.n_layers:
        levers = replace(levers, checkpointing=Checkpointing(layers=None))
    each = max(1, question.effective_batch // question.hardware.world)
    micro = next(size for size in range(min(levers.micro_batch, each), 0, -1) if each % size == 0)
    levers = replace(levers, micro_batch=micro, accumulation=each // micro)
    check_levers(levers, question.shape)
    footprint = weigh(question, levers)
    return Way(
        shape=question.shape,
        levers=levers,
        hardware=question.hardware,
        footprint=footprint,
        pace=pace(question.shape, levers, question.hardware),
        fits=excess_bytes(question, footprint) == 0,
        gpu_limit_bytes=question.gpu_limit_bytes,
    )


def most_of(asked: AddressQuestion, wanted: str) -> dict[str, str]:
    """The question turned round, as `tightfit plan --max` answers it: the longest sequence, the largest micro batch or
    preset that fits. The answer is the fields of the form to set, so that what the page shows stays an ordinary
    question. A UserError: there is no such question, or nothing fits."""
    replaced = next((flags for word, flags in REPLACES.items() if word == wanted), None)
    if replaced is None:
        raise ConfigError(Message("web.unknown-max", wanted=wanted[:40], hint=meant(wanted, REPLACES)))
    said = {name: value for name, value in asked.said_flags().items() if name not in {*replaced, "tier", "allow"}}
    found, _ = answered(read_request({**said, "max": wanted}), advice=False)
    assert isinstance(found, Limit)
    if found.value is None:
        raise ConfigError(Message("web.nothing-fits"))
    if wanted == "model":
        return {"model": str(found.value), "config": "", "tier": ""}
    if wanted == "seq":
        return {"seq": str(found.value), "tier": ""}
    return {"micro-batch": str(found.value), "effective-batch": str(found.plan.effective_batch), "tier": ""}
