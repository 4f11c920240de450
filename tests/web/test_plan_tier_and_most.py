"""What else `tightfit plan` can be asked, on the page: a tier, and the most that fits."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import client

from tightfit.cli import main
from tightfit.planner.tiers import TIERS
from tightfit.web.plan_answer import read_address
from tightfit.web.plan_view import STATIC
from tightfit.web.words import words

HERE = "gpus=2&card=24GB&host-ram=64GB"
QUERY = f"model=1b_mamba&{HERE}"


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return client(tmp_path_factory.mktemp("root"))


def said_by_the_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def without_time(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_time(value) for key, value in tree.items() if key != "search_s"}
    return tree


@pytest.mark.thorough
@pytest.mark.parametrize("query", [f"{QUERY}&tier=stage3", f"{QUERY}&tier=auto&seq=1024&micro-batch=1"])
def test_a_tier_is_answered_as_by_the_command_line(
    query: str, visitor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = visitor.get(f"/plan/answer.json?{query}")
    command = shlex.split(read_address(parse_qsl(query)).command())[2:]
    assert "--tier" in command
    assert without_time(page.json()) == without_time(said_by_the_command(command, capsys))


@pytest.mark.thorough
def test_a_tier_says_what_it_is_what_it_changes_and_what_the_search_would_do(visitor: Any) -> None:
    text = visitor.get(f"/plan?{QUERY}&tier=stage3").text
    assert "Tier stage3: ZeRO-3, for 4 to 6 GB." in text
    assert "sequences of 1536 tokens instead of 2048" in text
    assert "The free search, with 2048 tokens" in text
    assert text.count('<li class="way') == 2
    assert '<option value="stage3" selected>' in text
    assert "--tier stage3" in text
    assert "file-1" in visitor.get(f"/plan/files?{QUERY}&tier=stage3").text
    assert "cell-1536-2" in visitor.get(f"/plan/heat?{QUERY}&tier=stage3").text
    assert visitor.get(f"/plan/saved?{QUERY}&tier=stage3").status_code == 200
    assert visitor.get(f"/plan/guess?{QUERY}&tier=stage3&like={QUERY}").text == ""


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("all", "“Tier” all is a comparison: name one tier, or use tightfit plan --tier all"),
        ("nonsense", "“Tier”"),
        ("stage2_ofload", "stage2_offload"),
    ],
)
def test_a_tier_that_cannot_be_is_one_sentence(tier: str, said: str, visitor: Any) -> None:
    answer = visitor.get(f"/plan/answer?{QUERY}&tier={tier}")
    assert "data-problem" in answer.text
    assert said in answer.text


@pytest.mark.thorough
@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_is_answered(tier: str, visitor: Any) -> None:
    assert visitor.get(f"/plan/answer?{QUERY}&tier={tier}").status_code == 200


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wanted", "left_out"), [("seq", "seq=512&tier=minimal"), ("micro-batch", "micro-batch=1&effective-batch=2")]
)
def test_the_most_that_fits_is_that_of_the_command_line(
    wanted: str, left_out: str, visitor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = visitor.get(f"/plan/most?{QUERY}&{left_out}&max={wanted}").json()["fields"]
    command = [*"--model 1b_mamba --gpus 2x24GB --host-ram 64GB --max".split(), wanted]
    asked = said_by_the_command(command, capsys)
    assert found[wanted] == str(asked["max"]["value"])
    fields = "&".join(f"{name}={value}" for name, value in found.items() if value)
    again = visitor.get(f"/plan/answer.json?{QUERY}&{fields}").json()
    assert again["fits"]


@pytest.mark.thorough
def test_the_largest_preset_that_fits(visitor: Any) -> None:
    found = visitor.get(f"/plan/most?{HERE}&model=tiny_mamba&max=model").json()["fields"]
    assert found == {"model": "3b_mamba", "config": "", "tier": ""}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (f"{QUERY}&max=colour", "unknown --max"),
        (f"{QUERY}", "unknown --max"),
        ("model=7b_mamba&gpus=1&card=2GB&host-ram=4GB&max=seq", "not even the smallest fits"),
        (f"{QUERY}&seq=abc&max=micro-batch", "whole number"),
    ],
)
def test_the_most_of_what_makes_no_sense_is_one_sentence(query: str, said: str, visitor: Any) -> None:
    assert said in visitor.get(f"/plan/most?{query}").json()["problem"]["text"]


def test_every_word_that_the_scripts_name_is_there() -> None:
    for script in ("plan.js", "heat.js", "parts.js"):
        for name in re.findall(r"\bwords\.([a-z_]+)", (STATIC / script).read_text(encoding="utf-8")):
            assert name in words("en")["plan"], f"{script}: {name}"
