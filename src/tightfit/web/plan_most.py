"""The question turned round, for the page: the longest sequence, the largest micro batch or preset that fits.

The answer is that of `tightfit plan --max`. It comes as values for the form, so that what the page shows and what its
address says stay an ordinary question, to be changed further.
"""

from __future__ import annotations

from typing import get_args

from tightfit.desk.plan import answered, check_flags
from tightfit.inputs.flags import meant
from tightfit.planner.limits import Limit, Wanted
from tightfit.types import ConfigError
from tightfit.web.plan_question import AddressQuestion

ASKED_FOR: dict[str, tuple[str, ...]] = {
    "seq": ("seq",),
    "micro-batch": ("micro_batch", "effective_batch"),
    "model": ("model",),
}
"""The flags in whose place the answer comes."""


def most_of(asked: AddressQuestion, wanted: str) -> dict[str, str]:
    """The fields of the form to set, by name. A UserError: there is no such question, or nothing fits."""
    if wanted not in ASKED_FOR:
        raise ConfigError(f"--max knows no {wanted[:40]!r}{meant(wanted, get_args(Wanted))}")
    args = asked.args()
    for name in (*ASKED_FOR[wanted], "tier", "allow"):
        if hasattr(args, name):
            delattr(args, name)
    args.max = wanted
    check_flags(args)
    found, _ = answered(args, advice=False)
    assert isinstance(found, Limit)
    if found.value is None:
        raise ConfigError("not even the smallest fits: plan for more GPUs or larger ones, or for LoRA")
    if wanted == "model":
        return {"model": str(found.value), "config": "", "tier": ""}
    if wanted == "seq":
        return {"seq": str(found.value), "tier": ""}
    return {"micro-batch": str(found.value), "effective-batch": str(found.plan.effective_batch), "tier": ""}
