"""What a run teaches, and how it is kept: a file that may be torn, foreign or out of reach, and never does harm."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rows import levers_of, shape_of

import warm_desk
from tightfit.desk.calibration import FILE, MOST_ENTRIES, Calibrations
from tightfit.formats.worker.write import _milestones, worker_json
from tightfit.hardware.words import parse_hardware
from tightfit.job import Data, Job
from tightfit.memory import estimate
from tightfit.messages import Message, id_of
from tightfit.model.load import load_model
from tightfit.pace import pace
from tightfit.planner import plan, plan_within
from tightfit.planner.calibration import (
    COMPONENT,
    NOISE_BYTES,
    Calibration,
    Entry,
    correct,
    data_mark,
    uncorrected_bytes,
)
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.step_down import Shortfall, room_above, unused_share
from tightfit.runs.calibration import learn_from_failure, learn_seconds, learned
from tightfit.runs.events import Event, MemoryMark, Tally, event_of
from tightfit.runs.records import worker_file
from tightfit.types import Hardware, Pace, RateUsed

GIB = 2**30


@cache
def planned(loss: str = "fused", sequence: int = 1024) -> Plan:
    job = Job(model="qwen1.5-0.5b", levers={"engine": "zero2", "loss": loss}, sequence=sequence)
    return plan(job, load_model("qwen1.5-0.5b"), parse_hardware("2x24GB", host_ram="64GB"))


def way_of(answer: Plan) -> Way:
    assert answer.chosen is not None
    return answer.chosen


def events_of(answer: Plan, error_bytes: int = 0, *, probe: bool = True, host_bytes: int = GIB) -> list[Event]:
    """As the worker of this plan writes them, when all takes so much more than predicted."""
    predicted = json.loads(worker_json(answer))["predicted"]["gpu"]["milestones"]
    names = ("init", "forward", "backward", "step") if probe else ("init",)
    lines: list[dict[str, Any]] = [
        {"event": "memory", "milestone": name, "predicted_bytes": predicted[name], "measured_bytes": size}
        for name in names
        if (size := predicted[name] + error_bytes)
    ]
    peak = predicted["step"] + error_bytes
    lines.append({"event": "step", "step": 1, "memory": {"peak_bytes": peak - GIB // 8, "host_bytes": host_bytes}})
    found = [event_of(json.dumps(line)) for line in lines]
    return [event for event in found if event is not None]


def lesson(answer: Plan, error_bytes: int = 0, **kwargs: Any) -> Entry:
    entry = learned(events_of(answer, error_bytes, **kwargs), answer)
    assert entry is not None
    return entry


def again(answer: Plan, calibration: Calibration, **job: Any) -> Plan:
    bounds = Bounds(calibration=calibration)
    return plan_within(bounds, replace(answer.job, **job), answer.shape, answer.hardware)


# --- what a run teaches ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GIB // 2, -GIB // 2])
def test_the_error_of_each_phase_is_what_was_measured_less_what_was_predicted(error: int) -> None:
    entry = lesson(planned(), error)
    gpu = {each.phase: each for each in entry.measured if each.where == "gpu"}
    assert {"init", way_of(planned()).footprint.gpu.peak_phase} <= set(gpu)
    assert all(each.error_bytes == error for each in gpu.values())
    for phase, each in gpu.items():
        assert each.predicted_bytes == way_of(planned()).footprint.gpu.phases[phase].total_bytes
    (host,) = (each for each in entry.measured if each.where == "host")
    assert host.measured_bytes == GIB


def test_the_first_forward_pass_says_nothing_about_the_plain_loss() -> None:
    plain = planned("plain")
    events = [event for event in events_of(plain, -GIB // 2) if not isinstance(event, MemoryMark)]
    forward = MemoryMark(milestone="forward", predicted_bytes=GIB, measured_bytes=2 * GIB)
    assert learned([forward], plain) is None
    assert learned([forward, *events], plain) is not None


def test_without_the_trial_of_the_largest_batch_only_more_than_predicted_counts() -> None:
    entry = lesson(planned(), -GIB // 2, probe=False)
    assert [each.phase for each in entry.measured if each.where == "gpu"] == ["init"]
    more = lesson(planned(), GIB, probe=False)
    assert way_of(planned()).footprint.gpu.peak_phase in [each.phase for each in more.measured]


def test_nothing_measured_teaches_nothing() -> None:
    assert learned([], planned()) is None
    assert learned([MemoryMark(milestone="step", predicted_bytes=GIB, measured_bytes=None)], planned()) is None


def test_a_failure_teaches_what_was_needed_at_the_least() -> None:
    way = way_of(planned())
    predicted = way.footprint.gpu.phases["backward"].total_bytes
    shortfall = Shortfall(where="gpu", missing_bytes=GIB, phase="backward")
    entry = learn_from_failure(planned(), shortfall, predicted + GIB)
    assert entry is not None
    assert [(each.phase, each.error_bytes) for each in entry.measured] == [("backward", GIB)]
    assert learn_from_failure(planned(), shortfall, predicted - GIB) is None
    assert learn_from_failure(planned(), replace(shortfall, where="host"), predicted + GIB) is None


def test_a_second_run_is_measured_against_the_prediction_without_the_first() -> None:
    """Otherwise a calibrated prediction that comes true would unteach what it knows."""
    calibration = Calibration(entries=(lesson(planned(), GIB // 2),), data=data_mark(planned().job))
    second = again(planned(), calibration)
    entry = lesson(second)  # exactly what the calibrated plan predicted
    peak = way_of(second).footprint.gpu.peak_phase
    found = entry.of("gpu", peak)
    assert found is not None
    assert found.error_bytes == GIB // 2
    assert found.predicted_bytes == uncorrected_bytes(way_of(second).footprint.gpu.phases[peak])


WORKER = Path(__file__).parents[2] / "benchmarks" / "data" / "h200-worker.jsonl"
RECORDED = [json.loads(line) for line in WORKER.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("raw", RECORDED, ids=[raw["id"] for raw in RECORDED])
def test_what_runs_on_a_real_gpu_measured_teaches_what_they_differ_by(raw: dict[str, Any]) -> None:
    scenario = raw["scenario"]
    scan = scenario.get("scan", "torch")  # of those that have one
    shape, levers = shape_of(scenario), replace(levers_of(scenario), scan=scan)
    hardware = parse_hardware(f"{scenario['world']}xH200", host_ram="512GB")
    footprint = estimate(shape, levers, hardware.world, hardware)
    way = Way(
        shape=shape,
        levers=levers,
        hardware=hardware,
        footprint=footprint,
        pace=pace(shape, levers, hardware),
        fits=True,
        gpu_limit_bytes=hardware.gpu.memory_bytes,
    )
    answer = replace(planned(), shape=shape, hardware=hardware, chosen=way)
    measured = {name: pair[1] for name, pair in raw["worker"]["milestones"].items()}
    marks = [
        MemoryMark(milestone=name, predicted_bytes=predicted, measured_bytes=measured[name])
        for name, predicted in _milestones(way).items()
    ]
    entry = learned(marks, answer)
    assert entry is not None
    peak, init = entry.of("gpu", footprint.gpu.peak_phase), entry.of("gpu", "init")
    assert peak is not None
    assert init is not None
    assert peak.measured_bytes == measured["step"]
    assert init.measured_bytes == measured["init"]
    assert abs(peak.error_bytes) < 0.01 * footprint.gpu.peak_bytes
    steps = [each for each in entry.measured if each.phase != "init"]
    assert all(abs(each.error_bytes) < 0.04 * footprint.gpu.peak_bytes for each in steps)  # 7b_mamba's backward, ZeRO-2


def test_an_error_too_small_to_plan_by_is_none() -> None:
    first = planned()
    for error in (NOISE_BYTES - 1, 1 - NOISE_BYTES):
        second = again(first, Calibration(entries=(lesson(first, error),), data=data_mark(first.job)))
        assert not any(id_of(each) == "plan.calibrated-by" for each in second.because)
        assert way_of(second).footprint == way_of(first).footprint


# --- what it does to a plan -----------------------------------------------------------------------


def test_the_same_way_gets_the_whole_error_and_says_so() -> None:
    first = planned()
    entry = lesson(first, GIB // 2)
    second = again(first, Calibration(entries=(entry,), data=data_mark(first.job)))
    by = Message("plan.card-alone", gpu="+0.5")
    assert Message("plan.calibrated-by", by=by, day=entry.day) in second.because
    way = way_of(second)
    raw = estimate(way.shape, way.levers, way.world, way.hardware)
    assert way.footprint.gpu.peak_bytes == raw.gpu.peak_bytes + GIB // 2
    assert way.footprint.gpu.phases["loss"].components[COMPONENT] == GIB // 2
    assert way.footprint.gpu.required_bytes > raw.gpu.required_bytes
    back = correct(way.footprint, None, way.hardware)
    assert (back.gpu, back.host) == (raw.gpu, raw.host)
    assert sorted(map(str, back.because)) == sorted(map(str, raw.because))


def test_less_than_predicted_counts_on_the_same_data_and_sequence_alone() -> None:
    first = planned()
    entry = lesson(first, -GIB // 2)
    mark = data_mark(first.job)
    known = Calibration(entries=(entry,), data=mark)
    assert way_of(again(first, known)).footprint.gpu.peak_phase
    here = known.correction(first.shape, way_of(first).levers, first.hardware)
    assert here is not None
    predicted = way_of(first).footprint.gpu.peak_bytes
    assert here.error_bytes("gpu", "backward", predicted) == -GIB // 2
    assert here.error_bytes("gpu", "backward", predicted // 2) in (-GIB // 4, -GIB // 4 + 1)  # its share
    assert here.error_bytes("gpu", "backward", 2 * predicted) == -GIB // 2
    for other in (
        Calibration(entries=(entry,), data=data_mark(replace(first.job, data=Data(path="others.jsonl")))),
        Calibration(entries=(entry,)),
        Calibration(entries=(replace(entry, sequence=512),), data=mark),
    ):
        correction = other.correction(first.shape, way_of(first).levers, first.hardware)
        assert correction is not None
        assert correction.error_bytes("gpu", "backward", predicted) == 0


def test_on_the_host_what_is_more_counts_and_less_proves_nothing() -> None:
    first = planned()
    predicted = way_of(first).footprint.host.peak_bytes_per_rank
    for host, error in ((predicted + GIB, GIB), (predicted - GIB // 2, 0)):
        taught = lesson(first, host_bytes=host)
        known = Calibration(data=data_mark(first.job)).with_entry(taught).with_entry(taught)
        second = again(first, known)
        steady = way_of(second).footprint.host
        assert steady.peak_bytes_per_rank == predicted + error
        assert steady.peak_bytes_per_node == 2 * steady.peak_bytes_per_rank
        assert any("Calibrated by +1.0 GiB of host RAM a rank" in str(each) for each in second.because) == bool(error)


def test_another_way_gets_what_is_more_and_nothing_of_what_is_less() -> None:
    first = planned()
    levers = replace(way_of(first).levers, engine="zero3")
    for error, counts in ((GIB // 2, GIB // 2), (-GIB // 2, 0)):
        known = Calibration(entries=(lesson(first, error),), data=data_mark(first.job))
        correction = known.correction(first.shape, levers, first.hardware)
        assert correction is not None
        assert not correction.same_way
        assert correction.error_bytes("gpu", "loss", GIB) == counts
        assert correction.error_bytes("host", "step", GIB) == 0


@pytest.mark.parametrize(
    "levers", [{"method": "lora"}, {"precision": "fp16"}, {"optimizer": "sgd"}, {"master_weights": False}]
)
def test_another_training_gets_nothing(levers: dict[str, Any]) -> None:
    first = planned()
    known = Calibration(entries=(lesson(first, GIB),), data=data_mark(first.job))
    other = replace(way_of(first).levers, **levers)
    assert known.correction(first.shape, other, first.hardware) is None
    assert known.correction(load_model("qwen1.5-1.8b"), way_of(first).levers, first.hardware) is None
    named = replace(first.hardware, gpu=replace(first.hardware.gpu, name="another card"))
    assert known.correction(first.shape, way_of(first).levers, named) is None
    twin = load_model("qwen1.5-0.5b")
    assert known.correction(twin, way_of(first).levers, first.hardware) is not None


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_what_has_just_failed_counts_for_other_trainings_of_the_model(method: Any) -> None:
    """Otherwise 4-bit weights would seem to take away what nobody can explain."""
    first = planned()
    way = way_of(first)
    entry = learn_from_failure(first, Shortfall(where="gpu", phase="loss"), 40 * GIB)
    other = replace(way.levers, method=method)
    known = Calibration(data=data_mark(first.job)).after_failure(entry)
    found = known.correction(first.shape, other, first.hardware)
    assert found is not None
    more = found.error_bytes("gpu", "loss", 0)
    assert more == 40 * GIB - way.footprint.gpu.phases["loss"].total_bytes
    assert known.correction(load_model("qwen1.5-1.8b"), way.levers, first.hardware) is None


def test_each_phase_keeps_its_newest_figure() -> None:
    first = planned()
    whole, failed = lesson(first, GIB), learn_from_failure(first, Shortfall(where="gpu", phase="loss"), 40 * GIB)
    assert failed is not None
    known = Calibration().with_entry(whole).with_entry(failed)
    (entry,) = known.entries
    assert {each.phase for each in whole.measured} <= {each.phase for each in entry.measured}
    found = entry.of("gpu", "loss")
    assert found is not None
    assert found.measured_bytes == 40 * GIB
    other_data = Calibration().with_entry(whole).with_entry(replace(failed, data="other"))
    assert other_data.entries[0].measured == failed.measured


def test_a_worker_is_told_the_calibrated_figures() -> None:
    second = again(planned(), Calibration(entries=(lesson(planned(), GIB // 2),), data=data_mark(planned().job)))
    assert worker_file(worker_json(second), "worker.json").peak_bytes == way_of(second).footprint.gpu.peak_bytes


# --- the file -------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    store, entry = Calibrations(tmp_path / "cache" / "tightfit"), lesson(planned(), GIB)
    assert store.read() == Calibration()
    assert store.add(entry)
    assert store.read(planned().job) == Calibration(entries=(entry,), data=data_mark(planned().job))
    second = replace(entry, way=replace(entry.way, engine="zero3"))
    assert store.add(second)
    assert store.read().entries == (entry, second)
    assert store.add(entry)
    assert store.read().entries == (second, entry)
    assert sorted(path.name for path in (tmp_path / "cache" / "tightfit").iterdir()) == [
        FILE,
        FILE.replace("json", "lock"),
    ]


def tally_of(answer: Plan, step_s: float, *, steps: int = 20, share: float = 1.0) -> Tally:
    """Of a run of this plan; `share`: of the tokens that were planned. Its first steps take their time."""
    tally, tokens = Tally(), answer.effective_batch * way_of(answer).levers.sequence * share
    for step in range(steps):
        seconds = step_s * (30 if step < 2 else 1)
        event = event_of(json.dumps({"event": "step", "step": step, "step_s": seconds, "tokens": int(tokens)}))
        assert event is not None
        tally.add(event)
    return tally


def test_a_run_teaches_how_long_its_steps_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned()

    def price(_: object, __: object, hardware: Hardware) -> Pace:
        """Half of a step hangs on the products."""
        rates = {"products": RateUsed(value=1e14, source="data sheet", spread=0.2, open_s=0.1)}
        factor = 1.0 if hardware.taught is None else hardware.taught.rates[0].factor
        return Pace(step_s=0.5 + 0.5 * factor, tokens_per_s=1.0, causes={}, rates=rates)

    monkeypatch.setattr("tightfit.planner.taught.pace", price)
    monkeypatch.setattr("tightfit.planner.taught.step_seconds", lambda *given: price(*given).step_s)
    found = learn_seconds(tally_of(first, 1.2), first, "a processor")
    assert found is not None
    assert (found.predicted_s, found.measured_s) == (1.0, 1.2)
    assert (found.shares[0].slower_s, found.shares[0].faster_s) == pytest.approx((0.5, 0.5))
    assert learn_seconds(tally_of(first, 1.2, steps=5), first, "a processor") is None
    assert learn_seconds(tally_of(first, 1.2, share=0.5), first, "a processor") is None  # short samples take less
    store = Calibrations(tmp_path)
    assert not store.add(None)
    assert store.add(None, found)
    assert store.add(lesson(first, GIB), None)
    known = store.read(first.job)
    assert known.timed == (found,)
    assert len(known.entries) == 1
    again_planned = again(first, replace(known, processor="a processor"))
    assert again_planned.hardware.taught is not None
    assert again_planned.hardware.taught.rates[0].factor == pytest.approx(1.4, rel=0.05)
    tree = json.loads((tmp_path / FILE).read_text())
    tree["timed"][0]["measured_s"] = 0
    (tmp_path / FILE).write_text(json.dumps(tree))
    assert store.read().timed == ()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store, entry = Calibrations(tmp_path), lesson(planned(), GIB)
    many = Calibration(
        entries=tuple(
            replace(entry, way=replace(entry.way, engine=f"engine {number}")) for number in range(MOST_ENTRIES)
        )
    )
    for each in (many.entries[0], entry):
        assert store.add(each)
    text = json.loads((tmp_path / FILE).read_text())
    text["entries"] = [
        {**text["entries"][0], "way": {**text["entries"][0]["way"], "engine": f"engine {number}"}}
        for number in range(MOST_ENTRIES)
    ]
    (tmp_path / FILE).write_text(json.dumps(text))
    assert store.add(entry)
    kept = store.read().entries
    assert len(kept) == MOST_ENTRIES
    assert kept[-1] == entry
    assert kept[0].way.engine == "engine 1"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"schema": 99, "tightfit": "", "entries": []}',
        b'{"schema": 1, "tightfit": "", "entries": []}',
        b'{"schema": 2, "tightfit": "0.0.0-other", "entries": []}',
    ],
    ids=["empty", "newer schema", "older schema", "version"],
)
def test_a_file_of_another_version_counts_for_nothing_and_is_replaced(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    store = Calibrations(tmp_path)
    assert store.read() == Calibration()
    assert store.add(lesson(planned(), GIB))
    assert len(store.read().entries) == 1


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b"null", b'{"schema": 2}', b"\xff\xfe\x00", b"[" * 200_000, b" " * (2**22 + 1)],
    ids=["torn", "list", "null", "keys", "binary", "deep", "large"],
)
def test_a_file_that_is_not_ours_counts_for_nothing_and_stays(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    store = Calibrations(tmp_path)
    assert store.read() == Calibration()
    assert not store.add(lesson(planned(), GIB))
    assert (tmp_path / FILE).read_bytes() == text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("day",), "\x1b[31mtoday"),
        (("day",), None),
        (("sequence",), True),
        (("sequence",), 0),
        (("training", "gpu"), 3),
        (("way", "checkpointing"), "perhaps"),
        (("measured", 0, "phase"), "lunch"),
        (("measured", 0, "where"), "cloud"),
        (("measured", 0, "predicted_bytes"), 0),
        (("measured", 0, "measured_bytes"), 1.5),
        (("measured",), 7),
        (("way",), []),
    ],
)
def test_an_entry_that_is_not_ours_is_left_out_and_the_others_stay(
    tmp_path: Path, path: tuple[Any, ...], value: object
) -> None:
    store, entry = Calibrations(tmp_path), lesson(planned(), GIB)
    store.add(replace(entry, way=replace(entry.way, engine="zero3")))
    store.add(entry)
    tree = json.loads((tmp_path / FILE).read_text())
    place = tree["entries"][0]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (tmp_path / FILE).write_text(json.dumps(tree))
    assert store.read().entries == (entry,)


def test_a_cache_that_is_a_file_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    store = Calibrations(tmp_path / "cache")
    assert not store.add(lesson(planned()))
    assert store.read() == Calibration()


ADD = """
import sys
from pathlib import Path
from tightfit.planner.calibration import Entry, MeasuredPhase, Training, WayMark
from tightfit.desk.calibration import Calibrations
folder, number = Path(sys.argv[1]), sys.argv[2]
for turn in range(10):
    entry = Entry(
        training=Training(shape="s", gpu="g", method="full", precision="bf16", optimizer="adamw"),
        way=WayMark(engine=f"{number}-{turn}", offload_optimizer="none", offload_param="none", checkpointing="none"),
        data="d", sequence=1, day="2026-01-01",
        measured=(MeasuredPhase(where="gpu", phase="loss", predicted_bytes=1, measured_bytes=2),),
    )
    assert Calibrations(folder).add(entry)
