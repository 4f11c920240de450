"""The map of model size × sequence length, as the page draws it. `desk/frontier.py` computes it in a process of its
own, and whoever asks gets what is known by then.

A map is of a machine and a trainer: the model in the form is one more row of it, and what was found stays for the next
question. One process runs at a time, as long as somebody asks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightfit.desk.frontier import METHODS, MODELS, SEQUENCES, FrontierPlace
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import read_request
from tightfit.model.load import load_model
from tightfit.priced import billions
from tightfit.web.plan_answer import AddressQuestion, is_at_hand

KEEPS = ("for", "gpus", "card", "nodes", "host_ram", "nvme", "network", "link", "precision", "optimizer", "margin")
"""What of a question the map is for; all else is what it varies, or is left to the planner."""
MOST_MAPS = 16
PATIENCE_S = 10.0  # without anybody who asks


@dataclass(eq=False)
class Map:
    places: dict[tuple[str, int], FrontierPlace] = field(default_factory=dict)
    asked_at: float = 0.0
    process: subprocess.Popen[str] | None = None
    is_broken: bool = False  # it ended by itself before its end: it would again

    def lacks(self, model: str) -> bool:
        found = [self.places.get((model, sequence)) for sequence in SEQUENCES]
        return any(place is None or not place.is_whole for place in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierCell:
    place: FrontierPlace | None  # None: not known yet
    address: str  # the question that it opens
    is_here: bool

    @property
    def pace(self) -> str:
        """`3.6k`: tokens per second in a small cell."""
        if self.place is None or self.place.tokens_per_s is None:
            return ""
        pace = self.place.tokens_per_s
        return f"{pace:.0f}" if pace < 1000 else f"{pace / 1000:.1f}k" if pace < 10_000 else f"{pace / 1000:.0f}k"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierRow:
    model: str
    size: str
    is_asked: bool  # it is the model in the form
    cells: tuple[FrontierCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    sequences: tuple[int, ...]
    rows: tuple[FrontierRow, ...]
    is_whole: bool


_maps: OrderedDict[str, Map] = OrderedDict()
_lock = threading.Lock()


def look(asked: AddressQuestion) -> Frontier:
    """As far as it is known; what is missing is being computed from now on. A UserError: the question makes no
    sense."""
    base = AddressQuestion(said=tuple((name, value) for name, value in asked.said if name in KEEPS))
    said = {name: value for name, value in base.said_flags().items() if name != "model"}
    resolve_request(read_request({**said, "model": MODELS[0]}), for_others=True)
    own = asked.get("model") if asked.block is None and is_at_hand(asked) else ""
    shapes = {name: load_model(name) for name in dict.fromkeys((*MODELS, *((own,) if own else ())))}
    models = sorted(shapes, key=lambda name: shapes[name].parameters)
    with _lock:
        drawn = _maps.setdefault(base.address(), Map())
        _maps.move_to_end(base.address())
        drawn.asked_at = time.monotonic()
        lacking = [name for name in models if drawn.lacks(name)]
        is_over = drawn.is_broken or not lacking
        if not is_over and (drawn.process is None or drawn.process.poll() is not None):
            for other in _maps.values():
                _end(other)
            # What people look at first: their own model.
            _start(drawn, said, sorted(lacking, key=lambda name: name != own))
        while len(_maps) > MOST_MAPS:
            _end(_maps.popitem(last=False)[1])
    rows = []
    for name in models:
        cells = []
        for sequence in SEQUENCES:
            place = drawn.places.get((name, sequence))
            method = place.method if place is not None and place.method is not None else asked.get("method") or "full"
            changes = {"model": name, "method": "" if method == METHODS[0] else method, "seq": str(sequence)}
            is_here = name == own and asked.get("seq") == str(sequence)
            cells.append(FrontierCell(place=place, address=base.address(**changes), is_here=is_here))
        row = FrontierRow(model=name, size=billions(shapes[name].parameters), is_asked=name == own, cells=tuple(cells))
        rows.append(row)
    return Frontier(sequences=SEQUENCES, rows=tuple(rows), is_whole=is_over)


def _start(drawn: Map, said: dict[str, Any], models: list[str]) -> None:
    drawn.process = process = subprocess.Popen(
        [sys.executable, "-m", "tightfit.desk.frontier"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],  # where nothing stands in the way of our own modules
    )
    assert process.stdin is not None
    with process.stdin:
        json.dump({"said": said, "models": models, "sequences": SEQUENCES}, process.stdin)
    for work in (_read, _watch):
        threading.Thread(target=work, args=(drawn, process), name="tightfit-frontier", daemon=True).start()


def _watch(drawn: Map, process: subprocess.Popen[str]) -> None:
    """End it once nobody asks any more, in the middle of a place too: what is known by then stays known."""
    while process.poll() is None:
        left_s = drawn.asked_at + PATIENCE_S - time.monotonic()
        if left_s < 0:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(left_s, 1.0))


def _read(drawn: Map, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            place = FrontierPlace.read(line)
            known = drawn.places.get((place.model, place.sequence))
            if known is None or not known.is_whole:
                drawn.places[place.model, place.sequence] = place
    drawn.is_broken = process.wait() > 0


def _end(drawn: Map) -> None:
    if drawn.process is not None and drawn.process.poll() is None:
        drawn.process.terminate()
