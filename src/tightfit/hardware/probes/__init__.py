"""The cards of this machine, by every tool that is there, at once: one module a tool, one list of cards.

Everything a tool says is text from outside: it is read strictly, what is not understood is unknown, and a tool that
hangs is left behind. See `card.py` for what is known of a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tightfit.hardware.probes import nvidia, rocm_smi
from tightfit.hardware.probes.amd_smi import amd_smi
from tightfit.hardware.probes.card import Card, CardProcess, Cards, together
from tightfit.hardware.probes.libraries import nvml, torch_cards
from tightfit.hardware.probes.tools import HungTool, Silent, ask_by, place_of

PATIENCE_S = 6.0  # for all questions to one tool
TOOLS: Mapping[str, Callable[[float, bool], Cards]] = {
    "NVML": nvml,
    "nvidia-smi": nvidia.nvidia_smi,
    "hy-smi": partial(rocm_smi.probe, "hy-smi", "hygon"),
    "amd-smi": amd_smi,
    "rocm-smi": partial(rocm_smi.probe, "rocm-smi", "amd"),
}
"""The most trusted first: hy-smi stands before rocm-smi, for Hygon installs its own under both names."""
_LONGEST = 60  # characters of a command that tell it from others


def ask_tool(tool: str, deadline: float, *, whole: bool = True) -> Cards:
    """What one tool says, by `deadline` of the monotonic clock; not `whole`: only which cards there are."""
    try:
        return replace(TOOLS[tool](deadline, whole), tools=(tool,))
    except Silent as silence:
        return Cards(problems=tuple(filter(None, [silence.said])), hung=isinstance(silence, HungTool))


def probe_cards(patience_s: float = PATIENCE_S, *, ask_torch_until: float | None = None) -> Cards:
    """Every card, who is on it, and what went wrong; without a GPU an empty list.

    `ask_torch_until`: a moment of the monotonic clock; torch is asked until then if nobody else shows a card, and no
    driver hangs.
    """
    from concurrent.futures import ThreadPoolExecutor  # which `tightfit estimate` has no use for

    deadline = time.monotonic() + patience_s
    with ThreadPoolExecutor(max_workers=len(TOOLS)) as pool:
        answers = list(pool.map(lambda tool: ask_tool(tool, deadline), TOOLS))
    if ask_torch_until is not None and not any(answer.cards or answer.hung for answer in answers):
        answers.append(torch_cards(ask_torch_until))
    found = together(answers)
    unplaced = tuple(map(name_process, found.unplaced))
    return replace(found, cards=tuple(map(with_people, found.cards)), unplaced=unplaced)


def with_people(card: Card) -> Card:
    """The card with the user and the command of each of its processes."""
    return card if card.processes is None else replace(card, processes=tuple(map(name_process, card.processes)))


def name_process(process: CardProcess) -> CardProcess:
    """The process with its user and its command, from /proc; one of another container is a number alone.

    The command is short, and in letters that a terminal can show. It is cut between words: whoever strikes out secrets
    knows a token by its whole form.
    """
    place = Path("/proc", str(process.pid))
    try:
        try:
            user = place.owner()
        except KeyError:
            user = str(place.stat().st_uid)
        parts = place.joinpath("cmdline").read_bytes().split(b"\0")
    except OSError:
        return process
    text = " ".join(part.decode(errors="replace") for part in parts if part)
    command = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if len(command) > _LONGEST:
        words = command[: _LONGEST - 1].rpartition(" ")[0]
        command = (words or command[: _LONGEST - 2]).rstrip() + " …"
    return replace(process, user=user, command=command or None)


def probe_links(deadline: float) -> tuple[nvidia.Link, ...]:
    """How the cards reach each other, by the first of these tools that is installed."""
    questions = {"nvidia-smi": nvidia.TOPOLOGY, "hy-smi": rocm_smi.TOPOLOGY, "rocm-smi": rocm_smi.TOPOLOGY}
    tool = next(filter(place_of, questions), None)
    with suppress(Silent):
        return nvidia.parse_links(ask_by(deadline, tool, *questions[tool])) if tool else ()
    return ()
