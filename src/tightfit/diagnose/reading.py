"""A log as pieces of plain bytes: any size, any encoding, never whole in memory.

Everything after this sees UTF-8 with `\\n` alone between lines. A progress bar that draws itself anew with `\\r`
becomes a line for each drawing, which all count as one in the numbering, as they do in an editor. Logs are cut at line
ends into pieces of some ten thousand bytes; a line longer than a piece is cut where the piece ends.

Then what stands between a log and its reader is taken away: JSON around the lines, a shell's report in another language
than English, and what a camera or a word processor did to it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain, islice
from typing import BinaryIO, NamedTuple

from tightfit.diagnose.doing import signs_in
from tightfit.diagnose.verdict import LogSource

_COLOURS = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""They stand in the middle of words, and would hide them."""
PIECE_BYTES = 64 * 1024
LARGE_BYTES = 512 * 2**20  # from here on a log is not looked at whole: some tens of megabytes take a second
HEAD_BYTES, TAIL_BYTES = 32 * 2**20, 64 * 2**20  # looked at in any case: settings come first, and ends last
MOST_ZEROS = 256  # pieces of them at the beginning, as a log has that was emptied while it was written
SIGNS_BYTES = 2**20  # in which a training that goes on shows it
COUNTED_BYTES = 4 * 2**20
_BINARY_SHARE = 0.15
_FOREIGN_SHARE = 0.3
_BEYOND_ASCII = bytes(range(128, 256))
_ENCODINGS = ("utf-8", "gb18030", "big5", "shift_jis", "euc_kr")  # of logs that are mostly beyond ASCII
_PLAIN = re.compile(r"[^\W\d_]?[^\WA-Z\d_]*$|[A-Z]+$|[+-]?\d[\d.,:/%-]*$")  # a word, or a figure
_MARKS = ".,:;!?()[]{}<>|=*#%\"'`~-_/\\"
_PLAIN_LETTERS, _PLAIN_WORDS = 0.1, 0.4  # shares of a log; what looks like a word in random letters is short and rare
_PACKED = re.compile(rb"\x7fELF|PK\x03\x04|\x1f\x8b|\x80\x02|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|%PDF-|\x89PNG")
_CONTROL = bytes(set(range(32)) - {8, 9, 10, 12, 13, 27}) + b"\x7f"


class Piece(NamedTuple):
    """Some whole lines."""

    data: bytes  # UTF-8, or bytes that are no text; drawings of a line stand apart by `\r`
    first_line: int  # number of its first line, from 1


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
    file.seek(max(0, place))
    file.readline(PIECE_BYTES)
    return file.tell()


def _span(source: LogSource, start: int, stop: int | None, portion: int = PIECE_BYTES) -> Iterator[bytes]:
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


def looks_like_log(source: LogSource) -> bool:
    """Whether the beginning is text, in any encoding that logs have, and has words or figures in it: random letters are
    no log in which nothing is wrong. An empty log is one."""
    start = b""
    for portion in islice(_texts(source), MOST_ZEROS):
        if not portion:
            return True
        start = portion.lstrip(b"\0")[:PIECE_BYTES]
        if start:
            break
    else:
        return False
    if _PACKED.match(start):
        return False
    if len(start) - len(start.translate(None, _CONTROL)) > len(start) * _BINARY_SHARE:
        return False
    text = start.decode("utf-8", errors="replace")
    if len(start.translate(None, _BEYOND_ASCII)) < len(start) * (1 - _FOREIGN_SHARE):
        found = _decode_foreign(start)
        if found is None:
            return False
        text = found
    words = [word.strip(_MARKS) for word in text.split()]
    plain = [word for word in words if _PLAIN.match(word)]
    letters, plain_letters = (sum(map(len, each)) for each in (words, plain))
    return plain_letters >= letters * _PLAIN_LETTERS or len(plain) >= len(words) * _PLAIN_WORDS


_IN_CHINESE = r"|第 ?\d+ ?(?:步|轮)|(?:步数|损失)\W{0,6}\d|训练(?:开始|结束|完成)"
_PRINTED = re.compile(
    rb"\d\d:\d\d:\d\d|\b(?:step|iter|iteration|epoch|loss)\b\W{0,4}\d|\d ?(?:it/s|s/it|tokens?/s|samples?/s|%\|)"
    rb"|\b(?:debug|info|warn|warnings?|errors?|passed|failed|critical|fatal|traceback|exception)\b|^\[?rank ?\d"
    + _IN_CHINESE.encode()
    + _IN_CHINESE.encode("gb18030"),
    re.IGNORECASE | re.MULTILINE,
)
"""What hardly any log is without: times, steps, losses, speeds, levels."""
_OF_A_STEP = ("step", "loss", "epoch")


