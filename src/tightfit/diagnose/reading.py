"""A log as pieces of plain bytes: any size, any encoding, never whole in memory.

Everything after this sees UTF-8 with `\\n` alone between lines. A progress bar that draws itself anew with `\\r`
becomes a line for each drawing, which all count as one in the numbering, as they do in an editor. Logs are cut at line
ends into pieces of some ten thousand bytes; a line longer than a piece is cut where the piece ends.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tightfit.diagnose.evidence import LogSource

_COLOURS = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""They stand in the middle of words, and would hide them."""
PIECE_BYTES = 64 * 1024
_BINARY_SHARE = 0.15
_CONTROL = bytes(set(range(32)) - {8, 9, 10, 12, 13, 27}) + b"\x7f"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole lines."""

    data: bytes
    """UTF-8, or bytes that are no text; drawings of a line stand apart by `\\r`."""
    first_line: int
    """Number of its first line, from 1."""


def pieces(source: LogSource) -> Iterator[Piece]:
    """The log from its beginning to its end."""
    number = 1
    for text in _cut(_texts(source)):
        data = text.replace(b"\r\n", b"\n") if b"\r" in text else text
        if b"\x1b" in data:
            data = _COLOURS.sub(b"", data)
        yield Piece(data, number)
        number += data.count(b"\n")


def is_binary(source: LogSource) -> bool:
    """Whether the beginning is no text in any encoding that logs have."""
    start = next(_texts(source), b"")[:PIECE_BYTES]
    if not start:
        return False
    strange = len(start) - len(start.translate(None, _CONTROL))
    return strange > len(start) * _BINARY_SHARE or start.startswith(
        (b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b", b"\x80\x02")
    )


# --- bytes --------------------------------------------------------------------------------------


def _texts(source: LogSource) -> Iterator[bytes]:
    """The bytes in UTF-8, in whatever portions they come."""
    if source.path is None:
        text = source.text or ""
        for start in range(0, len(text), PIECE_BYTES):
            yield text[start : start + PIECE_BYTES].encode("utf-8", errors="replace")
        return
    try:
        with source.path.open("rb") as file:
            yield from _decoded(file)
    except OSError:
        return  # gone, or not ours to read: who asks a user for it looks first


def _decoded(file: BinaryIO) -> Iterator[bytes]:
    start = file.read(PIECE_BYTES)
    encoding = _encoding(start)
    if encoding is None:
        yield start.removeprefix(codecs.BOM_UTF8)
        while more := file.read(PIECE_BYTES):
            yield more
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield decoder.decode(start).removeprefix("\ufeff").encode("utf-8", errors="replace")
    while more := file.read(PIECE_BYTES):
        yield decoder.decode(more).encode("utf-8", errors="replace")


def _encoding(start: bytes) -> str | None:
    """UTF-16 and UTF-32 by their mark or by their zeros; None: bytes whose ASCII stands for itself."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = start[:4096]
    if len(sample) >= 4 and sample.count(0) > len(sample) * 0.3:
        even, odd = sample[::2].count(0), sample[1::2].count(0)
        if odd > 4 * even:
            return "utf-16-le"
        if even > 4 * odd:
            return "utf-16-be"
    return None


def _cut(texts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in portions that end with a line; one line that is longer is cut."""
    rest = b""
    for text in texts:
        rest = rest + text if rest else text
        end = rest.rfind(b"\n") + 1
        if end == 0 and len(rest) >= 2 * PIECE_BYTES:
            end = max(rest.rfind(b"\r"), rest.rfind(b" ")) + 1 or len(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
