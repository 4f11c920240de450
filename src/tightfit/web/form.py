"""The form of the Plan view: what its boxes offer, and how it speaks of what is wrong in it.

Messages name flags, as the command line has them. Whoever looks at a form has never typed one: there a flag is called
by the label of its field, and the field that an error is about is marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, get_args

from tightfit.hardware.catalogue import CARDS
from tightfit.inputs.flags import LEVERS, words_of
from tightfit.job import Allowance
from tightfit.messages import Message, Said, id_of
from tightfit.model.load import load_model
from tightfit.model.presets import CHECKPOINTS, PRESETS, PUBLISHED
from tightfit.planner.tiers import TIERS
from tightfit.priced import billions
from tightfit.types import Checkpointing, HardwareError, ModelError, Trainer, UserError
from tightfit.web import plan_answer
from tightfit.web.words import Words

SIZES = ("16GB", "24GB", "32GB", "40GB", "48GB", "80GB", "96GB")
_FLAG = re.compile(r"`?--([a-z][a-z0-9-]*)`?")
_FLAG_OR_COMMAND = re.compile(rf"tightfit [a-z]+(?: [^\s,;:.)，；：。）]+)*|{_FLAG.pattern}")
_GAP = re.compile(r"(?<=[\u4e00-\u9fff]) (?=“)")  # Chinese has a space before a flag, and none before a quotation mark
_UNIT = re.compile(r" ?[(（]")  # what a label adds in brackets
_OTHER_NAMES = {"gpus": "card", "num_gpus": "gpus"}  # flags that the form calls otherwise
_ABOUT: Mapping[str, str] = {
    "web.most-gpus": "gpus",
    "web.one-node": "nodes",
    "web.most-sequences": "effective_batch",
    "web.tier-all": "tier",
    "plan.uneven-batch": "effective_batch",
    "desk.margin-is-share": "margin",
}
"""Messages that have no flag among their fields, and the field of the form that they are about."""


class Suggestion(NamedTuple):
    """A line of a box that searches: what is put into the box, and what stands beside it."""

    value: str
    parameters: str = ""
    family: str = ""  # as transformers calls it
    is_shape: bool = False  # it has no weights


@cache
def offer_models() -> tuple[Suggestion, ...]:
    """Public models first, for those are what people train; each with its size and family, which are searched too."""
    found = []
    for name in (*CHECKPOINTS, *PUBLISHED, *PRESETS):
        shape = load_model(name)
        found.append(Suggestion(name, billions(shape.parameters), shape.model_type, name in PRESETS))
    return tuple(found)


def offer_cards() -> list[str]:
    return list(dict.fromkeys(f"{card.family.replace(' ', '')}-{card.size_gib}GB" for card in CARDS))


def form_values(pairs: Sequence[tuple[str, str]]) -> dict[str, object]:
    """All that the form's template shows."""
    filled = plan_answer.fill_form(pairs)
    more = (*(lever.flag for lever in plan_answer.PINS), "margin")
    return {
        "values": {**filled, "compare": dict(pairs).get("compare", "")[: plan_answer.MOST_WORD]},
        "pins": plan_answer.PINS,
        "is_more_said": any(filled[name] for name in more),
        "allowed": {each for name, value in pairs if name == "allow" for each in value.split(",")},
        "allowances": get_args(Allowance),
        "tiers": TIERS,
        "trainers": get_args(Trainer),
        "choices": {name: words_of(lever) for name, lever in LEVERS.items() if lever.type is not Checkpointing},
        "models": offer_models(),
        "sizes": SIZES,
        "cards": offer_cards(),
        "machine": plan_answer.find_machine(),
        "offered": list(plan_answer.OFFERED),
        "usual_model": plan_answer.MODEL,
        "most_bytes": plan_answer.MOST_CONFIG_BYTES,
    }


def by_label(text: str, words: Words) -> str:
    """The text, in which the form's fields are called by their labels: `--seq` → “Sequence length”. What is to be typed
    in a terminal stays as it is."""

    def label(found: re.Match[str]) -> str:
        name = _as_field(found[1] or "")
        return f"“{_UNIT.split(words['plan'][name])[0]}”" if name else found[0]

    return _GAP.sub("", _FLAG_OR_COMMAND.sub(label, text))


def field_of(error: UserError, pairs: Sequence[tuple[str, str]]) -> str:
    """The field of the form that an error is about, as its element is called; empty: none, or nobody knows."""
    said = error.said
    name = _ABOUT.get(id_of(said) or "") or _field_in(said)
    if name is None and isinstance(error, ModelError):
        name = "config" if any(key == "config" and value.strip() for key, value in pairs) else "model"
    if name is None and isinstance(error, HardwareError):
        name = "card"
    return (name or "").replace("_", "-")


def _field_in(said: Said) -> str | None:
    """Of the first flag that a message has among its fields."""
    values = said.fields.values() if isinstance(said, Message) else ()
    flags = (_FLAG.fullmatch(value.partition(" ")[0]) for value in values if isinstance(value, str))
    return next((name for flag in flags if flag and (name := _as_field(flag[1]))), None)


def _as_field(flag: str) -> str | None:
    name = flag.replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    return name if name in plan_answer.FIELDS else None
