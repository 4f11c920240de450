"""Logs that came through a camera or a word processor: letters that look alike, and quotes that were made pretty.

    Traceback (most recent cal1 last):        ModuleNotFoundError : No module named ' flash_attn '
      Fi1e " /root/train . py ", 1ine 120     20.OO GiB a1ready a1located

Quotes and full-width marks are put back wherever they are. The rest is only done to a text that shows, at a traceback's
own words, that it was read by a machine: elsewhere a 1 between letters is a 1.
"""

from __future__ import annotations

import re

_PRETTY = {
    "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'", "\uff1a": ": ", "\uff08": "(",
    "\uff09": ")", "\uff0c": ", ", "\uff1b": "; ", "\uff1d": "=",
}  # fmt: skip
_PRETTY_BYTES = tuple((pretty.encode(), plain.encode()) for pretty, plain in _PRETTY.items())
_LEADS = (b"\xe2\x80", b"\xef\xbc")
"""What all of these begin with."""
_WORDS = (b"Error", b"Exception", b"Traceback")
"""One of them is in every text that is worth it: most of a log has none, and is passed over at once."""
_RAISED = re.compile(rb"^[^\n]*(?:Error|Exception|Traceback|File |No module named)[^\n]*$", re.MULTILINE)
_READ = re.compile(
    rb"ca(?:l1|1l|11|II|lI|Il) [l1I]ast|Traceback \( most recent|Traceback ?\(most recent call last \)|"
    rb"F(?:i1|iI|1l|Il|11|II)e ?\"|\b1ine \d{1,6}, in|[a-z](?:Error|Exception) : |\ba(?:1l|l1|11|II)ocate|"
    rb"\btota1 capac"
)
_MENDS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (rb"(?<=[\d.])[Oo](?=[\dOo. ]|\b)|(?<=[\d.][Oo])[Oo]\b", b"0"),
        (rb"(?<=[a-zA-Z])1(?=[a-z])|\b1(?=[a-z]{2})|(?<=[a-z]{2})1\b", b"l"),
        (rb"(?<=ca)(?:lI|Il|II|ll)(?= last)", b"ll"),
        (rb"\bFIle\b|\bFi[Il]e(?= ?\")", b"File"),
        (rb"(?<=\w) ?\. (?=[a-z_]\w*)(?=[\w. ]{0,80}[\"()/ ])", b"."),
        (rb"(?<=\w) \.(?=\w)", b"."),
        (rb"(?<=\w) ([:,;])(?= |$)", rb"\1"),
        (rb"\( (?=\w)", b"("),
        (rb"(?<=\w) \)", b")"),
        (rb"([\"']) (?=[\w/.-]+ ?[\"'])", rb"\1"),
        (rb"(?<=[\w]) (?=[\"'](?:[,:.)]|\s*$))", b""),
        (rb" / (?=\w)|(?<=\w) /(?=\w)", b"/"),
        (rb"< (\w+) >", rb"<\1>"),
    )
)


def mended(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    if not any(word in data for word in _WORDS):
        return data
    if any(lead in data for lead in _LEADS):
        data = _RAISED.sub(_plain, data)
    if not _READ.search(data):
        return data
    for pattern, instead in _MENDS:
        data = pattern.sub(instead, data)
    return data


def _plain(found: re.Match[bytes]) -> bytes:
    line = found[0]
    for pretty, plain in _PRETTY_BYTES:
        line = line.replace(pretty, plain)
    return line.replace(b":  ", b": ")
