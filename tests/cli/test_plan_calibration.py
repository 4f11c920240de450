"""A calibrated plan as a user meets it: what it says, what it changes, and how it is switched off."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import warm_desk
from tightfit.cli import main
from tightfit.cli import train as cli_train
from tightfit.desk.calibration import FILE, Calibrations, calibration_of
from tightfit.desk.request import Request, read_request
from tightfit.diagnose.verdict import OomNumbers, Verdict
from tightfit.formats.target import Target
from tightfit.hardware.machine import Occupancy
from tightfit.inputs.surroundings import cache_folder
from tightfit.job import Job
from tightfit.planner import plan_within
from tightfit.planner.calibration import Calibration, Entry, data_mark
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.step_down import Shortfall
from tightfit.runs.events import MemoryMark, Tally
from tightfit.runs.own import Changed
from tightfit.runs.records import RunFolder
from tightfit.start.machine import Nodes
from tightfit.start.train import Ready, TrainCourse, learn, rendered, way_up

pytestmark = pytest.mark.thorough

GIB = 2**30
TRAINING = ("--model", "qwen1.5-0.5b", "--gpus", "2x24GB", "--host-ram", "64GB", "--seq", "8192")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "tightfit"
    return tmp_path / "cache" / "tightfit"


@cache
def planned(**levers: object) -> Plan:
    from tightfit.hardware.words import parse_hardware
    from tightfit.model.load import load_model

    asked = Job(model="qwen1.5-0.5b", sequence=8192, levers=levers)
    return plan_within(Bounds(), asked, load_model("qwen1.5-0.5b"), parse_hardware("2x24GB", host_ram="64GB"))


def tally_of(plan: Plan, error_bytes: int) -> Tally:
    """A run that took so much more than its plan predicted."""
    assert plan.chosen is not None
    tally = Tally()
    peak = plan.chosen.footprint.gpu.peak_bytes
    tally.add(MemoryMark(milestone="step", predicted_bytes=peak, measured_bytes=peak + error_bytes))
    return tally


def teach(plan: Plan, error_bytes: int) -> Entry:
    bounds = Bounds(calibration=Calibration(data=data_mark(plan.job)))
    after = learn(plan, tally_of(plan, error_bytes), bounds)
    assert after.calibration is not None
    return after.calibration.entries[-1]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *TRAINING, *words]) == 0
    return capsys.readouterr().out


def test_a_plan_says_by_how_much_and_from_which_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(run(capsys, "--json"))
    assert before["chosen"]["calibration"] is None
    entry = teach(planned(), 2 * GIB)
    after = json.loads(run(capsys, "--json"))
    used = after["chosen"]["calibration"]
    assert used["day"] == entry.day
    assert used["gpu_bytes"]["backward"] == 2 * GIB
    assert used["measured"][0]["measured_bytes"] - used["measured"][0]["predicted_bytes"] == 2 * GIB
    assert any(each.startswith(f"Calibrated by +2.0 GiB from a run on {entry.day}") for each in after["because"])
    limit = after["chosen"]["gpu_limit_bytes"]
    assert after["chosen"]["footprint"]["gpu"]["required_bytes"] <= limit
    assert f"a run on {entry.day}" in " ".join(run(capsys).split())


def test_a_way_that_took_more_than_there_is_is_not_chosen_again(capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(run(capsys, "--json"))["chosen"]
    spare = before["gpu_limit_bytes"] - before["footprint"]["gpu"]["required_bytes"]
    teach(planned(), spare + GIB)
    after = json.loads(run(capsys, "--json"))["chosen"]
    assert after["levers"] != before["levers"]
    assert after["footprint"]["gpu"]["required_bytes"] <= after["gpu_limit_bytes"]


def test_without_calibration_the_plan_is_that_of_the_arithmetic_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(run(capsys, "--json"))
    teach(planned(), 2 * GIB)
    off = json.loads(run(capsys, "--json", "--no-calibration"))
    for answer in (before, off):
        del answer["search_s"]
    assert off == before


@pytest.mark.parametrize("words", [("--tier", "stage2_offload"), ("--tier", "all"), ("--max", "micro-batch")])
def test_tiers_and_limits_are_calibrated_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    before = run(capsys, *words, "--json")
    teach(planned(), 2 * GIB)
    after = run(capsys, *words, "--json")
    assert '"calibration": {' in after
    assert '"calibration": {' not in before
    assert '"calibration": {' not in run(capsys, *words, "--json", "--no-calibration")


def test_the_written_plan_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = teach(planned(), 2 * GIB)
    run(capsys, "--write", str(tmp_path / "written"))
    assert f"Calibrated by +2.0 GiB from a run on {entry.day}" in (tmp_path / "written" / "PLAN.md").read_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_what_nothing_fits_with_is_said_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # so far off that one run alone would not be believed
        teach(planned(), 30 * GIB)
    answer = json.loads(run(capsys, "--json"))
    assert not answer["fits"]
    assert any(each.startswith("Calibrated by +30.0 GiB") for each in answer["because"])


def test_a_torn_file_is_no_trouble(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / FILE).write_text('{"schema": 1, "tight')
    done = warm_desk.run("plan", *TRAINING, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"]["calibration"] is None


# --- the end of a run -----------------------------------------------------------------------------


def test_a_run_writes_down_what_it_measured(own_cache: Path) -> None:
    plan = planned()
    entry = teach(plan, GIB)
    assert Calibrations(own_cache).read().entries == (entry,)


def test_with_no_calibration_nothing_is_read_or_written(own_cache: Path) -> None:
    plan = planned()
    assert calibration_of(read_request({"no_calibration": True}), plan.job) is None
    read = calibration_of(Request(), plan.job)
    assert read is not None
    assert read == Calibration(data=data_mark(plan.job), processor=read.processor)
    assert learn(plan, tally_of(plan, GIB), Bounds()) == Bounds()
    assert not own_cache.exists()


def test_a_plan_that_was_written_before_teaches_nothing(own_cache: Path) -> None:
    bounds = Bounds(calibration=Calibration())
    assert learn(None, tally_of(planned(), GIB), bounds) == bounds
    assert way_up(None, tally_of(planned(), GIB), bounds) is None


def test_the_end_of_a_run_names_the_faster_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(engine="zero2", checkpointing="full", micro_batch=1, loss="fused")
    assert plan.chosen is not None
    tally = tally_of(plan, -GIB)
    faster = way_up(plan, tally, Bounds())
    assert faster is not None
    cli_train.say_way_up(faster)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("The run's peak was ")
    assert "checkpointing full → " in said
    assert said.endswith("% more.")
    cli_train.say_way_up(None)
    assert capsys.readouterr().out == ""


def test_a_run_without_a_gpu_hears_nothing_of_it() -> None:
    plan = planned()
    assert way_up(plan, Tally(), Bounds()) is None


def test_the_json_of_a_run_has_the_way_up() -> None:
    plan = planned(engine="zero2", checkpointing="full", micro_batch=1, loss="fused")
    faster = way_up(plan, tally_of(plan, -GIB), Bounds())
    assert faster is not None
    told = cli_train._way_up_report(faster)
    assert told is not None
    assert json.loads(json.dumps(told))["text"] == str(faster.because[0])
    assert faster.chosen is not None
    assert told["tokens_per_s"] == faster.chosen.pace.tokens_per_s
    assert cli_train._way_up_report(None) is None
    assert cli_train._way_up_report(replace(faster, chosen=None)) is None


def test_what_an_out_of_memory_teaches_is_kept_when_the_smaller_plan_is_taken(tmp_path: Path, own_cache: Path) -> None:
    """Until then nothing has changed, as the supervisor was promised."""
    plan, folder = planned(), RunFolder(tmp_path / "run")
    assert plan.chosen is not None
    files, worker = rendered(plan, plan.job, Target())
    devices = Occupancy(variable="CUDA_VISIBLE_DEVICES", chosen_by_user=False, devices=())
    ready = Ready(
        worker=worker, files=files, folder=folder.path, nodes=Nodes(), occupancy=devices, devices=(), plan=plan
    )
    manner = {"options": (), "worker": (), "meet": lambda _: pytest.fail("nothing is started"), "patient": False}
    course = TrainCourse(request=Request(), ready=ready, folder=folder, **manner)
    before = course.bounds
    numbers = OomNumbers(asked=GIB, free=0, allocated=plan.chosen.footprint.gpu.peak_bytes)
    verdict = Verdict(
        id="cuda-oom", kind="device-oom", cause="", confidence="certain", evidence=(), fixes=(), oom=numbers
    )
    found = course.smaller(Shortfall(where="gpu", missing_bytes=GIB), verdict)
    assert isinstance(found, Changed), found
    assert not (own_cache / FILE).exists()
    assert course.bounds == before
    folder.plan.mkdir(parents=True)
    course.take()
    assert (own_cache / FILE).exists()
    assert course.bounds != before
