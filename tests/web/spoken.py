"""Sentences as they stand in the code, for tests that ask whether the page can say them in another language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tightfit.messages import Said
from tightfit.web.sentences import said_in

PACKAGE = Path(__file__).parents[2] / "src" / "tightfit"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_LEFT = re.compile(r"(?:\b[a-z]{2,}\b[ ,]+){4}")
"""Four English words in a row: a part of the sentence was not told."""
_TAILS = {
    "meant": (": did you mean full?", ": it takes full or none"),
    "did_you_mean": ("", " (did you mean 'llama'?)"),
}
"""What these functions add to a sentence."""


def is_told(english: Said, *, stays: str = "") -> bool:
    """Whether it is Chinese, all of it and with its numbers; `stays`: what may stand in it as it is."""
    told = said_in("zh", english)
    rest = told.text.replace(stays, "") if stays else told.text
    has_all = set(NUMBER.findall(str(english))) <= set(NUMBER.findall(told.text))
    return not told.is_foreign and bool(CHINESE.search(rest)) and not _LEFT.search(rest) and has_all


def untold(sentences: Iterator[Said]) -> list[str]:
    return [f"{each} → {said_in('zh', each).text}" for each in dict.fromkeys(sentences) if not is_told(each)]


def sentences_in(path: str, *callees: str) -> Iterator[str]:
    """The first argument of each call of one of these, with its changing parts filled in."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in callees and node.args:
            yield from samples(node.args[0])


def samples(node: ast.expr) -> list[str]:
    """`f"{flag} is {n}"` → `7 is 7`. What is no text is left out."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.BinOp):
        return [a + b for a in samples(node.left) for b in samples(node.right)]
    if not isinstance(node, ast.JoinedStr):
        return []
    made = [""]
    for piece in node.values:
        made = [text + more for text in made for more in _filled(piece, text)]
    return made


def _filled(piece: ast.expr, before: str) -> list[str]:
    if isinstance(piece, ast.Constant):
        return [str(piece.value)]
    assert isinstance(piece, ast.FormattedValue)
    value = piece.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) in _TAILS:
        return list(_TAILS[ast.unparse(value.func)])
    if isinstance(value, ast.Name) and value.id in ("hint", "nearby"):
        return ["did you mean 'llama'?"] if before.endswith(": ") else list(_TAILS["did_you_mean"])
    if isinstance(value, ast.IfExp):
        return [text for branch in (value.body, value.orelse) for text in samples(branch)] or ["7"]
    return ["7"]


def spoken_in(path: str, least_words: int = 4) -> Iterator[str]:
    """All texts of a module that are long enough to be a sentence, but for its docstrings."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    inner = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inner | docs:
            yield from (text for text in samples(node) if len(text.split()) >= least_words)