"""


@pytest.mark.thorough
def test_runs_that_end_together_lose_nothing(tmp_path: Path) -> None:
    started = [warm_desk.Process(str(tmp_path), str(number), code=ADD) for number in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    for process in started:
        process.kill()
    assert len(Calibrations(tmp_path).read().entries) == 40


# --- the way up -----------------------------------------------------------------------------------


def test_a_run_that_left_much_unused_hears_of_the_faster_plan() -> None:
    """Less was measured than predicted, so a way fits now that was too large."""
    first = planned("plain", 8192)
    way = way_of(first)
    peak = way.footprint.gpu.peak_bytes // 2
    entry = learned(events_of(first, peak - way.footprint.gpu.peak_bytes), first)
    bounds = Bounds(calibration=Calibration(data=data_mark(first.job)).with_entry(entry))
    faster = room_above(first, peak, bounds=bounds)
    assert faster is not None
    best = way_of(faster)
    assert best.pace.tokens_per_s > way.pace.tokens_per_s
    assert best.footprint.gpu.required_bytes <= best.gpu_limit_bytes
    assert best.effective_batch == way.effective_batch
    assert best.levers.engine == way.levers.engine or "ZeRO-2 → " in str(faster.because[0])
    sentence = str(*faster.because)
    assert f"{best.pace.tokens_per_s:,.0f} tokens/s" in sentence
    assert f"{unused_share(way, peak):.0%} of each card" in sentence


def test_a_full_card_and_the_fastest_plan_hear_nothing() -> None:
    first = planned()
    assert room_above(first, way_of(first).hardware.gpu.memory_bytes * 9 // 10) is None
    free = plan(Job(model="tiny_llama"), load_model("tiny_llama"), parse_hardware("1x24GB", host_ram="64GB"))
    assert room_above(free, GIB) is None


def test_a_pinned_lever_that_is_in_the_way_is_named() -> None:
    levers = {"engine": "zero2", "checkpointing": "full", "micro_batch": 1, "loss": "fused"}
    slow = plan(Job(model="qwen1.5-0.5b", levers=levers), planned().shape, parse_hardware("2x24GB", host_ram="64GB"))
    faster = room_above(slow, way_of(slow).footprint.gpu.peak_bytes)
    assert faster is not None
    assert "checkpointing full → " in str(faster.because[0])
    assert way_of(faster).effective_batch == way_of(slow).effective_batch


def test_a_run_with_injected_faults_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures were invented, and real plans must not know them."""
    taught = lesson(planned(), GIB)
    monkeypatch.setenv("TIGHTFIT_FAULTS", "device-oom@rank=1,stage=backward,step=3")
    assert not Calibrations(tmp_path).add(taught)
    assert not (tmp_path / FILE).exists()
    monkeypatch.delenv("TIGHTFIT_FAULTS")
    assert Calibrations(tmp_path).add(taught)


def test_a_figure_that_is_wildly_off_needs_a_second_run(tmp_path: Path) -> None:
    """More than half of the prediction: a card may have been shared for once."""
    answer = planned()
    peak = way_of(answer).footprint.gpu.peak_bytes
    wild, store = lesson(answer, peak), Calibrations(tmp_path)
    store.add(wild)
    assert way_of(again(answer, store.read())).footprint.gpu.peak_bytes == peak
    store.add(wild)
    twice = store.read()
    corrected = twice.correction(way_of(answer).shape, way_of(answer).levers, way_of(answer).hardware)
    assert corrected is not None
    assert corrected.error_bytes("gpu", way_of(answer).footprint.gpu.peak_phase, peak) > peak // 2
    store.add(lesson(answer, GIB))
    assert all(each.runs == 1 for each in store.read().entries[-1].measured if each.where == "gpu" and not each.is_wild)
