"""torch's own view of the cards, from a process of its own: the last resort, where no maker's tool is at hand.

To import torch takes seconds, so it is asked only where nothing else shows a card and its build has a use for one.
"""

from __future__ import annotations

import re
import sys
import time

from tightfit.hardware.probes.card import Answer, Card, complete_sizes
from tightfit.hardware.probes.readings import size, total, words
from tightfit.hardware.probes.shapes import tree_of
from tightfit.hardware.probes.tools import HungTool, Silent, run
from tightfit.messages import Message

_HYGON = ("gfx926", "gfx928", "gfx936")
"""Architectures that no card of AMD has."""
_SCRIPT = """
import json, torch
cards = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        try:
            free = torch.cuda.mem_get_info(index)[0]
        except Exception:
            free = None
        arch = getattr(known, "gcnArchName", None) if torch.version.hip else f"sm_{known.major}{known.minor}"
        cards.append({"index": index, "name": known.name, "total": known.total_memory, "free": free, "arch": arch})
print(json.dumps({"hip": torch.version.hip, "cards": cards}))
"""


def torch_probe(deadline: float) -> Answer:
    """What torch says, by `deadline` of the monotonic clock."""
    left = deadline - time.monotonic()
    if left <= 0:
        return Answer(tool="torch")
    try:
        return parse_torch(run("torch", [sys.executable, "-c", _SCRIPT], timeout_s=left))
    except HungTool:
        return Answer(tool="torch", problem=Message("machine.torch-too-slow"))
    except Silent as silence:
        return Answer(tool="torch", problem=silence.said)


def parse_torch(text: str) -> Answer:
    """The cards in what the process prints; none in garbage."""
    tree = tree_of(text)
    if not isinstance(tree, dict) or not isinstance(tree.get("cards"), list):
        return Answer(tool="torch")
    is_hip = isinstance(tree.get("hip"), str)
    cards = [_card(each, is_hip=is_hip) for each in tree["cards"] if isinstance(each, dict)]
    kept = {card.index: card for card in reversed(cards) if card is not None}
    return Answer(tool="torch", cards=tuple(kept[index] for index in sorted(kept)))


def _card(told: dict[str, object], *, is_hip: bool) -> Card | None:
    index = told.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1024:
        return None
    arch = re.match("sm_[0-9]{2,3}|gfx[0-9a-f]{3,5}", words(told.get("arch")) or "")
    name = words(told.get("name"))
    hygon = is_hip and arch is not None and arch[0] in _HYGON
    return complete_sizes(
        Card(
            index=index,
            vendor="hygon" if hygon else "amd" if is_hip else "nvidia",
            name=name,
            arch=arch[0] if arch else None,
            total_bytes=total(told.get("total"), "B"),
            free_bytes=size(told.get("free"), "B"),
        )
    )
