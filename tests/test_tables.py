"""A table asks all of its cases, whatever happens to one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tables import table


@table(("base", "power", "found"), [(2, 3, 8), (3, 2, 9)])
def test_cases_of_several_values_beside_a_fixture(tmp_path: Path, base: int, power: int, found: int) -> None:
    assert base**power == found
    assert tmp_path.is_dir()


def test_every_case_that_fails_is_named() -> None:
    asked = []

    @table("first", [1, 2])
    @table("second", "abc", ids=str.upper)
    def ask(first: int, second: str) -> None:
        asked.append((first, second))
        assert second == "b"
        assert {1: "one"}[first]

    with pytest.raises(
        AssertionError, match=r"2 of 2 cases(?s:.*)2 of 3 cases(?s:.*)A: (?s:.*)C: (?s:.*)B: KeyError: 2"
    ):
        ask()
    assert len(asked) == 6


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="asks nothing"):
        table("line", [])
