"""Whose file is it? Told by its keys.

A key that only one program has weighs most. One that is merely misspelt still counts a little, so that a file with
nothing but `zero_optimisation` in it finds its way to the rule that says so.
"""

from __future__ import annotations

from tightfit.formats.declined import name_declined_program
from tightfit.formats.dialect import Dialect
from tightfit.formats.document import Document
from tightfit.formats.registry import kinds
from tightfit.formats.worker.keys import is_workers
from tightfit.inputs.spelling import nearest
from tightfit.messages import Choice, Listing, Message
from tightfit.types import ConfigError

_TELLS, _HINTS = 4, 2
"""What a key weighs that only one program has, and one that hints at it; one that several have weighs 1."""
_MOST_FOREIGN = 4
"""So many keys may be slips or a script's own, whatever their share."""


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
