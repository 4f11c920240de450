"""What helpers find is what a search by itself finds, whatever happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from time import sleep

import pytest

from patience import now
from tightfit.desk.plan_request import resolve_request
from tightfit.desk.request import read_request
from tightfit.desk.searchers import Searchers
from tightfit.planner import question_of
from tightfit.planner.question import Question
from tightfit.planner.search import search
from tightfit.planner.wanted import AbandonedError, only_while
from tightfit.runs.processes import is_alive

QUESTIONS = {
    "adapters on one GPU": {"model": "llama-3.1-8b", "method": "lora", "gpus": "1xRTX4090", "host_ram": "64GB"},
    "layers that stream": {"model": "qwen2.5-7b", "gpus": "1xRTX4090", "host_ram": "128GB", "seq": 1024},
    "stages of a pipeline": {"model": "qwen2.5-32b", "method": "lora", "gpus": "4xRTX4090", "seq": 1024},
    "nothing fits": {"model": "llama-3.1-8b", "gpus": "1x8GB", "host_ram": "32GB"},
    "only what streams fits": {"model": "qwen2.5-32b", "method": "lora", "gpus": "1x12GB", "engine": "stream"},
}


def ask(name: str) -> Question:
    settled = resolve_request(read_request({"seq": 2048, **QUESTIONS[name]}), for_others=True)
    return question_of(settled.job, settled.shape, settled.hardware)


def found_by(question: Question) -> list[tuple[object, ...]]:
    found = search(question)
    assert all(way.shape is question.shape for way in found.ways), "caches know a model by its object"
    ways = [(way.levers, way.hardware, way.fits, way.pace, way.footprint) for way in found.ways]
    return [*ways, (found.considered,)]


@pytest.fixture(scope="module")
def helpers() -> Iterator[Searchers]:
    """The same for all, as a server has them: what they have been through makes no difference to an answer."""
    made = Searchers(2)
    with made.help():
        pass
    wait_for(made)
    try:
        yield made
    finally:
        made.end()


def wait_for(helpers: Searchers) -> None:
    end = now() + 120
    while not all(helper.is_ready() for helper in helpers._all):
        assert now() < end, "no helper has started"
        sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUESTIONS)
def test_helpers_find_what_is_found_without_them(name: str, helpers: Searchers) -> None:
    question = ask(name)
    alone = found_by(question)
    with helpers.help():
        assert found_by(question) == alone
        assert found_by(question) == alone, "what they have learned makes no difference"


def test_while_none_has_started_the_search_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.desk.searchers._SERVE", "import time; time.sleep(600)")
    helpers, question = Searchers(1), ask("nothing fits")
    with helpers.help():
        assert found_by(question) == found_by(question)
    helpers.end()
    assert not helpers.have_started()


def test_helpers_that_cannot_start_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.desk.searchers._SERVE", "import sys; sys.exit(1)")
    helpers, question = Searchers(1), ask("nothing fits")
    alone = found_by(question)
    with helpers.help():
        assert found_by(question) == alone
        helpers._all[0].process.wait()
        assert found_by(question) == alone
    helpers.end()


def test_a_helper_that_is_killed_is_replaced_and_its_part_is_done(helpers: Searchers) -> None:
    question, first = ask("adapters on one GPU"), [helper.process for helper in helpers._all]
    alone = found_by(question)

    def kill() -> None:
        sleep(0.05)
        for process in first:
            process.kill()

    threading.Thread(target=kill).start()
    with helpers.help():
        assert found_by(question) == alone
        wait_for(helpers)
        assert found_by(question) == alone
    assert all(process.poll() is not None for process in first)
    assert not {helper.process.pid for helper in helpers._all} & {process.pid for process in first}


def test_what_is_abandoned_does_not_come_back_as_the_answer_to_something_else(helpers: Searchers) -> None:
    question, other = ask("stages of a pipeline"), ask("adapters on one GPU")
    alone, looks = found_by(other), iter([True] * 3)
    with helpers.help():
        with pytest.raises(AbandonedError), only_while(lambda: next(looks, False)):
            search(question)
        assert found_by(other) == alone
    assert all(helper.process.poll() is None for helper in helpers._all), "they were let go, not ended"


def test_two_questions_at_a_time(helpers: Searchers) -> None:
    names = ("adapters on one GPU", "nothing fits")
    alone = {name: found_by(ask(name)) for name in names}
    told: dict[str, object] = {}

    def look(name: str) -> None:
        with helpers.help():
            told[name] = [found_by(ask(name)) for _ in range(2)]

    threads = [threading.Thread(target=look, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {name: [answer] * 2 for name, answer in alone.items()}


SERVER = """
import sys, time
from tightfit.desk.searchers import Searchers
helpers = Searchers(2)
with helpers.help():
    while not all(helper.is_ready() for helper in helpers._all):
        time.sleep(0.05)
    print(*(helper.process.pid for helper in helpers._all), flush=True)
    time.sleep(600)
"""


def test_no_helper_outlives_a_server_that_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(word) for word in server.stdout.readline().split()]
    assert len(pids) == 2
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    server.stdout.close()
    end = now() + 60
    while any(is_alive(pid, None) for pid in pids):
        assert now() < end, "a helper goes on without its server"
        sleep(0.05)
