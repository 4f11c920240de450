"""The search has prices of its own, `Scale` and `Clock`, which spare it much of an estimate. They must be the same.

Every field of `Levers` takes each of its words in turn, and candidates are made as the search makes them. So a lever
that only `estimate` or `pace` looks at, a new one too, shows here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from small_questions import ask, built, machine, seeded

from tightfit.memory import estimate, totals_of
from tightfit.pace import clock_of, pace
from tightfit.pace.rates import rates_of
from tightfit.pace.stream import StreamClock
from tightfit.planner.candidates import Corner
from tightfit.planner.ladder import BARE, FULL, OFFLOADED, Ladder
from tightfit.planner.question import Question
from tightfit.types import Checkpointing, Levers, Lora

search = import_module("tightfit.planner.search")  # the package has a function of this name

DEPTHS = (BARE, Checkpointing(layers=1), FULL, OFFLOADED)
OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (False, True),
    float: (0.0, 0.1),
    Checkpointing: DEPTHS,
    tuple[str, ...]: (("q_proj", "v_proj"),),
    NoneType: (None,),
}
TEXTS = {
    "deepspeed_version": ("0.14.5", "0.16.0", "0.17.0", "0.17.2", "0.18.0", "0.19.8"),
    "stage_layers": ("3,1", "1,3"),
}
"""Words of the levers that take text: one that is new must be given some here."""
LAYOUTS = {"sequence_parallel", "tensor_parallel", "pipeline_parallel", "stages_per_gpu", "expert_parallel"}
"""Two GPUs can be laid out in two, and not in more."""


def values_of(name: str, hint: Any, default: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint is int:
        usual = default or 0
        yield from dict.fromkeys((usual + 1, 2 * usual + 2, max(usual // 8, min(usual, 1))))
    elif hint is str:
        yield from TEXTS[name]
    elif hint in OTHERS:
        yield from OTHERS[hint]
    else:
        assert get_args(hint), f"what values {name} takes is not known here"
        for part in get_args(hint):
            yield from values_of(name, part, default)


def words_of(record: type, base: Any) -> Iterator[tuple[str, Any]]:
    """Each field with each of its values, the others as they are in the base."""
    for each in fields(record):
        hint = get_type_hints(record)[each.name]
        inside = next((part for part in (hint, *get_args(hint)) if is_dataclass(part) and part not in OTHERS), None)
        if isinstance(inside, type):
            within = getattr(base, each.name)
            for word, made in words_of(inside, within) if within is not None else ():
                yield f"{each.name}.{word}", replace(base, **{each.name: made})
        else:
            for value in values_of(each.name, hint, getattr(base, each.name)):
                yield f"{each.name}={value}", replace(base, **{each.name: value})


def compare(question: Question, seed: int, stride: int) -> int:
    """Of one strategy in `stride` two candidates by the same clock, and the weights of the second. How many there
    were."""
    compared, shape, hardware = 0, question.shape, question.hardware
    strategies = search.list_strategies(question)
    for strategy in strategies[seed % stride :: stride] or strategies:
        every: list[Corner] = list(search._corners(question, strategy))
        clock = None if strategy.streams else clock_of(shape, strategy, hardware)
        depth = DEPTHS[(seed + compared) % len(DEPTHS)]
        for corner in seeded(seed + compared).sample(every, min(2, len(every))):
            chosen = depth if depth.offload else replace(corner.rest.checkpointing, layers=depth.layers)
            levers = replace(corner.levers, checkpointing=chosen) if corner.searched else corner.levers
            if corner.searched and not depth.offload:
                step_s = pace(shape, levers, hardware).step_s
                if clock is None:
                    streaming = StreamClock(shape, corner.levers, hardware, rates_of(hardware, levers.precision))
                    timed_s = streaming.seconds(levers.checkpointing, levers.resident)
                else:
                    times, layers = clock.times(corner.rest, corner.choice), levers.checkpointing.layers
                    timed_s = times[-1 if layers is None else layers]
                assert timed_s == pytest.approx(step_s, rel=1e-12), levers
        if every:
            scale, depth = Ladder(question, corner).scale, levers.checkpointing
            footprint = estimate(shape, levers, hardware.world, hardware)
            totals = totals_of(footprint)
            assert scale.totals(depth) == totals, levers
            at_loss, at_top = scale.floor.held(depth)
            # of a pipeline's floor each depth may be another GPU's
            most = footprint.gpu.phases["loss"].total_bytes if levers.pipeline_parallel == 1 else totals.peak
            assert at_loss <= most, levers
            assert at_top <= footprint.gpu.phases["backward"].total_bytes, levers
            assert scale.floor.after <= footprint.gpu.peak_bytes, levers
            compared += 1
    return compared


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_search_prices_what_estimate_prices(stride: int) -> None:
    seen: dict[str, int] = {}
    for family, method in (("llama", "lora"), ("mamba", "full"), ("qwen3_moe", "full")):
        shape = built(family, 4, 2048, 50_000, family == "llama")
        question = ask(shape, machine("2x24GB", "64GB", "1TB"), method=method, effective_batch=8)
        for number, (word, levers) in enumerate(words_of(Levers, question.base)):
            name = word.partition("=")[0].partition(".")[0]
            base = replace(levers, lora=None if levers.method == "full" else levers.lora or Lora())
            if base.stages_per_gpu > 1 or base.stage_layers:
                base = replace(base, pipeline_parallel=2)
            asked = replace(question, base=base, pinned=frozenset({name}))
            seen[word] = seen.get(word, 0) + compare(asked, number, stride)
    assert {word.partition("=")[0].partition(".")[0] for word in seen} == {each.name for each in fields(Levers)}
    unseen = {word for word, count in seen.items() if not count}  # no model could show it
    assert {word.partition("=")[0] for word in unseen} <= LAYOUTS, unseen
    assert {name for name in LAYOUTS if f"{name}=2" not in unseen} == LAYOUTS, unseen
