"""The short and the older words for how often a checkpoint is written and how many stay.

`every: 500` and `every: 10m` are one field to a person and two to the worker; `keep` and `save_total_limit` are names
that files have. They are turned into the fields of `Saving` before anything is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.inputs.spelling import LARGEST, as_number, shown
from tightfit.inputs.times import seconds_in
from tightfit.job.text import name_in
from tightfit.messages import Message
from tightfit.types import ConfigError

EVERY = "every"
FIELDS = ("every_steps", "every_minutes")
"""What `every` is short for."""
OTHER_NAMES = {"keep": "keep_last", "save_total_limit": "keep_last", "async": "async_save"}
NEVER = ("none", "never", "null")


def translate_saving(
    saving: Mapping[str, Any], names: Mapping[str, str], file: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The block in the fields of `Saving`, and how sentences are to call those that had another name.

    `names`: the dotted path of a field → what the user wrote, where that is not the path; `file`: where, if in one.
    """
    block = dict(saving)
    called: dict[str, str] = {}
    for old, new in OTHER_NAMES.items():
        if old in block:
            name = names.get(f"saving.{old}", f"saving.{old}")
            if new in block:
                raise _twice(name, names.get(f"saving.{new}", called.get(new, f"saving.{new}")), file)
            block[new] = block.pop(old)
            called[new] = name
    if EVERY in block:
        name = names.get(f"saving.{EVERY}", f"saving.{EVERY}")
        for field in FIELDS:
            if field in block:
                raise _twice(name, names.get(f"saving.{field}", f"saving.{field}"), file)
        steps, minutes = every(block.pop(EVERY), name, file)
        block |= {"every_steps": steps, "every_minutes": minutes}
        called |= dict.fromkeys(FIELDS, name)
    return block, {f"saving.{field}": name for field, name in called.items()}


def every(value: object, name: str, file: str | None = None) -> tuple[int | None, float | None]:
    """Steps and minutes between two checkpoints, of which one is None: of `500`, `10m`, `none`."""
    if value is None or (isinstance(value, str) and value.strip().lower() in NEVER):
        return None, None
    number = as_number(value.replace("_", "")) if isinstance(value, str) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and 1 <= number <= LARGEST:
        if float(number).is_integer():
            return int(number), None
    elif isinstance(value, str):
        seconds = seconds_in(value)
        if seconds is not None and 1 <= seconds <= LARGEST:
            return None, seconds / 60
    must = Message("job.steps-or-time")
    called = name_in(name, file)
    raise ConfigError(Message("inputs.must-be", name=called, must=must, value=shown(value), hint=None), at=name)


def _twice(name: str, other: str, file: str | None) -> ConfigError:
    return ConfigError(
        Message("job.said-twice", name=name, other=other, file=file, fix=Message("job.keep-one")), at=name
    )
