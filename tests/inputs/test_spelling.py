"""What a user sees for a misspelt key or a value of the wrong kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.inputs.spelling import Fields, as_number, listed, nearest, read_text, shown, unknown_key
from tightfit.types import ConfigError

KNOWN = ["zero_optimization", "train_batch_size", "gradient_clipping", "AdamW"]


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("Zero-Optimization", "zero_optimization"),
        ("train_batchsize", "train_batch_size"),
        ("adamw", "AdamW"),
        ("bananas", None),
        ("", None),
    ],
)
def test_nearest(word: str, right: str | None) -> None:
    assert nearest(word, KNOWN) == right


@pytest.mark.parametrize("word", ["--warmup-steps", "save_steps", "max_grad_norm", "lora_alpha"])
def test_a_name_for_another_thing_is_no_slip(word: str) -> None:
    """They share most of their letters with a known name, and nothing of its meaning."""
    assert nearest(word, ["--max-steps", "max_steps", "max_samples", "lora_rank"]) is None


def test_nearest_of_nothing() -> None:
    assert nearest("stage", []) is None


def test_the_sentence_for_an_unknown_key() -> None:
    error = unknown_key("zero_optimisation", KNOWN, "ds.json")
    assert str(error) == "unknown key 'zero_optimisation' in ds.json; did you mean 'zero_optimization'?"


def test_the_sentence_says_what_the_program_would_do() -> None:
    error = unknown_key("bananas", KNOWN, "ds.json", aside="DeepSpeed itself would ignore it silently")
    assert str(error) == (
        "unknown key 'bananas' in ds.json; it takes AdamW, gradient_clipping, train_batch_size or zero_optimization "
        "(DeepSpeed itself would ignore it silently)"
    )


def test_a_long_list_is_not_recited() -> None:
    assert str(unknown_key("bananas", [f"key{i}" for i in range(20)], "ds.json")) == "unknown key 'bananas' in ds.json"


def test_listed() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a or b"
    assert listed(["a", "b", "c"]) == "a, b or c"


def test_shown_is_short_and_survives_knots() -> None:
    knot: list[object] = []
    knot.append(knot)
    assert shown(knot) == "a list"
    assert shown("x" * 500).endswith("…")
    assert len(shown({"a": ["x" * 500]})) < 60
    assert shown(None) == "null"
    assert shown(True) == "true"


def fields(text_numbers: bool = False, **values: object) -> Fields:
    return Fields(values=values, file="f.json", silent=(None, "auto"), text_numbers=text_numbers)


def test_what_says_nothing_is_none() -> None:
    said = fields(a=None, b="auto")
    for key in "abc":
        assert said.integer(key) is None
        assert said.number(key) is None
        assert said.switch(key) is None
        assert said.text(key) is None
        assert said.word(key, ["x"]) is None


@pytest.mark.parametrize("value", [5, 5.0])
def test_integers(value: object) -> None:
    assert fields(a=value).integer("a") == 5


@pytest.mark.parametrize("value", ["5", "5e8", "x", True, 5.5, math.inf, math.nan, [], {}, 10**400, 1e300, 10**30])
def test_not_integers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"a in f\.json must be"):
        fields(a=value).integer("a")


@pytest.mark.parametrize(("text", "number"), [("5", 5), ("5e8", 500_000_000), ("1_000", 1000), (" 7 ", 7), ("2.0", 2)])
def test_numbers_written_as_text(text: str, number: int) -> None:
    assert fields(text_numbers=True, a=text).integer("a") == number
    with pytest.raises(ConfigError, match="write it without quotes"):
        fields(a=text).integer("a")


def test_ranges() -> None:
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        fields(a=0).integer("a", least=1)
    assert fields(a=-3).integer("a", least=None) == -3
    with pytest.raises(ConfigError, match=r"must be from 0 to 1, not 1\.5"):
        fields(a=1.5).number("a", most=1.0)
    with pytest.raises(ConfigError, match="must be at least 0, not -1"):
        fields(a=-1).number("a")
    assert fields(a=1, b="1e-4", text_numbers=True).number("b") == pytest.approx(1e-4)


def test_switches() -> None:
    assert fields(a=True).switch("a") is True
    assert fields(a=0).switch("a") is False
    values: list[object] = [2, 1.0, [], "yes"]
    for wrong in values:
        with pytest.raises(ConfigError, match="must be true or false"):
            fields(a=wrong).switch("a")
    with pytest.raises(ConfigError, match="not 'false': write it without quotes"):
        fields(a="false").switch("a")


def test_text_and_words() -> None:
    assert fields(a="x").text("a") == "x"
    values: list[object] = ["", "  ", 3, []]
    for wrong in values:
        with pytest.raises(ConfigError, match="must be text"):
            fields(a=wrong).text("a")
    assert fields(a="cpu").word("a", ["none", "cpu"]) == "cpu"
    with pytest.raises(ConfigError, match=r"a in f.json knows no 'CPU'; did you mean 'cpu'\?"):
        fields(a="CPU").word("a", ["none", "cpu"])
    with pytest.raises(ConfigError, match="knows no 3; it takes none or cpu"):
        fields(a=3).word("a", ["none", "cpu"])


def test_errors_name_the_path() -> None:
    block = Fields(values={"stage": "x"}, file="ds.json", path="zero_optimization")
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage in ds\.json must be a whole number, not 'x'$"):
        block.integer("stage")


def test_read_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(path, "JSON") == "{}"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.json is not JSON: it is not even text in UTF-8"):
        read_text(path, "JSON")
    with pytest.raises(ConfigError, match="no such file"):
        read_text(tmp_path / "b.json", "JSON")
    with pytest.raises(ConfigError, match="is a directory"):
        read_text(tmp_path, "JSON")
    with pytest.raises(ConfigError, match="cannot read"):
        read_text(Path("a\0b"), "JSON")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def complaint(read: Callable[[str], object]) -> str:
    try:
        read("a")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@given(value=ANYTHING, text_numbers=st.booleans())
def test_any_value_is_read_or_refused_in_one_line(value: object, text_numbers: bool) -> None:
    said = fields(text_numbers=text_numbers, a=value)
    for read in (said.integer, said.number, said.switch, said.text, lambda key: said.word(key, ["x", "y"])):
        assert len(complaint(read).splitlines()) <= 1


@pytest.mark.thorough
@given(st.text(max_size=20))
def test_as_number_never_raises(text: str) -> None:
    assert as_number(text) is None or isinstance(as_number(text), int | float)
