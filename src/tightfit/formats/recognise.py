"""Whose file is it? Told by its keys.

A key that only one program has weighs most. One that is merely misspelt still counts a little, so that a file with
nothing but `zero_optimisation` in it finds its way to the rule that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.formats.dialect import Dialect, kinds
from tightfit.formats.document import Document, read_document
from tightfit.formats.worker.read import is_workers
from tightfit.inputs.spelling import nearest, read_tables
from tightfit.job.known import KnownConfig, completed
from tightfit.messages import Choice, Listing, Message
from tightfit.types import ConfigError, UserError

_TELLS, _HINTS = 4, 2
"""What a key weighs that only one program has, and one that hints at it; one that several have weighs 1."""
_MOST_FOREIGN = 4  # so many keys may be slips or a script's own, whatever their share


def recognise(document: Document) -> Dialect:
    """Whose file it is, or an error that says how to name it."""
    values, known = document.values, tuple(kinds().values())
    if is_workers(values):
        return kinds()["job"]
    if (trainer := name_declined_program(values)) is not None:
        kept = Listing((each.title for each in known), "and")
        raise ConfigError(Message("lint.declined", file=document.path.name, trainer=trainer, kinds=kept))
    for each in known:
        if each.claims(values):
            return each
    scores = {each.name: sum(_weight(key, each) for key in values) for each in known}
    best = max(scores.values())
    likely = [each for each in known if scores[each.name] == best]
    likely = [each for each in likely if each.extends not in {other.name for other in likely}]
    if best < 1 or len(likely) > 1:
        raise ConfigError(Message("lint.not-told", file=document.path.name, kinds=Choice(kinds())))
    foreign = [key for key in values if not _weight(key, likely[0])]
    mostly = len(foreign) >= _MOST_FOREIGN and 2 * len(foreign) > len(values)
    barely = bool(foreign) and best < _TELLS and likely[0].is_mixed
    if mostly or barely:
        keys = Listing(foreign[:3])
        raise ConfigError(Message("lint.none-of-these", file=document.path.name, keys=keys, kinds=Choice(kinds())))
    return likely[0]


def _weight(key: str, dialect: Dialect) -> int:
    if key in dialect.telling:
        return _TELLS
    if key in dialect.keys:
        return _HINTS if key in dialect.hinting else 1
    return 1 if nearest(key, dialect.telling, cutoff=0.85) else 0


# --------------------------------------------------------------------------------------------------
# Configs of trainers that lint does not know, told by keys that are theirs alone.
#
# Their keys overlap with those of LLaMA-Factory and TrainingArguments, so that a file would be taken for one of these
# and every other line of it for a mistake. Such a file is declined in one sentence.


DECLINED = read_tables(Path(__file__).with_name("declined.txt"))
"""The name of a trainer, keys that its file always has, and how many it has at least of its own, which follow."""

_LLAMAFACTORYS = frozenset("template stage cutoff_len lora_target quantization_bit do_train".split())


def name_declined_program(values: Mapping[str, Any]) -> str | None:
    """Whose config it is, where it is somebody's whom lint does not know."""
    keys = set(values)
    if "finetuning_type" in keys or ("model_name_or_path" in keys and keys & _LLAMAFACTORYS):
        return None
    for heading, own in DECLINED.items():
        name, needs, least = heading.split(" | ")
        if set(needs.split()) <= keys and len(keys & set(own)) >= int(least):
            return name
    return None


# --------------------------------------------------------------------------------------------------
# What a user's own config file says, as far as it decides which fixes are open: any trainer's, or a job file.
#
# Nothing is checked here; `tightfit lint` does that. A value that cannot be read is one that is not known.


def read_known_config(path: Path) -> KnownConfig:
    """The settings in a file of any dialect, and in the DeepSpeed file that it names, or holds."""
    document = read_document(path)
    dialect = recognise(document)
    known = dialect.known(document.values)
    if dialect.deepspeed_at is not None and (named := document.at(dialect.deepspeed_at)) is not None:
        values: Mapping[str, Any] = named if isinstance(named, dict) else {}
        folder = path.parent
        for place in (named, folder / named, folder / Path(named).name) if isinstance(named, str) else ():
            with suppress(UserError):
                values = read_document(Path(place)).values
                break
        known = completed(known, kinds()["deepspeed"].known(values))
    return replace(known, trainer=dialect.name, file=document.shown_path)
