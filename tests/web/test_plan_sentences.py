"""What the planner says has a Chinese form, with the same numbers in it."""

from __future__ import annotations

import re
from itertools import cycle, islice

import pytest

import patience
from tightfit.desk.plan import answered
from tightfit.desk.request import Request, read_request
from tightfit.messages import Said
from tightfit.planner.plan import Plan
from tightfit.planner.reasons import missing
from tightfit.priced import strategy_name
from tightfit.web.sentences import said_in

MODELS = (
    *("7b_mamba", "qwen2.5-7b", "llama-3.1-8b", "3b_mamba_lite", "qwen2.5-32b", "gemma-3-27b", "tiny_llama"),
    "Qwen/Qwen2.5-7B-Instruct",
)
CARDS = ("1x24GB", "2x16GB", "6x32GB", "4xRTX4090", "8xA100-80GB", "2x8xH100", "8xMI250-128GB", "4xV100-32GB")
METHODS = ("full", "lora", "qlora")
ALLOWED = (None, "lora", "precision,8bit-optimizer", "shorter-seq,smaller-model", "quantize")
LENGTHS = (1024, 4096, 16384)
RAM = ("128GB", None, "64GB", "512GB", "128GB")
ENOUGH = 0.95
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
def test_nearly_all_that_the_planner_says_has_a_chinese_form() -> None:
    said: set[Said] = set()
    for request in jobs(20):
        plan, _ = answered(request)
        assert isinstance(plan, Plan)
        said.update(sentences(plan))
    told = {each: said_in("zh", each) for each in said}
    foreign = sorted(str(each) for each, sentence in told.items() if sentence.is_foreign)
    assert len(said) > 100
    assert len(foreign) <= (1 - ENOUGH) * len(said), foreign
    for english, sentence in told.items():
        assert sorted(NUMBER.findall(str(english))) == sorted(NUMBER.findall(sentence.text)), (english, sentence.text)


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        (
            "Needs 30.6 of 32.0 GiB on each GPU: 1.4 GiB (4.3% of the card) stays free.",
            "每张 GPU 需要 32.0 GiB 显存中的 30.6 GiB，剩余 1.4 GiB（占整卡 4.3%）。",
        ),
        (
            "ZeRO-2, optimizer on CPU fits too and takes 35% longer, mostly by host optimizer.",
            "ZeRO-2，优化器卸载到 CPU 也放得下，但慢 35%，主要因为 CPU 上的优化器更新。",
        ),
        (
            "Unsharded on 4 GPUs would be faster but needs 2.1 GiB more than the card has at the optimizer step, and "
            "32.0 GiB more host RAM than there is.",
            "不切分（4 张 GPU）会更快，但优化器更新时显存还差 2.1 GiB，主机内存还差 32.0 GiB。",
        ),
        (
            "--allow smaller-model would do as well: trains 3b_mamba instead of 7b_mamba; it is another model (ZeRO-3, "
            "optimizer on CPU, 2,983 tokens/s).",
            "--allow smaller-model 也可以：改为训练 3b_mamba，而不是 7b_mamba；那是另一个模型（"
            "ZeRO-3，优化器卸载到 CPU，2,983 tokens/s）。",
        ),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("called 7B, really 7.62B", "名为 7B，实际为 7.62B"),
    ],
)
def test_a_sentence_is_said_again(english: str, chinese: str) -> None:
    told = said_in("zh", english)
    assert told.text == chinese
    assert not told.is_foreign


def test_what_has_no_pattern_stays_and_is_marked() -> None:
    told = said_in("zh", "Nobody has ever said this {sentence} before.")
    assert (told.text, told.is_foreign) == ("Nobody has ever said this {sentence} before.", True)
    assert not said_in("en", "Any sentence.").is_foreign


@pytest.mark.parametrize(
    "text",
    [
        "a, " * 800, "a; " * 800, "ZeRO-2; " * 300, "ZeRO-2 → ZeRO-3, " * 140, "! " * 1200, "A b. " * 480,
        "--a: " * 450 + "x", "The GPU ran out of memory after the first steps had fitted (" * 40,
        " holds no 7 of 7 with 7" * 100 + " elements", "x" * 2_000_000, "\ue0007\ue001 in the loss",
        "✗ attempt 1 failed after step 3: " + "a → stop: " * 200,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_text_that_was_made_to_fit_everything_is_no_trouble(text: str) -> None:
    began = patience.now()
    said_in("zh", text)
    assert patience.now() - began < 2
