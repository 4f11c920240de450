"""Where the desk and the worker keep what can be made again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tightfit
from tightfit.inputs.surroundings import cache_folder


def test_a_relative_cache_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The desk and the ranks run in different folders, so it would be two caches."""
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_folder() == Path("/home/anna/.cache/tightfit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big")
    assert cache_folder() == Path("/big/tightfit")


def test_one_place_finds_our_cache() -> None:
    package = Path(tightfit.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "XDG_CACHE_HOME" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value == "XDG_CACHE_HOME"
    }
    assert readers == {"inputs/surroundings.py", "runs/build_lock.py"}, "the second finds torch's"
