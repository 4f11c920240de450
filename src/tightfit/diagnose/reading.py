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

from tightfit.diagnose.doing import signs_in
from tightfit.diagnose.evidence import LogSource
from tightfit.diagnose.ocr import mended
from tightfit.diagnose.shells import in_english
from tightfit.diagnose.wrapped import unwrapped

_COLOURS = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""They stand in the middle of words, and would hide them."""
PIECE_BYTES = 64 * 1024
LARGE_BYTES = 512 * 2**20
"""Of which a log is too large to be looked at whole; some tens of megabytes take a second or more."""
HEAD_BYTES, TAIL_BYTES = 32 * 2**20, 64 * 2**20
"""What is looked at in any case: settings are told at the beginning, and ends at the end."""
SIGNS_BYTES = 2**20
"""In which a training that goes on shows it."""
COUNTED_BYTES = 4 * 2**20
_BINARY_SHARE = 0.15
_FOREIGN_SHARE = 0.3
_BEYOND_ASCII = bytes(range(128, 256))
_ENCODINGS = ("utf-8", "gb18030", "big5", "shift_jis", "euc_kr")
"""That logs are written in where most of them is no ASCII."""
_CONTROL = bytes(set(range(32)) - {8, 9, 10, 12, 13, 27}) + b"\x7f"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole lines."""

    data: bytes
    """UTF-8, or bytes that are no text; drawings of a line stand apart by `\\r`."""
    first_line: int
    """Number of its first line, from 1."""


def pieces(source: LogSource) -> Iterator[Piece]:
    """The log from its beginning to its end; of a very large one, what the end shows to be over is only counted."""
    gap = _gap(source)
    if gap is None:
        yield from _number_lines(_texts(source), 1)
        return
    number = 1
    for piece in _number_lines(_span(source, 0, gap.start), number):
        yield piece
        number = piece.first_line + piece.data.count(b"\n")
    number += sum(text.count(b"\n") for text in _span(source, gap.start, gap.stop, COUNTED_BYTES))
    yield from _number_lines(_span(source, gap.stop, None), number)


def _number_lines(texts: Iterator[bytes], number: int) -> Iterator[Piece]:
    for text in _cut(texts):
        data = mended(in_english(unwrapped(text.replace(b"\r\n", b"\n") if b"\r" in text else text)))
        if b"\x1b" in data:
            data = _COLOURS.sub(b"", data)
        yield Piece(data, number)
        number += data.count(b"\n")


def _gap(source: LogSource) -> range | None:
    """The bytes that need not be looked at. What failed is only of interest where the training did not go on after it:
    so all is over that stands before a place, near the end, at which it visibly goes on. None: all is looked at."""
    try:
        if source.path is None or not source.path.is_file() or source.path.stat().st_size < LARGE_BYTES:
            return None
        with source.path.open("rb") as file:
            if _encoding(file.read(PIECE_BYTES)) is not None:
                return None
            first = _line_after(file, HEAD_BYTES)
            back = TAIL_BYTES
            while (start := _line_after(file, source.path.stat().st_size - back)) > first:
                if signs_in(file.read(SIGNS_BYTES)).went_on:
                    return range(first, start)
                back *= 2
    except OSError:
        pass
    return None


def _line_after(file: BinaryIO, place: int) -> int:
    """Where the next line begins."""
    file.seek(max(0, place))
    file.readline(PIECE_BYTES)
    return file.tell()


def _span(source: LogSource, start: int, stop: int | None, portion: int = PIECE_BYTES) -> Iterator[bytes]:
    """Some bytes of a file."""
    assert source.path is not None
    try:
        with source.path.open("rb") as file:
            file.seek(start)
            left = (source.path.stat().st_size if stop is None else stop) - start
            while left > 0 and (text := file.read(min(portion, left))):
                left -= len(text)
                if source.on_read is not None:
                    source.on_read(file.tell())
                yield text
    except OSError:
        return


def is_binary(source: LogSource) -> bool:
    """Whether the beginning is no text in any encoding that logs have."""
    start = next(_texts(source), b"")[:PIECE_BYTES]
    if not start:
        return False
    if start.startswith((b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b", b"\x80\x02", b"%PDF-", b"\x89PNG")):
        return True
    strange = len(start) - len(start.translate(None, _CONTROL))
    return strange > len(start) * _BINARY_SHARE or _is_noise(start)


def _is_noise(start: bytes) -> bool:
    """Whether so much of it is beyond ASCII that an encoding should explain it, and none does."""
    if len(start.translate(None, _BEYOND_ASCII)) >= len(start) * (1 - _FOREIGN_SHARE):
        return False
    for encoding in _ENCODINGS:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(start)
        except UnicodeDecodeError:
            continue
        return text.count("\ufffd") > len(text) * _FOREIGN_SHARE
    return True


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
            for portion in _decode(file):
                if source.on_read is not None:
                    source.on_read(file.tell())
                yield portion
    except OSError:
        return  # gone, or not ours to read: who asks a user for it looks first


def _decode(file: BinaryIO) -> Iterator[bytes]:
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
