"""The catalogue of symptoms in Chinese: all of it, file by file, and as a diagnosis fills it in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml

from tables import table

sys.path.insert(0, str(Path(__file__).parent))

from spoken import CHINESE, PACKAGE, is_told, untold

from tightfit.diagnose.catalogue import Symptom, catalogue
from tightfit.diagnose.oom import number_words
from tightfit.diagnose.phases import PLACES
from tightfit.diagnose.verdict import Kind, OomNumbers
from tightfit.diagnose.wording import filled
from tightfit.web import diagnose_view
from tightfit.web.sentences import FOLDER, said_in, symptoms_in

HOLES = re.compile(r"\{(\w+)\}")
CAPTURED = sorted((Path(__file__).parents[1] / "diagnose" / "captured").glob("*.log"))
GIB = 2**30


def texts(symptom: Symptom) -> tuple[str, ...]:
    return (symptom.title, symptom.cause, *(remedy.text for remedy in symptom.remedies))


def shared_fixes() -> list[str]:
    tree = yaml.safe_load((PACKAGE / "diagnose/symptoms/remedies.yaml").read_text(encoding="utf-8"))
    return [entry["text"] for entry in tree.values()]


def test_every_text_of_the_catalogue_has_a_chinese_one() -> None:
    """A new or changed text wants its line in the file of the same name in `web/words/`: `"English": "中文"`."""
    known = symptoms_in("zh")
    missing = [text for symptom in catalogue().symptoms for text in texts(symptom) if text not in known]
    assert [*missing, *(text for text in shared_fixes() if text not in known)] == []


def test_no_chinese_text_is_of_one_that_has_gone() -> None:
    there = {text for symptom in catalogue().symptoms for text in texts(symptom)} | set(shared_fixes())
    assert [text for text in symptoms_in("zh") if text not in there] == []


def test_what_a_log_fills_in_is_the_same_in_both() -> None:
    for english, chinese in symptoms_in("zh").items():
        assert sorted(HOLES.findall(english)) == sorted(HOLES.findall(chinese)), english


def test_it_is_chinese() -> None:
    unlike = [text for text in symptoms_in("zh").values() if not CHINESE.search(HOLES.sub("", text))]
    assert unlike == ["{sentence}"]


def test_flags_settings_and_numbers_stay() -> None:
    """What can be typed or looked up: names with an underscore, flags, paths, figures."""
    typed = re.compile(r"(?<![{\w])(?:\w+_\w+|--?[a-z][\w-]+|/\w+(?:/\w+)+|\d+(?:\.\d+)*e?\d*)(?![\w}])")
    for english, chinese in symptoms_in("zh").items():
        assert [word for word in typed.findall(english) if word not in chinese] == [], f"{english} → {chinese}"


def test_the_files_are_those_of_the_catalogue() -> None:
    catalogued = {path.stem for path in (PACKAGE / "diagnose/symptoms").glob("*.yaml")}
    assert {path.name.split(".")[1] for path in FOLDER.glob("symptoms.*.zh.yaml")} == catalogued


def test_nothing_is_said_twice() -> None:
    seen: dict[str, str] = {}
    for path in sorted(FOLDER.glob("symptoms.*.zh.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                key = next(iter(yaml.safe_load(line)))
                assert key not in seen, f"{path.name} and {seen[key]}: {key}"
                seen[key] = path.name


def causes(symptom: Symptom) -> Iterator[str]:
    """As a verdict says them: in each phase and in none, with what a log has found and with what it has not."""
    words = dict.fromkeys(HOLES.findall(symptom.cause), "7")
    for place in ("", *(f" {each}" for each in PLACES.values())):
        yield f"{filled(symptom.cause, {**words, 'where': place})}."
    yield f"{filled(symptom.cause, {'where': ''})}."


@table("symptom", catalogue().symptoms, ids=lambda symptom: symptom.id)
def test_a_verdict_is_told_whatever_the_log_fills_in(symptom: Symptom) -> None:
    if symptom.cause != "{sentence}":
        assert untold(causes(symptom)) == []
    assert untold(filled(remedy.text, {}) for remedy in symptom.remedies) == []
    assert is_told(symptom.title)


@table("path", CAPTURED, ids=lambda path: path.stem)
def test_the_verdict_of_every_captured_log_is_told(path: Path) -> None:
    found = diagnose_view.diagnose_log(path.read_bytes(), path.name)
    for verdict in (*((found.verdict,) if found.verdict else ()), *found.also):
        if verdict.id != "tightfit-user":
            assert not said_in("zh", verdict.cause).is_foreign, verdict.cause
        assert [fix.text for fix in verdict.fixes if said_in("zh", fix.text).is_foreign] == []


def test_the_figures_of_a_message_are_told() -> None:
    full = OomNumbers(asked=2 * GIB, total=24 * GIB, free=GIB, allocated=20 * GIB, reserved_unused=GIB, others=3 * GIB)
    alone = OomNumbers(asked=300 * 2**20)
    some = OomNumbers(asked=2 * GIB, total=24 * GIB, free=0, allocated=20 * GIB)
    for numbers in (full, alone, some):
        for place in ("", *(f" {each}" for each in PLACES.values())):
            assert is_told(f"The GPU ran out of memory{place} ({number_words(numbers)}).")
    told = said_in("zh", f"The GPU ran out of memory in the backward pass ({number_words(full)}).")
    assert told.text == (
        "反向传播时 GPU 显存不足（申请 2.00 GiB，总量 24.00 GiB 中空闲 1.00 GiB，张量占用 20.00 GiB，"
        "另有 1.00 GiB 已预留未用；其他进程占用 3.00 GiB）。"
    )


def test_what_a_log_says_stays_as_it_is() -> None:
    said = "KeyError: 'none' in the forward pass, /数据a/b中c.json"
    told = said_in("zh", f"An exception that nothing caught ended the program: {said}.")
    assert told.text == f"程序因未捕获的异常而结束：{said}。"


def test_kinds_of_causes_have_names() -> None:
    assert [kind for kind in get_args(Kind) if said_in("zh", kind).text == kind and kind != "loss-scale"] == []
