"""The catalogue of symptoms in Chinese: all of it, and as a diagnosis fills it in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tightfit.diagnose.catalogue import Symptom, SymptomText, catalogue
from tightfit.diagnose.judge import judge
from tightfit.diagnose.oom import describe_numbers
from tightfit.diagnose.tracebacks import PLACES
from tightfit.diagnose.verdict import Evidence, LogSource, OomNumbers, Verdict
from tightfit.messages import OPTIONAL, Message, as_json, from_json, say, texts_of

CAPTURED = sorted((Path(__file__).parent / "captured").glob("*.log"))
CHINESE = re.compile(r"[\u4e00-\u9fff]")
HOLES = re.compile(r"\{(\w+)\}")
GIB = 2**30


def sentences(symptom: Symptom) -> list[SymptomText]:
    return [SymptomText(symptom.title.id), symptom.cause, *(remedy.text for remedy in symptom.remedies)]


def test_every_text_is_there_in_both_languages_with_the_same_holes() -> None:
    texts = texts_of("symptom")
    named = {sentence.id for symptom in catalogue().symptoms for sentence in sentences(symptom)}
    assert {name.removeprefix("symptom.") for name in named} | {
        name for name in texts if name.startswith("fix.")
    } == set(texts)
    for name, (english, chinese) in texts.items():
        assert not CHINESE.search(english), name
        assert CHINESE.search(chinese) or name == "tightfit-user.cause", name
        assert sorted(HOLES.findall(english)) == sorted(HOLES.findall(chinese)), name
        in_brackets = [sorted(HOLES.findall("".join(OPTIONAL.findall(text)))) for text in (english, chinese)]
        assert in_brackets[0] == in_brackets[1], name


def test_flags_settings_and_numbers_stay() -> None:
    """What can be typed or looked up: names with an underscore, flags, paths, figures."""
    typed = re.compile(r"(?<![{\w])(?:\w+_\w+|--?[a-z][\w-]+|/\w+(?:/\w+)+|\d+(?:\.\d+)*e?\d*)(?![\w}])")
    for english, chinese in texts_of("symptom").values():
        assert [word for word in typed.findall(english) if word not in chinese] == [], f"{english} → {chinese}"


@pytest.mark.thorough
def test_every_sentence_is_said_whatever_the_log_fills_in() -> None:
    """In each phase and in none, with what a log has found and with what it has not."""
    for symptom in catalogue().symptoms:
        for sentence in sentences(symptom):
            full = dict.fromkeys((*sentence.names, *sentence.optional), "7")
            for words in (full, {}, *({**full, "where": place} for place in PLACES.values())):
                for language in ("en", "zh"):
                    said = sentence.fill(words).text(language)
                    assert not re.search(r"[{}]|\[\[|\]\]|  ", said), said


@pytest.mark.thorough
@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.stem)
def test_the_verdict_of_every_captured_log_is_said_in_chinese_and_kept_in_a_record(path: Path) -> None:
    found = judge(Evidence(logs=(LogSource(name=path.name, path=path),)))
    verdicts: list[Verdict] = [*((found.verdict,) if found.verdict else ()), *found.also]
    assert verdicts or path.stem
    for verdict in verdicts:
        for said in (verdict.cause, *(fix.text for fix in verdict.fixes)):
            assert isinstance(said, Message)
            assert CHINESE.search(say(said, "zh")) or verdict.id == "tightfit-user"
            assert from_json(json.loads(json.dumps(as_json(said)))) == said


def test_the_figures_of_a_message_are_said() -> None:
    full = OomNumbers(asked=2 * GIB, total=24 * GIB, free=GIB, allocated=20 * GIB, reserved_unused=GIB, others=3 * GIB)
    cause = catalogue().by_id["device-oom"].cause.fill({"where": PLACES["backward"]})
    message = Message("diagnose.cause-with-numbers", cause=cause, numbers=describe_numbers(full))
    assert str(message) == (
        "The GPU ran out of memory in the backward pass (2.00 GiB were asked for and 1.00 GiB of 24.00 GiB were free, "
        "with 20.00 GiB in tensors and 1.00 GiB reserved beside them; other processes held 3.00 GiB)."
    )
    assert message.text("zh") == (
        "反向传播时 GPU 显存不足（申请 2.00 GiB，总量 24.00 GiB 中空闲 1.00 GiB，张量占用 20.00 GiB，"
        "另有 1.00 GiB 已预留未用；其他进程占用 3.00 GiB）。"
    )
    assert str(describe_numbers(OomNumbers(asked=300 * 2**20))) == "300 MiB were asked for"


def test_what_a_log_says_stays_as_it_is() -> None:
    said = "KeyError: 'none' in the forward pass, /数据a/b中c.json"
    cause = catalogue().by_id["exception"].cause.fill({"error": said})
    assert Message("diagnose.cause", cause=cause).text("zh") == f"程序因未捕获的异常而结束：{said}。"
