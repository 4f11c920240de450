"""The list of runs: searched, filtered, sorted, grouped; none is missing, and none is read twice."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import client, step_line, written

from tightfit.web.places import Finder
from tightfit.web.run_list import Asked, RunList

NAMES = re.compile(r'href="/runs/view\?run=0%2F([^"]+)"')


def names(page: str) -> list[str]:
    return [name.replace("%2F", "/") for name in NAMES.findall(page)]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four runs in two experiments; the last one written is the oldest."""
    for age, (name, loss, state) in enumerate(
        [("lora/a", 2.0, "done"), ("lora/b", 1.0, "failed"), ("full/c", 3.0, "running"), ("full/d", None, "stopped")]
    ):
        lines = [step_line(n, loss=loss) for n in range(1, 3 + age)]
        run = written(tmp_path / name, lines, state=state, ended=None if state == "running" else "2026-02-03T05:05:06Z")
        for file in run.iterdir():
            os.utime(file, (time.time() - 1000 * age, time.time() - 1000 * age))
        os.utime(run, (0, 0))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, ["lora/a", "lora/b", "full/c", "full/d"]),
        ({"sort": "-changed"}, ["full/d", "full/c", "lora/b", "lora/a"]),
        ({"sort": "loss"}, ["lora/b", "lora/a", "full/c", "full/d"]),
        ({"sort": "-loss"}, ["full/c", "lora/a", "lora/b", "full/d"]),
        ({"sort": "step"}, ["full/d", "full/c", "lora/b", "lora/a"]),
        ({"sort": "name", "q": "LORA"}, ["lora/a", "lora/b"]),
        ({"q": "full d"}, ["full/d"]),
        ({"state": "failed"}, ["lora/b"]),
        ({"state": "stalled"}, ["full/c"]),
        ({"state": "running", "q": "lora"}, []),
        ({"sort": "no such", "state": "'><script>"}, ["lora/a", "lora/b", "full/c", "full/d"]),
    ],
)
def test_what_is_asked_is_shown(asked: dict[str, str], wanted: list[str], sweep: Path) -> None:
    page = client(sweep).get("/runs", params=asked).text
    assert names(page) == wanted
    assert "<script>" not in page.partition("<main")[2].replace('<script type="application/json"', "")


def test_groups_are_the_folders(sweep: Path) -> None:
    page = client(sweep).get("/runs/table", params={"group": "1"}).text
    assert re.findall(r'scope="rowgroup">(\S+) ', page) == ["lora", "full"]
    assert "lowest loss 1.0000" in page


def test_a_thousand_runs_are_all_named_at_once(tmp_path: Path) -> None:
    for number in range(1000):
        run = tmp_path / f"sweep-{number % 10}" / f"run-{number}"
        run.mkdir(parents=True)
        (run / "events.jsonl").write_text(json.dumps(step_line(number + 1)) + "\n")
    finder = Finder([tmp_path])
    while not finder.find().is_over:
        time.sleep(0.1)
    runs = RunList([tmp_path], finder)
    first = runs.look(Asked(is_whole=True), patience_s=0.0)  # there is no time to read any
    assert (first.total, first.shown, first.is_all, first.is_read) == (1000, 1000, True, False)
    whole = runs.look(Asked(sort="step"), patience_s=600.0)
    assert (whole.found, whole.shown, whole.is_read) == (1000, 200, True)
    assert whole.groups[0][1][0].step == 1000
    again = runs.look(Asked(), patience_s=0.0)  # nothing has changed, so nothing has to be read
    assert again.is_read
    (tmp_path / "sweep-0" / "run-0" / "events.jsonl").write_text(json.dumps(step_line(5000)) + "\n")
    assert runs.look(Asked(sort="step"), patience_s=600.0).groups[0][1][0].step == 5000


def test_times_are_of_one_zone(sweep: Path) -> None:
    os.utime(sweep / "lora/a/events.jsonl", (1790000000, 1790000000))
    page = client(sweep).get("/runs").text
    assert '<time datetime="2026-09-21T14:13:20Z">2026-09-21 14:13</time>' in page
    assert "Times are UTC." in page


def test_news_are_of_what_runs_or_has_just_ended(sweep: Path) -> None:
    os.utime(sweep / "lora/a/events.jsonl", (1790000000, 1790000000))
    found = {each["name"]: each for each in client(sweep).get("/runs/news").json()}
    assert set(found) == {"lora/b", "full/c", "full/d"}
    assert (found["full/c"]["state"], found["full/c"]["stalled"]) == ("elsewhere", True)
    assert (found["lora/b"]["state"], found["lora/b"]["stalled"]) == ("failed", False)


def test_plans_are_compared_where_they_differ(sweep: Path) -> None:
    for name, seq in (("lora/a", 512), ("lora/b", 1024)):
        plan = sweep / name / "plan"
        plan.mkdir()
        tree = {"schema": 1, "levers": {"seq": seq, "engine": "ddp"}, "buckets": {}, "predicted": {}}
        (plan / "worker.json").write_text(json.dumps(tree))
    page = client(sweep).get("/runs/compare", params={"run": ["0/lora/a", "0/lora/b"]}).text
    assert "<code>levers.seq</code></th><td>512</td><td>1024</td>" in page
    assert "levers.engine" not in page
    assert names(page) == ["lora/a", "lora/b"]
    assert client(sweep).get("/runs/compare", params={"run": ["0/lora/a", "0/../x"]}).status_code == 404
