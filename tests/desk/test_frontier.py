"""The map of sizes and lengths says what a plan says of each place alone."""

from __future__ import annotations

import pytest

from tightfit.desk.frontier import METHODS, FrontierPlace, explore
from tightfit.desk.plan import answered
from tightfit.desk.request import read_request
from tightfit.planner.plan import Plan
from tightfit.priced import strategy_name

MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
SEQUENCES = (1024, 65_536)


@pytest.mark.thorough
def test_a_place_has_the_method_and_the_way_of_its_plan() -> None:
    said = {"gpus": "1x6GB", "host_ram": "12GB"}
    told = list(explore(said, MODELS, SEQUENCES))
    count = len(MODELS) * len(SEQUENCES)
    first = {(place.model, place.sequence): place for place in told[:count]}
    found = first | {(place.model, place.sequence): place for place in told[count:]}
    assert all(place.way is None for place in first.values()), "what fits is known before how fast it is"
    for (model, sequence), place in found.items():
        assert place.is_whole
        assert place.method == first[model, sequence].method
        assert FrontierPlace.read(place.line()) == place
        for method in METHODS:
            request = read_request({**said, "model": model, "method": method, "seq": sequence})
            plan, _ = answered(request, advice=False)
            assert isinstance(plan, Plan)
            assert plan.fits is (method == place.method), (model, sequence, method)
            if plan.chosen is not None:
                assert place.way == strategy_name(plan.chosen.levers)
                assert place.tokens_per_s == plan.chosen.pace.tokens_per_s
                break
    assert {place.method for place in found.values()} == {"full", "lora", "qlora", None}


def test_what_a_trainer_cannot_do_is_no_method() -> None:
    told = list(explore({"gpus": "1x80GB", "optimizer": "nonsense"}, MODELS[:1], SEQUENCES[:1]))
    assert [place.method for place in told] == [None]
