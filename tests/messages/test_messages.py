"""Every message has its text in every language, with the same fields; and the code says nothing that has none."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from string import Formatter

import pytest

from tightfit import messages
from tightfit.cli import VERBS, main
from tightfit.messages import (
    FOLDER,
    LANGUAGES,
    Choice,
    Listing,
    Message,
    as_json,
    change_texts,
    from_json,
    say,
    speak,
    texts_of,
)

PACKAGE = Path(__file__).parents[2] / "src" / "tightfit"
AREAS = sorted(path.stem for path in FOLDER.glob("*.txt"))
CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")


def fields_in(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def known() -> dict[str, set[str]]:
    return {f"{area}.{name}": fields_in(both[0]) for area in AREAS for name, both in texts_of(area).items()}


BY_NAME = {"help", "part"}
"""Areas whose ids are made from names of the program."""


@cache
def code() -> list[tuple[Path, ast.Constant | ast.Call]]:
    """What is called in the code of the package, and what stands there as it is."""
    return [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Constant, ast.Call))
    ]


def ids_in_the_code() -> Iterator[tuple[Path, ast.Constant, str]]:
    """Every text that looks like the id of a message: an area that there is, a dot, words and dashes."""
    looks = re.compile(rf"(?:{'|'.join(AREAS)})\.[a-z0-9]+(?:-[a-z0-9]+)*")
    for path, node in code():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and looks.fullmatch(node.value):
            yield path, node, node.value


@pytest.mark.parametrize("area", AREAS)
def test_an_entry_is_a_name_and_a_line_for_each_language(area: str) -> None:
    lines = (FOLDER / f"{area}.txt").read_text(encoding="utf-8").splitlines()
    shapes = ["text" if line.startswith("    ") else "name" for line in lines if line and not line.startswith("#")]
    assert shapes == ["name", *["text"] * len(LANGUAGES)] * len(texts_of(area))


def test_every_text_is_there_in_every_language_with_the_same_fields() -> None:
    wrong = [
        f"{area}.{name}"
        for area in AREAS
        for name, (english, chinese) in texts_of(area).items()
        if not fields_in(chinese) <= fields_in(english)  # Chinese has no plural
        or CHINESE.search(english)
        or not (CHINESE.search(chinese) or chinese == english)  # a name is the same everywhere
    ]
    assert not wrong


@pytest.mark.thorough
def test_every_id_in_the_code_has_a_text_and_every_text_is_said() -> None:
    said = {name for _, _, name in ids_in_the_code()}
    assert {each for each in known() if each.partition(".")[0] not in BY_NAME} <= said
    assert not {name for name in said - set(known()) if "-" in name}


@pytest.mark.thorough
def test_every_text_of_the_help_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked, fill = set(), messages._Filler.fill

    def look(self: messages._Filler, message: Message) -> str:
        asked.add(message.id)
        return fill(self, message)

    monkeypatch.setattr(messages._Filler, "fill", look)
    main([])
    for verb in VERBS:
        with suppress(SystemExit):
            main([verb, "--help"])
    main(["completion", "bash"])
    assert "usage: tightfit train" in capsys.readouterr().out
    assert {each for each in known() if each.startswith("help.")} <= asked


@pytest.mark.thorough
def test_a_message_is_given_the_fields_of_its_text() -> None:
    wrong, texts = [], known()
    for path, node in code():
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", None)) not in ("Message", "text", "fail"):
            continue
        given, said = {word.arg for word in node.keywords}, str(node.args[0].value)
        is_id = "." in said and said.partition(".")[0] in AREAS
        if is_id and (said not in texts or (None not in given and given != texts[said])):
            wrong.append((path.name, node.lineno, said))
    assert not wrong


@pytest.mark.thorough
def test_a_note_of_lint_is_given_the_fields_of_what_it_says_and_its_fix_needs_none() -> None:
    texts, checked, wrong = known(), 0, []
    for path, node in code():
        if PACKAGE / "formats" not in path.parents or not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "note":
            what, fix = node.args[2:]
            given = {word.arg for word in node.keywords}
            fits = isinstance(what, ast.Constant) and texts.get(str(what.value)) == given
            fits = fits and not (isinstance(fix, ast.Constant) and texts.get(str(fix.value)) != set())
            wrong += [] if fits else [(path.name, node.lineno)]
            checked += 1
    assert checked
    assert not wrong


def test_a_message_in_a_message_is_in_the_same_language() -> None:
    close = Message("model.did-you-mean", close="mamba")
    message = Message("model.unknown-activation", key="hidden_act", value="'x'", hint=close)
    assert str(message) == "hidden_act is 'x', which is no activation function of transformers (did you mean 'mamba'?)"
    assert message.text("zh") == "hidden_act 为 'x'，不是 transformers 的激活函数（是不是想写 'mamba'？）"
    assert say(message, "zh") == message.text("zh")
    assert say("as it is", "zh") == "as it is"


def test_a_process_speaks_one_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.messages._spoken", "en")
    message = Message("model.no-such-file", name="'a'")
    assert f"{message}" == "there is no file or folder 'a'"
    speak("zh")
    assert f"{message}" == "没有文件或目录 'a'"


def test_one_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"steps": ("{n:# step|# steps} and {each}", "{n} 步与{each}")}
    monkeypatch.setattr("tightfit.messages.texts_of", lambda area: texts)
    each = Choice(("a", "b", "c"))
    assert [Message("x.steps", n=n, each=each).text("en") for n in (1, 2000)] == [
        "1 step and a, b or c",
        "2,000 steps and a, b or c",
    ]
    assert Message("x.steps", n=7, each=each).text("zh") == "7 步与 a、b 或 c"


def test_messages_are_equal_by_id_and_fields() -> None:
    assert Message("model.about", model="a", problem="b") == Message("model.about", problem="b", model="a")
    assert Message("model.about", model="a", problem="b") != Message("model.about", model="a", problem="c")
    assert len(LANGUAGES) == 2


def test_a_message_is_read_from_a_record_as_it_was_written() -> None:
    close = Message("model.did-you-mean", close="mamba")
    message = Message("model.unknown-activation", key="hidden_act", value=Choice(("a", "b")), hint=close)
    assert from_json(json.loads(json.dumps(as_json(message)))) == message
    assert from_json(as_json("as it is")) == "as it is"


@pytest.mark.parametrize(
    "written",
    [
        {"message": "model.of-another-version", "size": 3},
        {"message": "../../secret.name"},
        {"message": "plan.free-memory", "share": "much"},
        {"message": 7},
        {"list": "no list"},
        {"list": [1], "joint": []},
        {},
        ["a"],
        None,
    ],
)
def test_a_record_that_is_none_of_ours_is_shown_as_text(written: object) -> None:
    assert isinstance(from_json(written), str)


def test_a_listing_is_joined_as_its_language_does_and_read_back() -> None:
    inner = Message("model.no-such-file", name="'a'")
    listing = Listing((inner, "b", "c"), "and")
    assert listing.text("en") == "there is no file or folder 'a', b and c"
    assert listing.text("zh") == "没有文件或目录 'a'、b 和 c"
    assert Listing(()).text("en") == ""
    said = Message("model.about", model="m", problem=listing)
    assert from_json(json.loads(json.dumps(as_json(said)))) == said
    upper = Message("model.no-such-file", name="'A'")
    changed = change_texts(said, str.upper)
    assert isinstance(changed, Message)
    assert changed.fields == {"model": "M", "problem": Listing((upper, "B", "C"), "and")}
