"""A run's events as a short curve: nothing lost that counts, and quick for a run of any length."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patience

sys.path.insert(0, str(Path(__file__).parent))

from visits import step_line

from tightfit.runs.events import Step, read_event, read_fields
from tightfit.web.history import Bucket, History, Series, plain_step, sample, single


def bucket(step: int, loss: float | None = 1.0, **held: object) -> Bucket:
    made = read_fields(step_line(step, loss=loss, **held), Step)
    assert made is not None
    return single(made)


def read_whole(path: Path) -> History:
    history = History(path)
    while not history.is_whole:
        history.read_on(1.0)
    return history


@pytest.mark.thorough
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 20))
def test_a_short_curve_keeps_the_extremes_the_mean_and_the_end(losses: list[float], most: int) -> None:
    series = Series(most)
    for step, loss in enumerate(losses, 1):
        series.add(bucket(step, loss))
    rows = series.whole().rows
    assert len(rows) <= most
    assert min(row[2] for row in rows if row[2] is not None) == min(losses)
    assert max(row[3] for row in rows if row[3] is not None) == max(losses)
    assert rows[-1][0] == len(losses)
    each = series.whole().each
    assert rows[0][1] == pytest.approx(sum(losses[:each]) / len(losses[:each]))
    steps = [row[0] for row in rows]
    assert steps == sorted(steps)


@pytest.mark.thorough
@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=120), st.integers(2, 12))
def test_who_follows_the_changes_has_the_same_curve(steps: list[tuple[int, bool]], most: int) -> None:
    """Whatever comes, going back to a checkpoint included."""
    series, kept = Series(most), []
    for step, asks in steps:
        series.add(bucket(step, float(step)))
        if asks and (change := series.changed()) is not None:
            kept = [*kept[: change.start], *change.rows]
            assert kept == series.whole().rows
    numbers = [row[0] for row in series.whole().rows]
    assert all(one < other for one, other in pairwise(numbers))


def test_steps_that_are_made_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [step_line(n, loss=9.0) for n in range(1, 11)]
    lines += [{"event": "resumed", "step": 5, "folder": "x"}, *(step_line(n, loss=1.0) for n in range(6, 9))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_whole(path).series.whole().rows
    assert [(row[0], row[1]) for row in rows] == [*((n, 9.0) for n in range(1, 6)), *((n, 1.0) for n in range(6, 9))]


def test_a_step_is_read_whatever_the_order_of_its_keys(tmp_path: Path) -> None:
    lines = [step_line(n, loss=loss, now_bytes=7) for n, loss in enumerate((2.5, None, 1e-9, -2.5), 1)]
    plain, turned = tmp_path / "events.jsonl", tmp_path / "turned.jsonl"
    plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    turned.write_text("".join(json.dumps(dict(reversed(line.items())), separators=(",", ":")) + "\n" for line in lines))
    rows = read_whole(plain).series.whole().rows
    assert [(row[0], row[1], row[5]) for row in rows] == [(1, 2.5, 7), (2, None, 7), (3, 1e-9, 7), (4, -2.5, 7)]
    assert read_whole(turned).series.whole().rows == rows
    assert read_whole(turned).steps() == read_whole(plain).steps()


PLAIN = st.one_of(st.none(), st.integers(0, 2**40), st.floats(0, 1e6))
ODD = st.one_of(PLAIN, st.booleans(), st.integers(), st.floats(), st.just("7"), st.lists(st.integers(-2, 2**70)))
KEYS = ("loss", "tokens_per_s", "at", "learning_rate", "grad_norm", "skipped", "event")
HELD = ("now_bytes", "peak_bytes", "host_bytes", "ranks")


@pytest.mark.thorough
@given(
    st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(HELD), ODD, max_size=3)),
    st.lists(st.integers(0, 2**40) | st.booleans(), max_size=3),
)
def test_a_plain_step_is_what_careful_reading_makes_of_it(
    odd: dict[str, object], held: dict[str, object] | None, ranks: list[int]
) -> None:
    """Whatever stands in its place; and what our worker writes is plain."""
    ours = step_line(5, loss=2.5)
    ours["memory"]["ranks"] = ranks
    assert (plain_step(ours) is None) == (not ranks or bool in map(type, ranks))
    tree = {**ours, **odd, "memory": None if held is None else {**ours["memory"], **held}}
    made, read = plain_step(tree), read_event(tree)
    if made is not None:
        assert isinstance(read, Step)
        assert made == single(read)


def test_what_happened_to_a_run(tmp_path: Path) -> None:
    """Evaluations after the checkpoint are made again; a failure is marked once, and a start by hand too."""
    failed = {"event": "attempt_failed", "at": 9.0, "number": 1, "kind": "device-oom", "text": "It ran out of memory.",
              "step": 8, "kept_step": 5, "action": "smaller plan", "because": "so it fits", "wait_s": 0}  # fmt: skip
    again = {"event": "start", "predicted": {"phases": {"init": 5, "step": 7, "odd": "x"}}}
    evaluations = [{"event": "eval", "step": step, "loss": loss} for step, loss in ((4, 2.0), (8, 1.0))]
    mark = {"event": "memory", "milestone": "init", "predicted_bytes": 5, "measured_bytes": 6}
    ranked = step_line(6, loss=0.5)
    ranked["memory"]["ranks"] = [3, 2]
    odd = step_line(7, loss=0.4)
    odd["memory"]["ranks"] = 5
    lines = [*(step_line(n) for n in range(1, 9)), *evaluations, failed, again, mark]
    lines += [{"event": "resumed", "step": 5, "folder": "x"}, ranked, odd]
    lines += [again, {"event": "resumed", "step": 7, "folder": "x"}]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_whole(path)
    assert [(mark["kind"], mark["step"]) for mark in history.marks] == [("rescue", 8), ("resumed", 7)]
    assert history.evaluations == {4: 2.0}
    assert (history.phases, history.milestones) == ({"init": 5, "step": 7}, {"init": 6})
    *_, six, seven = history.series.whole().rows
    assert (six[8], six[9], six[11], seven[11]) == (1790000006.0, 1e-3, (3, 2), None)


def test_odd_lines_and_a_torn_end_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(b'\xff\xfe\nnot json\n[1]\n{"event": 7}\n{"event": "step", "step": "two"}\n\x00\n')
        file.write(b'{"event": "step", "step": 1, "loss": NaN}\n{"event":"step","step":2,"loss":3.5,"new":[1]}\n')
        file.write(json.dumps(step_line(3)).encode()[:40])
    history = read_whole(path)
    assert [(row[0], row[1]) for row in history.series.whole().rows] == [(1, None), (2, 3.5)]
    with path.open("ab") as file:
        file.write(json.dumps(step_line(3)).encode()[40:] + b"\n")
    assert history.read_on(1.0)
    assert len(history.series) == 3
    assert history.steps()[-1].step == 3
    path.write_text(json.dumps(step_line(1)) + "\n")  # begun anew
    while not history.is_whole or len(history.series) != 1:
        history.read_on(1.0)
    assert not History(tmp_path / "missing").read_on(1.0)


@pytest.mark.thorough
def test_a_spike_in_a_long_run_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        for step in range(1, 30_001):
            file.write(json.dumps(step_line(step, 30_000, 777.0 if step == 12_345 else 2.0)) + "\n")
    history = History(path)
    history.read_on(0.001)
    assert not history.is_whole
    assert history.shown is not history.series  # a rough picture of the whole run
    assert history.shown.whole().rows[-1][0] == 30_000
    assert history.steps()[-1].step == 30_000
    while not history.is_whole:
        history.read_on(1.0)
    assert history.shown is history.series
    assert max(row[3] or 0 for row in history.series.whole().rows) == 777.0
    assert len(history.series) <= 1600


@pytest.mark.thorough
def test_a_million_events_open_in_under_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    chance = random.Random(1)  # noqa: S311
    head, _, rest = (
        json.dumps(step_line(7_654_321, 1_000_000, 7654.5)).replace('"step": 7654321', '"step": @').partition("@")
    )
    middle, _, end = rest.partition("7654.5")
    with path.open("w") as file:
        for step in range(1, 1_000_001):
            file.write(f"{head}{step}{middle}{5 - step / 250_000 + chance.random():.6f}{end}\n")
    began = patience.now()
    history = History(path)
    history.read_on(0.25)
    rows = history.shown.whole().rows
    took = patience.now() - began
    assert took < 2
    assert rows[-1][0] == 1_000_000
    assert 500 < len(rows) <= 1600
    assert len(sample(path)) > 500