def is_printed(source: LogSource) -> bool:
    """Whether a program may have printed it. A config, a program's text or a list of commands is no log, and so none in
    which nothing is wrong."""
    texts = _texts(source)
    start = next(texts, b"")
    if start.lstrip()[:1] in (b"{", b"["):
        with suppress(ValueError, RecursionError):
            whole = json.loads(start)
            return isinstance(whole, dict) and any(key in whole for key in (*_MESSAGES, *_TRACES, *_OF_A_STEP))
    return any(_PRINTED.search(text) for text in chain([start], texts))


def _decode_foreign(start: bytes) -> str | None:
    """So much is beyond ASCII that one of these should explain it; None: none does."""
    for encoding in _ENCODINGS:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(start)
        except UnicodeDecodeError:
            continue
        foreign = "".join(letter for letter in text if letter > "\x7f")
        # Four of five pairs of bytes are a character in GB 18030, few of which anybody writes.
        usual = foreign if encoding != "gb18030" else foreign.encode("gb2312", "ignore").decode("gb2312")
        if len(usual) >= len(foreign) / 2:
            return text if text.count("\ufffd") <= len(text) * _FOREIGN_SHARE else None
    return None


# --- bytes --------------------------------------------------------------------------------------


def _texts(source: LogSource) -> Iterator[bytes]:
    """The bytes in UTF-8, in whatever portions they come."""
    given = source.text or b""
    held = BytesIO(given.encode("utf-8", errors="replace") if isinstance(given, str) else given)
    try:
        with held if source.path is None else source.path.open("rb") as file:
            portion = file.read(PIECE_BYTES)
            encoding = _encoding(portion)
            decoder = None if encoding is None else codecs.getincrementaldecoder(encoding)(errors="replace")
            portion = portion.removeprefix(codecs.BOM_UTF8) if decoder is None else portion
            is_first = True
            while portion or is_first:
                if decoder is not None:
                    text = decoder.decode(portion)
                    portion = (text.removeprefix("\ufeff") if is_first else text).encode("utf-8", errors="replace")
                if source.on_read is not None:
                    source.on_read(file.tell())
                yield portion
                portion, is_first = file.read(PIECE_BYTES), False
    except OSError:
        return  # gone, or not ours to read: who asks a user for it looks first


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


# --- JSON ---------------------------------------------------------------------------------------
# Docker's logs, and those of structured loggers:
#
#     {"log":"Traceback (most recent call last):\n","stream":"stderr","time":"2026-11-05T12:00:01Z"}
#     {"level":"error","msg":"training failed","exc_info":"Traceback (most recent call last):\n  File …"}
#
# Of a structured line only what tells of a failure is unwrapped. The others stay as they are, because what they carry
# beside their message (a step, a loss) shows that the training goes on. Several lines out of one stand apart by `\r`,
# as the drawings of a progress bar do, so that the numbering stays the file's.

_JSON_LINE = re.compile(rb'^\{[^\n]*"(?:log|msg|message|event)"\s*:\s*"[^\n]*\}[ \r]*$', re.MULTILINE)
_WORTH = re.compile(
    rb'"(?:error|critical|fatal|severe|panic|alert|emergency)"|"(?:exc_|exception|traceback|stack|error\.stack)|"log"\s*:',
    re.IGNORECASE,
)
"""What a line must have before it is worth reading as JSON, which takes a hundred times as long as looking for this."""
_MESSAGES = ("msg", "message", "event", "log")
_LEVEL_KEYS = ("level", "severity", "levelname", "lvl", "log.level")
_TRACES = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stacktrace", "stack", "error.stack_trace")
_ALARMS = ("ERROR", "CRITICAL", "FATAL", "SEVERE", "PANIC", "ALERT", "EMERGENCY")
_DETAILS = ("error", "err", "error_message", "reason")
_RANKS = ("rank", "global_rank")


