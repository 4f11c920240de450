"""Text in the cells of a terminal, of which a Chinese character takes two."""

from __future__ import annotations

import re
import textwrap
import unicodedata

_WIDE, _CLOSING, _OPENING = "\u4e00-\u9fff", "，。；：、）”！？", "（“"
_UNITS = re.compile(rf"[{_OPENING}]*(?:[{_WIDE}]|[^\s{_WIDE}{_OPENING}{_CLOSING}]+)[{_CLOSING}]*|\s+|.")


def count_cells(text: str) -> int:
    """The columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def pad(text: object, width: int) -> str:
    """To the left, with blanks behind it."""
    return f"{text}{' ' * (width - count_cells(str(text)))}"


def pad_left(text: object, width: int) -> str:
    """To the right, with blanks before it."""
    return f"{' ' * (width - count_cells(str(text)))}{text}"


def wrap(text: str, width: int, first: str = "", indent: str = "", *, break_on_hyphens: bool = True) -> str:
    """Lines of at most so many cells, the first behind `first` and the others behind `indent`. Chinese has no spaces: a
    line may end behind every character, but not before the mark that follows it."""
    if count_cells(text) == len(text):
        return textwrap.fill(
            text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=break_on_hyphens
        )
    lines, begun = [first], False
    for unit in _UNITS.findall(text):
        if begun and count_cells(lines[-1] + unit.rstrip()) > width:
            lines.append(indent)
            begun = False
        lines[-1] += unit if begun else unit.lstrip()
        begun = begun or not unit.isspace()
    return "\n".join(line.rstrip() for line in lines)
