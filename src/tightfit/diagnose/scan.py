"""One pass over a log: what could be a cause, with what stands around it.

Nothing is decided here. A `Finding` is a line that a symptom's expression fits, or the exception of a traceback; it
carries the frames, the lines before and after, and what the program had last announced, so that everything later can be
told from it. The log is read once, in pieces; pieces without a word of the sieve are passed over.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tightfit.diagnose.catalogue import Catalogue, Row, Symptom, likely_rows
from tightfit.diagnose.doing import Doing, Signs, last_doing, lines_of, look_for_settings, signs_in, steps_in
from tightfit.diagnose.gate import FLAT, WORDS, ZEROS
from tightfit.diagnose.lines import HARMLESS, QUOTED, LogMessage, is_said, message_of, moment_of, plain, prefix_of
from tightfit.diagnose.reading import Piece, pieces
from tightfit.diagnose.tracebacks import HEADER, Assembler, Traceback
from tightfit.diagnose.verdict import LogSource
from tightfit.job.known import KnownConfig

_BACK = 4  # pieces that are kept to look back into
_LINES_BEFORE, _LINES_AFTER = 80, 40
_BACK_BYTES = 32 * 1024
_MOST_OF_ONE = 40  # findings of one symptom that are kept, and the last one of all
_MOST_TRACEBACKS = 60
_CUT_HEAD = re.compile(rb'^[^\n]{0,120}?File "[^"\n]+", line \d+, in ', re.MULTILINE)
"""A frame; the first one of a log with no traceback begun above it is of one whose beginning was cut off."""
_ANGLES = re.compile(r"^<\w+>")  # before a line, a node's name or a number of syslog's as well as a chat's mark
_MOST_KINDS = 4096  # kinds of lines that are remembered to be dull


@dataclass(slots=True)
class LogFinding:
    """A line that could be, or could prove, a cause."""

    source: int  # which of the logs
    order: int  # position in its log, to compare with others of the same
    message: LogMessage
    symptoms: list[Symptom]  # all whose expressions fit the line
    rank: int | None
    traceback: Traceback | None = None
    before: tuple[str, ...] = ()
    after: list[str] = field(default_factory=list)
    doing: Doing | None = None
    steps: int | None = None  # training steps before it; None: none were seen
    at: float | None = None
    later: Signs = field(default_factory=Signs)  # what the log shows of the training after it
    is_replaced: bool = False  # a later one of its kind stands for it


class LogScan:
    """What one log has to say: it is read when this is made."""

    def __init__(self, source: LogSource, index: int, known: Catalogue, *, is_only: bool = False) -> None:
        """`is_only`: there is no other log, so that nobody asks for the time of a finding."""
        self.source, self.index, self.known, self._is_only = source, index, known, is_only
        self.words = frozenset(known.by_word) | {b"traceback"}
        self.findings: list[LogFinding] = []
        self.config = KnownConfig()  # what it says in passing of the settings
        self.lines = 0
        self.counts: Counter[str] = Counter()
        # Kinds of lines that were looked at in vain. What may still make one of them worth a look: the expressions for
        # which the numbers matter, if one of these numbers is in it.
        self.dull: dict[bytes, tuple[tuple[Row, ...], tuple[bytes, ...]]] = {}
        self.once = set[bytes]()  # kinds that were looked at in vain, once at least
        self.assembler = Assembler()
        self.open: list[LogFinding] = []  # those whose lines after are still being collected
        self.usual: dict[bytes, tuple[Symptom, ...]] = {}  # kinds of which there are too many to look at each
        # The last one of those of which there are too many to keep, and what stood before it.
        self.latest: dict[str, tuple[LogFinding, tuple[Sequence[bytes], int]]] = {}
        self.fresh: list[tuple[int, LogFinding]] = []  # those of the piece at hand, and where they end in it
        self.watched: list[LogFinding] = []  # those of which it is not known yet whether the training went on
        self.back: deque[bytes] = deque(maxlen=_BACK)
        self.prefix: re.Pattern[str] | None = None  # of this log's lines, where it has one that is in no list
        self.cut_head: int | None = None  # where in the piece a traceback goes on whose beginning the log does not have
        self._read()
        tail = b"".join(self.back)
        self.doing, self.steps = last_doing(tail), steps_in(tail)  # when it ends
        self.last_lines = [plain(line) for line in lines_of(tail[-8192:]) if line.strip()][-20:]

    def _read(self) -> None:
        for piece in pieces(self.source):
            words = set(piece.data.translate(WORDS).split())
            self.config = look_for_settings(self.config, piece.data, words)
            hot = words & self.words
            signs = signs_in(piece.data) if self.watched else Signs()
            for finding in self.watched:
                finding.later += signs
            self.watched = [each for each in self.watched if not each.is_replaced and not each.later.went_on]
            head = _CUT_HEAD.search(piece.data) if piece.first_line == 1 else None
            is_cut = head is not None and b"Traceback" not in piece.data[: head.start()]
            self.cut_head = head.start() if head is not None and is_cut else None
            if hot or self.open or self.assembler.is_open or self.cut_head is not None:
                self._look_at(piece, hot)
            self.back.append(piece.data)
            self.lines = piece.first_line + piece.data.count(b"\n")
        for cut in self.assembler.unfinished():
            if not cut.is_aside:
                self._make_finding(Piece(b"", self.lines), 0, cut.opened, [], cut)
        for finding, back in self.latest.values():
            self._place(finding, back)
            self.findings.append(finding)
        self.dull.clear()

    def _look_at(self, piece: Piece, hot: set[bytes]) -> None:
        """Look at the lines that have a word of the sieve, and at those that follow what was found."""
        flat = piece.data.translate(FLAT)
        kinds = flat.translate(ZEROS).split(b"\n")
        number, start = piece.first_line, 0
        ends_drawings = b"\r" in piece.data
        again: dict[bytes, tuple[int, int, int]] = {}
        for line, kind in zip(flat.split(b"\n"), kinds, strict=True):
            end = start + len(line)
            if start == self.cut_head:
                self.assembler.begun_before(self._message(plain(piece.data[start:end]), number))
            if self.open or self.assembler.is_open:
                self._line(piece, (start, end, number), line, kind, hot)
            elif kind in self.usual:
                again[kind] = (start, end, number)
            elif (known := self.dull.get(kind)) is None or known[1]:
                told = self._likely(line, kind, hot)
                if told[1] or b"traceback" in line:
                    self._line(piece, (start, end, number), line, kind, hot, told)
                else:
                    self._is_dull(kind, told[0])
            if not ends_drawings or piece.data[end : end + 1] == b"\n":
                number += 1
            start = end + 1
        for kind, (start, end, number) in again.items():
            message = self._message(plain(piece.data[start:end]), number)
            self._make_finding(piece, end, message, list(self.usual[kind]), None)
        self.fresh.sort(key=lambda each: each[0])
        # What the rest of the piece shows of the training, for each that was found in it.
        later, until = Signs(), len(piece.data)
        for end, finding in reversed(self.fresh):
            if not finding.is_replaced:
                later = later + signs_in(piece.data[end:until])
                finding.later, until = later, end
        self.watched += [finding for _, finding in self.fresh if not finding.is_replaced and not finding.later.went_on]
        self.fresh = []

    def _rows(self, line: bytes, hot: set[bytes]) -> list[Row]:
        """The expressions that wait for a word of this line."""
        rows, by_word = list[Row](), self.known.by_word
        for word in sorted(hot.intersection(line.translate(WORDS).split())):
            rows += by_word.get(word, ())
        return rows

    def _likely(self, line: bytes, kind: bytes, hot: set[bytes]) -> tuple[Sequence[Row], list[Row]]:
        """Of a line that ends no traceback: the expressions that are left to try, and those of them that may match."""
        rows: Sequence[Row]
        if (known := self.dull.get(kind)) is None:
            rows = self._rows(line, hot)
        else:
            rows, numbers = known
            if not any([asked in line for asked in numbers]):
                return rows, []
        return rows, likely_rows(rows, line)

    def _line(
        self,
        piece: Piece,
        place: tuple[int, int, int],
        line: bytes,
        kind: bytes,
        hot: set[bytes],
        told: tuple[Sequence[Row], list[Row]] | None = None,
    ) -> None:
        """`place`: its start, its end and its number; `line`: in small letters; `kind`: with zeros for digits as well;
        `told`: what `_likely` says of it."""
        start, end, number = place
        message = self._message(plain(piece.data[start:end]), number)
        if b"traceback" in line:
            message = self._learn_prefix(message)
            # The last line before it that has something on it may announce it.
            before = piece.data[max(0, start - 4096) : start].rstrip()
            if not before and self.back:
                before = self.back[-1][-4096:].rstrip()
            said = plain(before[max(before.rfind(b"\n"), before.rfind(b"\r")) + 1 :])
            self.assembler.announced(self._message(said, number))
        if self.open:
            for finding in self.open:
                finding.after.append(message.whole)
            self.open = [finding for finding in self.open if len(finding.after) < _LINES_AFTER]
        traceback = self.assembler.take(message)
        if traceback is not None and traceback.is_aside:
            return
        closed = None if traceback is None else self._make_finding(piece, end, message, [], traceback)
        if closed is not None:
            likely = likely_rows(self._rows(line, hot), line)
            closed.symptoms += dict.fromkeys(_find_symptoms(message, likely, is_exception=True))
            return
        rows, likely = told or self._likely(line, kind, hot)
        symptoms = list(dict.fromkeys(_find_symptoms(message, likely, is_exception=False))) if likely else []
        if symptoms:
            self._make_finding(piece, end, message, symptoms, None)
            if symptoms[0].id in self.latest and len(self.usual) < _MOST_KINDS:
                self.usual[kind] = tuple(symptoms)
        else:
            self._is_dull(kind, rows)

    def _message(self, line: str, number: int) -> LogMessage:
        return message_of(line, number, self.source.rank, self.prefix)

    def _learn_prefix(self, message: LogMessage) -> LogMessage:
        """A traceback begins its line: what stands before it stands before the others too."""
        begun = HEADER.search(message.text)
        if begun is None or QUOTED.search(_ANGLES.sub("", message.text[: begun.start()])):
            return message
        learnt = prefix_of(message, begun.start())
        if learnt is None or learnt == self.prefix:
            return message
        self.prefix = learnt
        self.dull.clear()  # what stood in the middle of a line may begin it now
        return self._message(message.whole, message.number)

    def _is_dull(self, kind: bytes, rows: Sequence[Row]) -> None:
        """Lines that differ in their numbers alone are all dull, but for what asks for certain numbers."""
        if kind not in self.once:  # most lines of some logs have a kind of their own
            if len(self.once) >= _MOST_KINDS:
                self.once.clear()
            self.once.add(kind)
        elif kind not in self.dull and b"traceback" not in kind:
            if len(self.dull) >= _MOST_KINDS:
                self.dull.clear()
            asking = [row for row in rows if row.digits is not None]
            left = tuple([row for row in asking if all([run in kind for run in row.kinds])])
            self.dull[kind] = left, tuple({number for row in left for number in row.digits or (b"",)})

    def _make_finding(
        self, piece: Piece, end: int, message: LogMessage, symptoms: list[Symptom], traceback: Traceback | None
    ) -> LogFinding:
        name = symptoms[0].id if symptoms else "traceback"
        self.counts[name] += 1
        finding = LogFinding(
            source=self.index,
            order=traceback.opened.number if traceback else message.number,
            message=message,
            symptoms=symptoms,
            rank=message.rank,
            traceback=traceback,
        )
        back = (*self.back, piece.data), end
        if self.counts[name] <= (_MOST_OF_ONE if symptoms else _MOST_TRACEBACKS):
            self._place(finding, back)
            self.findings.append(finding)
        else:
            if name in self.latest:
                self.latest[name][0].is_replaced = True
            self.latest[name] = (finding, back)
        if name not in self.latest:
            self.open.append(finding)
        self.fresh.append((end, finding))
        return finding

    def _place(self, finding: LogFinding, back: tuple[Sequence[bytes], int]) -> None:
        """What stood before it in the log, and what the program was about. `back`: the pieces until its own, and where
        it ends in that."""
        (*before, last), end = back
        text = last[max(0, end - _BACK_BYTES) : end]
        for piece in reversed(before):
            text = piece[len(text) - _BACK_BYTES :] + text if len(text) < _BACK_BYTES else text
        lines = list(islice((line for line in reversed(lines_of(text)) if line.strip()), 1, _LINES_BEFORE + 1))
        finding.before = tuple(map(plain, reversed(lines)))
        finding.doing, finding.steps = last_doing(text), steps_in(text)
        if not self._is_only:
            finding.at = moment_of(text[-16384:].decode("utf-8", errors="replace"))


def _find_symptoms(message: LogMessage, rows: Sequence[Row], *, is_exception: bool) -> Iterator[Symptom]:
    is_harmless = not is_exception and bool(rows) and HARMLESS.search(message.whole) is not None
    for symptom, pattern, *_ in rows:
        if is_exception and symptom.bare:
            continue
        if is_harmless and symptom.role == "fault":
            continue
        where = message.whole if symptom.anywhere else message.head if is_exception else message.text
        found = pattern.search(where)
        if found is None or (symptom.without is not None and symptom.without.search(message.whole)):
            continue
        before = where[: found.start()].removeprefix(message.whole.removesuffix(message.text))
        if is_exception or is_said(message, before, anywhere=symptom.anywhere):
            yield symptom
