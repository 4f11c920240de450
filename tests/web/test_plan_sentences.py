"""What the planner says has a Chinese form, with the same numbers in it."""

from __future__ import annotations

import re
from itertools import cycle, islice

import pytest

from tightfit.desk.plan import answered
from tightfit.desk.request import Request, read_request
from tightfit.messages import Said
from tightfit.planner.plan import Plan
from tightfit.planner.reasons import missing
from tightfit.priced import strategy_name
from tightfit.web.words import words

MODELS = (
    *("7b_mamba", "qwen2.5-7b", "llama-3.1-8b", "3b_mamba_lite", "qwen2.5-32b", "gemma-3-27b", "tiny_llama"),
    "Qwen/Qwen2.5-7B-Instruct",
)
CARDS = ("1x24GB", "2x16GB", "6x32GB", "4xRTX4090", "8xA100-80GB", "2x8xH100", "8xMI250-128GB", "4xV100-32GB")
METHODS = ("full", "lora", "qlora")
ALLOWED = (None, "lora", "precision,8bit-optimizer", "shorter-seq,smaller-model", "quantize")
LENGTHS = (1024, 4096, 16384)
RAM = ("128GB", None, "64GB", "512GB", "128GB")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def jobs(count: int) -> list[Request]:
    """Of each choice the next one, so that all meet."""
    rows = zip(
        cycle(MODELS), cycle(CARDS[:-1]), cycle(METHODS), cycle(ALLOWED), cycle(LENGTHS), cycle(RAM), strict=False
    )
    names = ("model", "gpus", "method", "allow", "seq", "host_ram")
    made = [{name: value for name, value in zip(names, row, strict=True) if value} for row in islice(rows, count)]
    return [read_request(each | ({"nvme": "2TB"} if place % 3 == 0 else {})) for place, each in enumerate(made)]


def sentences(plan: Plan) -> list[Said]:
    """All that the page may have to say of a plan."""
    ways = [*([plan.chosen] if plan.chosen else []), *plan.alternatives]
    return [
        *plan.because,
        *plan.unproven,
        *plan.shape.notes,
        *(plan.chosen.changes if plan.chosen else ()),
        *(remedy.cost for remedy in plan.remedies),
        *(strategy_name(way.levers) for way in ways),
        *(missing(way) for way in ways if not way.fits),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_all_that_the_planner_says_has_a_chinese_form(count: int) -> None:
    said: set[Said] = set()
    for request in jobs(count):
        plan, _ = answered(request)
        assert isinstance(plan, Plan)
        said.update(sentences(plan))
    told = {each: words("zh").said(each) for each in said}
    foreign = sorted(str(each) for each, sentence in told.items() if sentence.is_foreign)
    assert len(said) > 48
    assert foreign == []
    for english, sentence in told.items():
        assert sorted(NUMBER.findall(str(english))) == sorted(NUMBER.findall(sentence.text)), (english, sentence.text)
