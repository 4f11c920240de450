"""What a shell says of a process that a signal ended, in other languages than English.

    ./train.sh: 第 3 行: 4711 已杀死               python train.py
    段错误 (核心已转储)

The catalogue knows the English words alone. Only a line that is nothing but such a report is put into English: the same
words in the middle of a sentence are somebody's text. Logs in GB 18030 are read as they lie, so their bytes count too.
"""

from __future__ import annotations

import re
from functools import partial

_SAID = {
    "Killed": ("已杀死", "已殺死", "Getötet", "Processus arrêté"),
    "Segmentation fault": ("段错误", "程式記憶體區段錯誤", "Speicherzugriffsfehler", "Erreur de segmentation"),
    "Bus error": ("总线错误", "Bus-Zugriffsfehler", "Erreur du bus"),
    "Aborted": ("已放弃", "已中止"),
    "Illegal instruction": ("非法指令", "Ungültiger Maschinenbefehl", "Instruction non permise"),
}
_LINES = (r"第 ?(\d+) ?行", r"Zeile (\d+)", r"ligne (\d+)")
_ENCODINGS = ("utf-8", "gb18030")


def _expression(word: str, encoding: str) -> re.Pattern[bytes] | None:
    """A whole line with this word, behind the place in a script or alone."""
    try:
        name = re.escape(word).encode(encoding)
        places = "|".join(_LINES).encode(encoding)
        colon = "(?:[:：]| :)".encode(encoding)
        dumped = "(?P<dumped> ?[(（][^()\n]{1,60}[)）])?".encode(encoding)
    except UnicodeEncodeError:
        return None
    script = rb"[^\n]{0,200}?" + colon + rb" ?(?:" + places + rb") ?" + colon + rb" *(?P<process>\d+) +"
    return re.compile(rb"^(?P<script>" + script + rb")?" + name + dumped + rb"(?P<command>  +[^\n]*)?[ \r]*$", re.M)


_TABLE = tuple(
    (english.encode(), word.encode(encoding), expression)
    for english, words in _SAID.items()
    for word in words
    for encoding in _ENCODINGS
    if (expression := _expression(word, encoding)) is not None
)


def in_english(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    for english, word, expression in _TABLE:
        if word in data:
            data = expression.sub(partial(_report, english), data)
    return data


def _report(english: bytes, found: re.Match[bytes]) -> bytes:
    dumped = b" (core dumped)" if found["dumped"] else b""
    command = found["command"] or b""
    place = b"sh: line 1: " + found["process"] + b" " if found["script"] else b""
    return place + english + dumped + command
