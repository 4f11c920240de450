"""How large a model, and how long its sequences: what one machine can train, and by which method.

    python -m tightfit.desk.frontier < question.json

The page draws it while people go on asking, so it is a process of its own: a search would hold the interpreter's lock.
It goes over the map twice. First only whether anything fits is asked, of the candidates that hold least; more tokens
never need less memory, so for each model and method that is a bisection. Then the fastest way of each place is found,
as `tightfit plan` finds it. Every place is told as soon as it is known: a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan import answered, bounds_of
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import Request, read_request
from tightfit.messages import Said, as_json, from_json
from tightfit.planner import question_of
from tightfit.planner.plan import Plan
from tightfit.planner.search import something_fits
from tightfit.priced import strategy_name
from tightfit.types import UserError

MODELS = tuple(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"))
"""One family in all its sizes, so that the size is what differs."""
SEQUENCES = tuple(2**power for power in range(10, 17))
METHODS = ("full", "lora", "qlora")
"""The one that changes most of the model first: it is what is shown where several fit."""
NICENESS = 10  # whoever asks something else meanwhile comes first


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPlace:
    """What is known of one model and one length of sequences."""

    model: str
    sequence: int
    method: str | None  # the first of `METHODS` that fits; None: none does
    way: Said | None = None  # the fastest that fits; None: not known yet, or none
    tokens_per_s: float | None = None  # None: no pace is claimed
    uses_host: bool = False  # weights or optimizer states rest in the host's memory

    @property
    def is_whole(self) -> bool:
        return self.method is None or self.way is not None

    def line(self) -> str:
        return json.dumps({**asdict(replace(self, way=None)), "way": as_json(self.way)})

    @classmethod
    def read(cls, line: str) -> FrontierPlace:
        told = json.loads(line)
        return cls(**{**told, "way": None if told["way"] is None else from_json(told["way"])})


def explore(said: Mapping[str, Any], models: Sequence[str], sequences: Sequence[int]) -> Iterator[FrontierPlace]:
    """Every place twice: with its method, and once more with its way where there is one. `said`: the flags of
    `tightfit plan`, less model, method and sequence."""
    found: list[FrontierPlace] = []
    reach = dict.fromkeys(METHODS, len(sequences))
    for model in models:
        reach = _find_reach(said, model, sequences, reach)
        for number, sequence in enumerate(sequences):
            method = next((method for method, longest in reach.items() if number < longest), None)
            found.append(FrontierPlace(model=model, sequence=sequence, method=method))
            yield found[-1]
    for place in found:
        if place.method is not None:
            yield _find_way(said, place)


def _find_reach(
    said: Mapping[str, Any], model: str, sequences: Sequence[int], before: Mapping[str, int]
) -> dict[str, int]:
    """How many of the lengths, the shortest first, each method can train; what an earlier method can is not asked of a
    later one. `before`: what it was for another model, where it is looked for first."""
    reach: dict[str, int] = {}
    low = 0
    for method in METHODS:
        high, middle = len(sequences), before[method]
        while low < high:
            middle = min(max(middle, low), high - 1)
            fits = _fits(_ask(said, model, method, sequences[middle]))
            low, high = (middle + 1, high) if fits else (low, middle)
            middle = (low + high) // 2
        reach[method] = low
    return reach


def _ask(said: Mapping[str, Any], model: str, method: str, sequence: int) -> Request:
    return read_request({**said, "model": model, "method": method, "seq": sequence})


def _fits(request: Request) -> bool:
    """Whether a plan would find anything; what a trainer or an optimizer does not do with a method fits nowhere."""
    try:
        settled = resolve_request(request, for_others=True)
        bounds = bounds_of(settled.job, None, calibration_of(request, settled.job))
        return something_fits(question_of(settled.job, settled.shape, settled.hardware).within(bounds))
    except UserError:
        return False


def _find_way(said: Mapping[str, Any], place: FrontierPlace) -> FrontierPlace:
    assert place.method is not None
    with suppress(UserError):
        plan, _ = answered(_ask(said, place.model, place.method, place.sequence), advice=False)
        if isinstance(plan, Plan) and (way := plan.chosen) is not None:
            levers = way.levers
            return replace(
                place,
                way=strategy_name(levers),
                tokens_per_s=way.pace.tokens_per_s if way.is_paced else None,
                uses_host=levers.streams or {levers.offload_optimizer, levers.offload_param} != {"none"},
            )
    return replace(place, method=None)


def main() -> None:
    os.nice(NICENESS)
    asked = json.load(sys.stdin)
    with suppress(BrokenPipeError):  # nobody looks at it any more
        for place in explore(asked["said"], asked["models"], asked["sequences"]):
            sys.stdout.write(f"{place.line()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
