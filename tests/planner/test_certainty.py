"""Ways that cannot be told apart by what is known: which is chosen, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_questions import GIB, ask, built, machine

import tightfit.planner as planner
from tightfit.job import Job
from tightfit.messages import Message, id_of
from tightfit.planner.certainty import choose, find_merit, tell_apart
from tightfit.planner.plan import Plan, Way
from tightfit.planner.search import search
from tightfit.priced import seconds_words
from tightfit.types import Pace, RateUsed


def pace_of(step_s: float, **open_s: float) -> Pace:
    rates = {
        name: RateUsed(value=1.0, source="data sheet", spread=0.1, open_s=seconds) for name, seconds in open_s.items()
    }
    return Pace(step_s=step_s, tokens_per_s=1 / step_s, causes={"arithmetic": step_s}, rates=rates)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pace_of(1.0), pace_of(1.001), (False, "")),  # no rate is said to be open, but the model is never so sure
        (pace_of(1.0), pace_of(1.04), (True, "")),
        (pace_of(1.0, link=0.02), pace_of(1.04), (True, "")),  # little beside the model
        (pace_of(1.0, products=0.5), pace_of(1.1, products=0.5), (True, "")),  # both alike
        (pace_of(1.0, products=0.5), pace_of(1.1, products=0.45, launch=0.2), (False, "launch")),
        (pace_of(1.1, products=0.45, launch=0.2), pace_of(1.0, products=0.5), (False, "launch")),
        (pace_of(1.0, link=0.03), pace_of(1.1, host_optimizer=0.04), (True, "host_optimizer")),
    ],
)
def test_what_is_open_is_what_both_do_not_share(one: Pace, other: Pace, expected: tuple[bool, str]) -> None:
    assert tell_apart(one, other)[:2] == expected


def two_ways() -> tuple[Way, Way]:
    """That fit: of ZeRO-2, and of ZeRO-3, which has more moving parts."""
    found = search(ask(built("llama", 4, 512, 5000, True), machine("2x24GB"), levers={"attention": "sdpa"})).ways
    by_engine = {way.levers.engine: way for way in found if way.fits and way.levers.offload_optimizer == "none"}
    return by_engine["zero2"], by_engine["zero3"]


@pytest.mark.parametrize(
    ("simple", "complex_one", "chosen"),
    [
        (pace_of(1.04, launch=0.1), pace_of(1.0), "zero2"),  # within what is open
        (pace_of(1.04, launch=0.01), pace_of(1.0), "zero3"),
        (pace_of(1.02), pace_of(1.0), "zero2"),  # within what the model leaves open
        (pace_of(1.07, launch=0.5), pace_of(1.0), "zero3"),  # too much to lose
        (pace_of(1.0), pace_of(1.03, launch=0.5), "zero2"),
        (pace_of(1.04), pace_of(1.0), "zero3"),  # whose rates say nothing
    ],
)
def test_the_simpler_of_two_that_cannot_be_told_apart_is_chosen(simple: Pace, complex_one: Pace, chosen: str) -> None:
    zero2, zero3 = two_ways()
    for ways in ([zero2, zero3], [zero3, zero2]):
        paces = {"zero2": simple, "zero3": complex_one}
        found = choose(replace(way, pace=paces[way.levers.engine]) for way in ways)
        assert found is not None
        assert found.levers.engine == chosen
    assert choose([replace(zero2, fits=False)]) is None


@pytest.mark.parametrize(
    ("zero2_s", "zero2_gib", "zero3_s", "zero3_gib", "chosen", "merit"),
    [
        (1.0, 118, 1.02, 39, "zero3", "ram"),
        (1.02, 118, 1.0, 39, "zero3", "ram"),
        (1.02, 39, 1.0, 118, "zero2", "ram"),  # both simpler and safer
        (1.02, 60, 1.0, 10, "zero2", "simplicity"),  # much stays free
        (1.02, 118, 1.0, 110, "zero2", "simplicity"),  # hardly less
        (1.0, 118, 1.04, 39, "zero2", None),  # surely faster
    ],
)
def test_what_leaves_ram_free_comes_before_what_is_simple(
    zero2_s: float, zero2_gib: int, zero3_s: float, zero3_gib: int, chosen: str, merit: str | None
) -> None:
    simple, complex_one = (
        replace(
            way,
            hardware=replace(way.hardware, host_ram_bytes=128 * GIB),
            footprint=replace(way.footprint, host=replace(way.footprint.host, peak_bytes_per_node=gib * GIB)),
            pace=pace_of(step_s),
        )
        for way, step_s, gib in zip(two_ways(), (zero2_s, zero3_s), (zero2_gib, zero3_gib), strict=True)
    )
    found = choose([simple, complex_one])
    assert found is not None
    assert found.levers.engine == chosen
    if merit is not None:
        assert find_merit(found, [complex_one if found is simple else simple])[0] == merit
        unknown = [replace(way, hardware=replace(way.hardware, host_ram_bytes=None)) for way in (simple, complex_one)]
        assert choose(unknown) is unknown[0]


def planned(monkeypatch: pytest.MonkeyPatch, zero2: Pace, zero3: Pace) -> Plan:
    """The plan of a job that can run in these two ways alone."""

    def price(question: Any, **_: Any) -> Any:
        found = search(question)
        paces = {"zero2": zero2, "zero3": zero3}
        named = [way for way in found.ways if way.fits and way.levers.offload_optimizer == "none"]
        found.ways = [replace(way, pace=paces[way.levers.engine]) for way in named if way.levers.engine in paces]
        return found

    monkeypatch.setattr(planner, "search", price)
    return planner.plan(Job(model="tiny_llama"), built("llama", 4, 512, 5000, True), machine("2x24GB"))


def test_the_plan_says_so_and_names_what_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = planned(monkeypatch, pace_of(1.03, host_optimizer=0.1), pace_of(1.0))
    assert answer.chosen is not None
    assert answer.chosen.levers.engine == "zero2"
    assert str(answer.chosen_for) == (
        "ZeRO-2 and ZeRO-3 are equally fast within what is known; ZeRO-2 is chosen because its setup is simpler."
    )
    assert answer.chosen_for in answer.because
    assert [way.is_as_fast for way in answer.alternatives] == [True]
    rate = Message("plan.rate-host-optimizer")
    assert Message("plan.measuring-would-tell", way="ZeRO-2", other="ZeRO-3", rate=rate) in answer.because
    slower = planned(monkeypatch, pace_of(1.0), pace_of(1.2))
    assert slower.chosen_for == ""
    assert [way.is_as_fast for way in slower.alternatives] == [False]
    assert "plan.fits-too" in map(id_of, slower.because)


def test_what_was_measured_already_takes_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"link": RateUsed(value=1.0, source="measured", spread=0.1, open_s=0.3, on="2026-11-16")}
    answer = planned(monkeypatch, pace_of(1.0), replace(pace_of(1.2), rates=known))
    assert isinstance(answer.chosen_for, Message)
    assert answer.chosen_for.fields["what"] == Message("plan.for-pace")  # too much to lose in the middle
    assert "plan.runs-would-tell" in map(id_of, answer.because)


def test_a_range_stands_beside_the_number_where_there_is_one() -> None:
    ranged = replace(pace_of(0.42), low_s=0.361, high_s=0.5)
    assert seconds_words(ranged) == {"step": "0.42", "range": "0.36–0.50"}
    assert seconds_words(replace(ranged, step_s=0.0167, low_s=0.01, high_s=0.03))["step"] == "0.017"
    assert seconds_words(pace_of(2.0)) == {"step": "2.00", "range": None}
