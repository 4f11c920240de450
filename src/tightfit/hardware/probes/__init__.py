"""The cards of this machine, by every tool that is there, at once: one module a tool, one list of cards.

Everything a tool says is text from outside: it is read strictly, what is not understood is unknown, and a tool that
hangs is left behind. See `card.py` for what is known of a card.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from tightfit.hardware.probes.amd_smi import amd_smi
from tightfit.hardware.probes.card import Answer, Card, CardProcess, Cards, together
from tightfit.hardware.probes.holders import who_is
from tightfit.hardware.probes.hy_smi import hy_smi
from tightfit.hardware.probes.nvidia import nvidia_smi, nvml
from tightfit.hardware.probes.rocm_smi import rocm_smi
from tightfit.hardware.probes.torch_probe import torch_probe


class Probe(Protocol):
    """How a tool is asked: by a moment of the monotonic clock. Not `whole`: only which cards there are."""

    def __call__(self, deadline: float, *, whole: bool = True) -> Answer: ...


PATIENCE_S = 6.0
"""For all questions to one tool."""
TOOLS: Mapping[str, Probe] = {
    "NVML": nvml,
    "nvidia-smi": nvidia_smi,
    "hy-smi": hy_smi,
    "amd-smi": amd_smi,
    "rocm-smi": rocm_smi,
}
"""The most trusted first: hy-smi stands before rocm-smi, for Hygon installs its own under both names."""


def probe_cards(patience_s: float = PATIENCE_S, *, ask_torch_until: float | None = None) -> Cards:
    """Every card, who is on it, and what went wrong; without a GPU an empty list.

    `ask_torch_until`: a moment of the monotonic clock; torch is asked until then if nobody else shows a card, and no
    driver hangs.
    """
    from concurrent.futures import ThreadPoolExecutor  # which `tightfit estimate` has no use for

    deadline = time.monotonic() + patience_s
    with ThreadPoolExecutor(max_workers=len(TOOLS)) as pool:
        answers = [future.result() for future in [pool.submit(probe, deadline) for probe in TOOLS.values()]]
    if ask_torch_until is not None and not any(answer.cards or answer.hung for answer in answers):
        answers.append(torch_probe(ask_torch_until))
    found = together(answers)
    cards = tuple(with_people(card) for card in found.cards)
    return replace(found, cards=cards, unplaced=tuple(map(_add_person, found.unplaced)))


def with_people(card: Card) -> Card:
    """The card with the user and the command of each of its processes."""
    return card if card.processes is None else replace(card, processes=tuple(map(_add_person, card.processes)))


def _add_person(process: CardProcess) -> CardProcess:
    user, command = who_is(process.pid)
    return replace(process, user=user, command=command)
