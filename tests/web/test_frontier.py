"""The map of model size × sequence length on the page: known bit by bit, kept, and each place opens its question."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import PATIENCE_S, client

from tightfit.web import frontier
from tightfit.web.plan_answer import answer_to, read_address

QUERY = "model=qwen1.5-0.5b&card=12GB&gpus=1&host-ram=16GB&seq=1024&method=lora&micro-batch=2&lang=en"


@pytest.mark.thorough
def test_the_map_fills_and_each_place_opens_the_question_that_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "MODELS", ("Qwen/Qwen2.5-1.5B-Instruct",))
    monkeypatch.setattr(frontier, "SEQUENCES", (1024, 32_768))
    visitor = client(tmp_path)
    first = visitor.get(f"/plan/frontier?{QUERY}").text
    assert 'data-whole="0"' in first
    assert "Still being computed" in first
    until = time.monotonic() + PATIENCE_S
    while 'data-whole="1"' not in (text := visitor.get(f"/plan/frontier?{QUERY}").text):
        assert time.monotonic() < until
        time.sleep(0.2)
    places = re.findall(r'href="/plan\?([^"]+)" aria-label="([^"]+)"', text)
    assert len(places) == 4
    for address, label in places:
        asked = read_address(parse_qsl(address.replace("&amp;", "&")))
        answer = answer_to(asked, advice=False)
        assert asked.get("micro_batch") == "", "the levers are the planner's"
        model, length = asked.get("model"), int(asked.get("seq"))
        assert label.startswith(f"{model}, {length:,} tokens: ")
        chosen = answer.plan.chosen
        assert chosen is not None
        assert f", {chosen.pace.tokens_per_s:,.0f} tokens per second" in label
    assert 'aria-current="true"' in text, "the question in the form is a place of the map"
    process = next(reversed(frontier._maps.values())).process
    again = visitor.get(f"/plan/frontier?{QUERY.replace('seq=1024', 'seq=2048')}").text
    assert 'data-whole="1"' in again, "another length on the same machine is the same map"
    assert next(reversed(frontier._maps.values())).process is process
    assert "host-ram=16GB" in again
    assert visitor.get("/plan/frontier?card=notacard").status_code == 400


def test_a_map_that_nobody_asks_for_is_left_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "PATIENCE_S", 0.0)
    visitor, query = client(tmp_path), QUERY.replace("12GB", "11GB")
    visitor.get(f"/plan/frontier?{query}")
    drawn = next(reversed(frontier._maps.values()))
    assert drawn.process is not None
    left = drawn.process
    assert left.wait(PATIENCE_S) < 0, "it was ended, long before it was through"
    monkeypatch.setattr(frontier, "PATIENCE_S", PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while visitor.get(f"/plan/frontier?{query}").status_code == 200 and not drawn.places:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert drawn.process is not left
    drawn.process.terminate()
