"""The question turned round, for the page: the longest sequence, the largest micro batch or preset that fits.

The answer is that of `tightfit plan --max`. It comes as values for the form, so that what the page shows and what its
address says stay an ordinary question, to be changed further.
"""

from __future__ import annotations

from tightfit.desk.plan import answered
from tightfit.desk.request import REPLACES, read_request
from tightfit.inputs.flags import meant
from tightfit.messages import Message
from tightfit.planner.limits import Limit
from tightfit.types import ConfigError
from tightfit.web.plan_question import AddressQuestion


def most_of(asked: AddressQuestion, wanted: str) -> dict[str, str]:
    """The fields of the form to set, by name. A UserError: there is no such question, or nothing fits."""
    replaced = {word: flags for word, flags in REPLACES.items() if word == wanted}
    if not replaced:
        raise ConfigError(Message("web.unknown-max", wanted=wanted[:40], hint=meant(wanted, REPLACES)))
    aside = {*next(iter(replaced.values())), "tier", "allow"}
    said = {name: value for name, value in asked.said_flags().items() if name not in aside}
    found, _ = answered(read_request({**said, "max": wanted}), advice=False)
    assert isinstance(found, Limit)
    if found.value is None:
        raise ConfigError(Message("web.nothing-fits"))
    if wanted == "model":
        return {"model": str(found.value), "config": "", "tier": ""}
    if wanted == "seq":
        return {"seq": str(found.value), "tier": ""}
    return {"micro-batch": str(found.value), "effective-batch": str(found.plan.effective_batch), "tier": ""}