def unwrapped(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    if (b"\n{" not in data and not data.startswith(b"{")) or not _WORTH.search(data):
        return data
    return _JSON_LINE.sub(_unwrap_line, data)


def _unwrap_line(found: re.Match[bytes]) -> bytes:
    line = found[0]
    if not _WORTH.search(line):
        return line
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(values, dict):
        return line

    def first(names: tuple[str, ...]) -> str | None:
        return next((text for name in names if isinstance(text := values.get(name), str) and text), None)

    if isinstance(values.get("log"), str) and ("stream" in values or len(values) == 1):
        text = values["log"]
    else:
        trace, level = first(_TRACES), (first(_LEVEL_KEYS) or "").upper()
        if trace is None and level not in _ALARMS:
            return line
        rank = next((values[name] for name in _RANKS if isinstance(values.get(name), int)), None)
        mark = "" if rank is None else f"[rank{rank}]: "
        told = [f"ERROR: {text}" for names in (_MESSAGES, _DETAILS) if (text := first(names))]
        lines = [*told, *([trace] if trace else [])]
        text = "\n".join(f"{mark}{each}" for told_line in lines for each in told_line.splitlines())
    return "\r".join(text.rstrip().splitlines()).encode("utf-8", errors="replace")


# --- shells -------------------------------------------------------------------------------------
# What a shell says of a process that a signal ended, in other languages than English, which alone the catalogue knows:
#
#     ./train.sh: 第 3 行: 4711 已杀死               python train.py
#     段错误 (核心已转储)
#
# Only a line that is nothing but such a report is put into English: the same words in the middle of a sentence are
# somebody's text. Logs in GB 18030 are read as they lie, so their bytes count too.

_SHELLS_SAY = {
    "Killed": ("已杀死", "已殺死", "Getötet", "Processus arrêté"),
    "Segmentation fault": ("段错误", "程式記憶體區段錯誤", "Speicherzugriffsfehler", "Erreur de segmentation"),
    "Bus error": ("总线错误", "Bus-Zugriffsfehler", "Erreur du bus"),
    "Aborted": ("已放弃", "已中止"),
    "Illegal instruction": ("非法指令", "Ungültiger Maschinenbefehl", "Instruction non permise"),
}
_SCRIPT_LINES = (r"第 ?(\d+) ?行", r"Zeile (\d+)", r"ligne (\d+)")


def _compile_report(word: str, encoding: str) -> re.Pattern[bytes] | None:
    """A whole line with this word, behind the place in a script or alone."""
    try:
        name = re.escape(word).encode(encoding)
        places = "|".join(_SCRIPT_LINES).encode(encoding)
        colon = "(?:[:：]| :)".encode(encoding)
        dumped = "(?P<dumped> ?[(（][^()\n]{1,60}[)）])?".encode(encoding)
    except UnicodeEncodeError:
        return None
    script = rb"[^\n]{0,200}?" + colon + rb" ?(?:" + places + rb") ?" + colon + rb" *(?P<process>\d+) +"
    return re.compile(rb"^(?P<script>" + script + rb")?" + name + dumped + rb"(?P<command>  +[^\n]*)?[ \r]*$", re.M)


_SHELL_TABLE = tuple(
    (english.encode(), word.encode(encoding), expression)
    for english, words in _SHELLS_SAY.items()
    for word in words
    for encoding in ("utf-8", "gb18030")
    if (expression := _compile_report(word, encoding)) is not None
)
_SHELL_ASCII = tuple({row[1]: row for row in _SHELL_TABLE if row[1].isascii()}.values())


def in_english(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    for english, word, expression in _SHELL_ASCII if data.isascii() else _SHELL_TABLE:

        def write(found: re.Match[bytes], english: bytes = english) -> bytes:
            place = b"sh: line 1: " + found["process"] + b" " if found["script"] else b""
            return place + english + (b" (core dumped)" if found["dumped"] else b"") + (found["command"] or b"")

        if word in data:
            data = expression.sub(write, data)
    return data


# --- cameras and word processors ----------------------------------------------------------------
# Letters that look alike, and quotes that were made pretty:
#
#     Traceback (most recent cal1 last):        ModuleNotFoundError : No module named ' flash_attn '
#       Fi1e " /root/train . py ", 1ine 120     20.OO GiB a1ready a1located
#
# Quotes and full-width marks are put back wherever they are. The rest is only done to a text that shows, at a
# traceback's own words, that it was read by a machine: elsewhere a 1 between letters is a 1.

_PRETTY = {
    "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'", "\uff1a": ": ", "\uff08": "(",
    "\uff09": ")", "\uff0c": ", ", "\uff1b": "; ", "\uff1d": "=",
}  # fmt: skip
_LEADS = (b"\xe2\x80", b"\xef\xbc")  # what all of these begin with
_WORDS = (b"Error", b"Exception", b"Traceback")  # one is in every text that is worth it: most are passed over at once
_RAISED = (*_WORDS, b"File ", b"No module named")
_READ = tuple(
    re.compile(pattern)
    for pattern in (
        rb"ca(?:l1|1l|11|II|lI|Il) [l1I]ast",
        rb"Traceback \( most recent",
        rb"Traceback ?\(most recent call last \)",
        rb"F(?:i1|iI|1l|Il|11|II)e ?\"",
        rb"1ine \d{1,6}, in",
        rb"Error(?<=[a-z]Error) : ",
        rb"Exception(?<=[a-z]Exception) : ",
        rb"a(?:1l|l1|11|II)ocate",
        rb"tota1 capac",
    )
)
"""Each begins with plain letters, which are looked for quickly: as one expression they take twenty times as long."""
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


def _put_plain(line: bytes) -> bytes:
    is_odd = _LEADS[0] in line or _LEADS[1] in line or b":  " in line
    if not is_odd or not any([word in line for word in _RAISED]):
        return line
    for pretty, plain in _PRETTY.items():
        line = line.replace(pretty.encode(), plain.encode())
    return line.replace(b":  ", b": ")


def mended(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    if not any(word in data for word in _WORDS):
        return data
    if any(lead in data for lead in _LEADS):
        data = b"\n".join(map(_put_plain, data.split(b"\n")))
    if not any(pattern.search(data) for pattern in _READ):
        return data
    for pattern, instead in _MENDS:
        data = pattern.sub(instead, data)
    return data
