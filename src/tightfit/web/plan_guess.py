"""A first word while every way is priced: what those that were shown last would need for the new question.

One estimate takes milliseconds and a search some tenths of a second, and whoever moves a slider looks at it meanwhile.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan_request import resolve_request
from tightfit.inputs.flags import LEVERS, check_levers
from tightfit.pace import pace
from tightfit.planner import question_of
from tightfit.planner.plan import Bounds, Way
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.types import Checkpointing, Levers, UserError
from tightfit.web.plan_answer import Answered
from tightfit.web.plan_question import AddressQuestion

_FREE = {lever.block or lever.name for lever in LEVERS.values() if lever.free}
_OWN = tuple(each.name for each in fields(Levers) if each.name not in _FREE - {"deepspeed_version"})
"""The levers that the question decides: the user's, and what follows from the job and what is installed."""


def guessed(asked: AddressQuestion, last: Answered) -> Answered:
    """An answer with the ways of the last one, of which nobody has chosen any yet. A UserError: the question makes no
    sense."""
    request = asked.request()
    settled = resolve_request(request, for_others=True)
    known = Bounds(calibration=calibration_of(request, settled.job))
    question = question_of(settled.job, settled.shape, settled.hardware).within(known)
    shown = [way.levers for way in last.ways] or [question.base]
    first = _price(question, shown[0])
    others = []
    for levers in shown[1:]:
        with suppress(UserError):  # it does not go with what was just named
            others.append(_price(question, levers))
    plan = replace(
        last.plan,
        job=settled.job,
        shape=question.shape,
        hardware=question.hardware,
        effective_batch=question.effective_batch,
        chosen=None,
        alternatives=(first, *others),
        because=(),
        remedies=(),
    )
    return Answered(asked, plan)


def _price(question: Question, last: Levers) -> Way:
    levers = _levers(question, last)
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


def _levers(question: Question, last: Levers) -> Levers:
    own = question.base
    named = {name: getattr(own, name) for name in (*_OWN, *question.pinned)}
    levers = replace(last, **named)
    if (levers.checkpointing.layers or 0) > question.shape.n_layers:
        levers = replace(levers, checkpointing=Checkpointing(layers=None))
    each = max(1, question.effective_batch // question.hardware.world)
    micro = next(size for size in range(min(levers.micro_batch, each), 0, -1) if each % size == 0)
    return replace(levers, micro_batch=micro, accumulation=each // micro)
