"""What a worker reports, a JSON object a line: as typed values, followed while they come, and summed up.

The desk may be newer or older than the worker, and a line may be torn by a full disk or a killed process. So a key
that is missing or has another type is None, an event that is not known is shown as text, and what is no event at all
is left out. Nothing here raises.

Of a file that is followed a line counts when its end is there: what is half written now is read again with the next
look. A file that has become shorter was begun anew. What the file holds before anybody looks is an earlier start's,
which a run that goes on from a checkpoint appends to.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import open_regular
from tightfit.messages import Message, Said, as_json, change_texts, from_json
from tightfit.types import PhaseName

MOST_RANKS = 64  # whose memory a step tells
_MOST_TEXT = 2000  # characters of a sentence that are kept: a screen is not a log


@dataclass(frozen=True, kw_only=True)
class Event:
    """One of those below. Each field is read by its type, from the key of its own name in the line."""

    kinds: ClassVar[dict[str, type[Event]]] = {}
    _without: ClassVar[Mapping[str, object]]
    _at: ClassVar[Mapping[str, str]]

    def __init_subclass__(
        cls, *, name: str = "", without: Mapping[str, object] | None = None, at: Mapping[str, str] | None = None
    ) -> None:
        """`name`: what a line calls it, or several names. `without`: what stands for a field that is missing; one that
        neither is here nor may be None makes it another event. `at`: fields with another key, or `block.key`."""
        cls._without, cls._at = without or {}, at or {}
        Event.kinds.update(dict.fromkeys(name.split(), cls))


E = TypeVar("E", bound=Event)
_NO_REASON = {"text": Message("runs.no-reason")}


@dataclass(frozen=True, kw_only=True)
class Started(Event, name="start", at={name: f"predicted.{name}" for name in ("peak_bytes", "limit_bytes", "phases")}):
    """The worker has read its orders. None: it does not say."""

    model: str | None = None
    engine: str | None = None
    world: int | None = None
    launcher: str | None = None
    peak_bytes: int | None = None  # as it was predicted
    limit_bytes: int | None = None  # what a card has
    phases: Mapping[str, Any] = field(default_factory=dict)  # bytes by the name of a phase, as they were predicted


@dataclass(frozen=True, kw_only=True)
class Progress(Event, name="progress", without={"what": Message("runs.working")}):
    """Long work before the first step: a download, the data's cache, weights being read."""

    what: Said
    done: float | None
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Proof(Event, name="proof", without={"name": "", "text": ""}):
    """Something that the plan promised, looked at in the running worker."""

    name: str
    ok: bool
    text: Said


@dataclass(frozen=True, kw_only=True)
class MemoryMark(Event, name="memory", without={"milestone": "?"}):
    """Memory at a milestone, beside what was predicted for it."""

    milestone: str
    predicted_bytes: int | None
    measured_bytes: int | None  # on the GPU; None: the rank has none
    host_bytes: int | None = None  # what the rank holds of RAM


@dataclass(frozen=True, kw_only=True)
class Probe(Event, name="probe"):
    """The largest batch has passed, before the first step."""

    seconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Step(
    Event, name="step", at={name: f"memory.{name}" for name in ("now_bytes", "peak_bytes", "host_bytes", "ranks")}
):
    step: int
    steps: int | None
    loss: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    step_s: float | None
    seconds_left: float | None
    now_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None  # RAM of the rank that reports
    loss_scale: float | None
    skipped: bool
    tokens: int | None = None  # of all ranks
    alloc_retries: int | None = None
    """Times so far that the GPU's allocator had to free its cache and try again; None: no GPU, or nobody says."""
    compiled: bool = False  # a rank made code for a layer meanwhile: its seconds say nothing about the pace
    grad_norm: float | None = None  # before clipping
    ranks: tuple[int, ...] = ()  # bytes at the peak by rank, or of its RAM where it has no GPU; empty: nobody says
    at: float | None = None  # seconds since the epoch


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event, name="eval"):
    step: int | None
    loss: float | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True)
class Warned(Event, name="warning overflow"):
    text: Said


@dataclass(frozen=True, kw_only=True)
class Saved(Event, name="saved", without={"folder": "?"}, at={"written_bytes": "bytes"}):
    folder: str
    written_bytes: int | None
    files: tuple[str, ...] = ()  # within the folder; empty: an earlier release wrote it, which did not list them


@dataclass(frozen=True, kw_only=True)
class Checkpointed(Event, name="checkpoint", without={"folder": "?"}, at={"written_bytes": "bytes"}):
    step: int | None
    folder: str
    written_bytes: int | None
    seconds: float | None
    blocked_s: float | None  # what the training waited of these
    background: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event, name="checkpoint_failed", without=_NO_REASON):
    step: int | None
    text: Said


@dataclass(frozen=True, kw_only=True)
class Resumed(Event, name="resumed", without={"folder": "?"}):
    step: int | None
    folder: str
    from_engine: str | None
    from_world: int | None
    changed: tuple[Said, ...]  # what is not as it was when the checkpoint was written


@dataclass(frozen=True, kw_only=True)
class PassedOver(Event, name="passed_over", without={"folder": "?", **_NO_REASON}):
    folder: str
    text: Said


@dataclass(frozen=True, kw_only=True)
class Stopping(Event, name="stopping", without={"text": Message("runs.asked-to-stop")}):
    text: Said


@dataclass(frozen=True, kw_only=True)
class AttemptBegan(Event, name="attempt", without={"plan": "?"}):
    """The ranks are started again; the first start says nothing of the kind."""

    number: int
    plan: Said  # how it is computed now
    changed: tuple[Said, ...]  # lever by lever; empty: as before


@dataclass(frozen=True, kw_only=True)
class AttemptFailed(
    Event, name="attempt_failed", without={"kind": "unknown", "action": "?", "because": "", **_NO_REASON}
):
    """An attempt ended in distress, and what follows."""

    number: int
    kind: str  # of the cause
    text: Said  # the cause
    step: int | None  # the last one that was made
    kept_step: int | None  # the newest checkpoint; None: there is none
    action: str
    because: Said
    wait_s: float | None


@dataclass(frozen=True, kw_only=True)
class Failed(Event, name="error", without={"kind": "crash", **_NO_REASON}):
    rank: int | None
    kind: str
    text: Said


@dataclass(frozen=True, kw_only=True)
class Pictures(Event, name="pictures"):
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ended(Event, name="end", without={"reason": "done"}):
    reason: str
    summary: Mapping[str, Any]  # what the worker adds about the whole run: for programs, which know their version of it


@dataclass(frozen=True, kw_only=True)
class Other(Event):
    name: str
    text: Said


def event_of(line: str | bytes) -> Event | None:
    return events_of([line.encode("utf-8", "replace") if isinstance(line, str) else line])[0]


def events_of(lines: Sequence[bytes]) -> list[Event | None]:
    """The event in each line."""
    return [read_event(tree) for tree in trees_of(lines)]


def trees_of(lines: Sequence[bytes]) -> list[Any]:
    """What JSON each line is, or None. Many lines are parsed at once, for which json needs little more than half the
    time."""
    trees: list[Any] | None
    try:
        trees = parse_json(b"[%b]" % b",".join(lines))
    except ValueError:
        trees = None
    if trees is None or len(trees) != len(lines):  # one of them is torn, or empty
        trees = [_tree(line) for line in lines]
    return trees


def time_of(line: bytes) -> float | None:
    """When the event in a line happened, in seconds since the epoch; None: it does not say."""
    tree = _tree(line)
    return _number(tree.get("at")) if isinstance(tree, dict) else None


def attempt_line(event: AttemptBegan | AttemptFailed, at: float) -> str:
    """The line that says it, for whoever writes events beside the worker."""
    name = "attempt" if isinstance(event, AttemptBegan) else "attempt_failed"
    return json.dumps({"event": name, "at": round(at, 3), **asdict(event)}, allow_nan=False, default=as_json) + "\n"


def _tree(line: bytes) -> Any:
    with suppress(ValueError):
        return parse_json(line.decode("utf-8", "replace"))
    return None


def read_event(values: Any) -> Event | None:
    """The event that a tree is; None: it is none."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        return None
    kind = Event.kinds.get(values["event"])
    if kind is None:
        return _other(values)
    return read_fields(values, kind) or _other(values)


def read_fields(values: Mapping[str, Any], kind: type[E]) -> E | None:
    """An event of this kind; None: a field is missing that has to be there."""
    found: dict[str, Any] = {}
    for block, rows in _blocks(kind):  # type: ignore[arg-type]  # a class can be hashed
        inside = values if block is None else values.get(block)
        get = inside.get if isinstance(inside, dict) else {}.get
        for field_name, key, plain, convert, without in rows:
            value: Any = get(key)
            if value is None:
                value = without
            elif type(value) is not plain or not 0 <= value < _PLAIN:
                value = convert(value)
                if value is None:
                    value = without
            if value is _MISSING:
                return None
            found[field_name] = value
    # A run has many thousand steps: all fields at once takes a fraction of the time that the constructor takes, which
    # sets the fields of a frozen class one by one.
    event = object.__new__(kind)
    object.__setattr__(event, "__dict__", found)
    return event


def _other(values: Mapping[str, Any]) -> Other:
    keys = ("step", "streak", "loss_scale", "layer", "where")
    if values["event"] == "overflow" and all(key in values for key in keys):
        said = Message("runs.overflow", **{key: clean(str(values[key])) for key in keys})
        return Other(name="overflow", text=said)
    rest = ", ".join(f"{key} {value}" for key, value in values.items() if key not in ("event", "at"))
    return Other(name=values["event"][:80], text=read_said(values.get("text")) or clean(rest))


_MISSING = object()
_PLAIN = 1 << 53  # numbers from zero up to here, which most are, need no reader
_Row = tuple[str, str, Any, Callable[[object], Any], object]


@cache
def _blocks(kind: type[Event]) -> Sequence[tuple[str | None, Sequence[_Row]]]:
    """Of an event, block by block: each field with its key, the type that is taken as it is where it is a plain number,
    its reader, and what stands for it where it is missing."""
    hints, rows = get_type_hints(kind), dict[str | None, list[_Row]]()
    for each in fields(kind):
        block, _, key = kind._at.get(each.name, each.name).rpartition(".")
        hint = hints[each.name]
        convert = _any_number if each.name in ("loss", "perplexity") else _CONVERTERS[hint]
        nothing = convert(None)
        if nothing is None and NoneType not in get_args(hint):
            nothing = kind._without.get(each.name, _MISSING)
        said = get_args(hint) if NoneType in get_args(hint) else (hint,)
        plain = next((plain for plain in (int, float, bool) if plain in said), None)
        rows.setdefault(block or None, []).append((each.name, key, plain, convert, nothing))
    return tuple(rows.items())


def _text(value: object) -> str | None:
    return clean(value) or None if isinstance(value, str) else None


def read_said(value: object) -> Said | None:
    """A message as the worker wrote it, or the text of an older one: a terminal cannot be steered by either."""
    return change_texts(from_json(value), clean) or None if isinstance(value, dict) else _text(value)


def _all(read: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    return lambda values: tuple(found for each in values if (found := read(each))) if isinstance(values, list) else ()


def _counts(values: object) -> tuple[int, ...]:
    """All of them or none: their places say whose they are."""
    is_whole = isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= 0
    return tuple(values) if is_whole else ()  # type: ignore[arg-type]  # a list


def clean(text: str) -> str:
    """One line that a terminal cannot be steered by."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_TEXT])
    return " ".join(plain.split())


def finite(value: Any) -> Any:
    """The same with null for each number that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def _any_number(value: object) -> float | None:
    """A loss may be NaN, which has to be shown."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        return float(value)
    return None


def _number(value: object) -> float | None:
    number = _any_number(value)
    return None if number is None or number - number != 0 else number


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None or number < 0 else int(number)


_CONVERTERS: Mapping[Any, Callable[[object], Any]] = {
    int: _count,
    int | None: _count,
    float: _number,
    float | None: _number,
    PhaseName | None: lambda value: value if value in get_args(PhaseName) else None,
    str: _text,
    str | None: _text,
    Said: read_said,
    bool: lambda value: value is True,
    tuple[str, ...]: _all(_text),
    tuple[int, ...]: _counts,
    tuple[Said, ...]: _all(read_said),
    Mapping[str, Any]: lambda value: finite(value) if isinstance(value, dict) else {},
}


# --- a file of events, followed ------------------------------------------------------------------


_CHUNK = 1 << 20
_LONGEST = 1 << 22  # bytes of one line, above which it is no event of ours


class Follower:
    def __init__(self, path: Path, *, start: int | None = None) -> None:
        """`start`: the first byte that counts; left out: what comes from now on."""
        self.path = path
        self._offset, self._torn = start or 0, b""
        if start is None:
            with suppress(OSError):  # not there yet
                self._offset = path.stat().st_size

    def poll(self) -> list[Event]:
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._torn = 0, b""
                file.seek(self._offset)
                found: list[Event] = []
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    *lines, self._torn = (self._torn + chunk).split(b"\n")
                    if len(self._torn) > _LONGEST:
                        self._torn = b""
                    events = events_of([line for line in lines if line.strip()])
                    found += [event for event in events if event is not None]
                return found
        except OSError:  # not there yet, or not any more
            return []

    def rest(self) -> list[Event]:
        """What is left when nobody writes any more: a last line may lack its end."""
        found = self.poll()
        last = event_of(self._torn)
        self._torn = b""
        return found if last is None else [*found, last]


# --- what they come to ---------------------------------------------------------------------------


_FIRST = 2  # steps that warm up kernels and caches, and say nothing about the pace
_RECENT = 4096


@dataclass(slots=True)
class Tally:
    last: Step | None = None
    first_loss: float | None = None
    peak_bytes: int | None = None
    marks: list[MemoryMark] = field(default_factory=list)
    saved: Saved | None = None
    resumed: Resumed | None = None
    checkpoint: Checkpointed | None = None  # the newest that this start has written
    pictures: tuple[str, ...] = ()  # files with the curves of the run
    ended: Ended | None = None
    _steps: int = 0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, event: Event) -> None:
        if isinstance(event, Step):
            self.last = event
            self._steps += 1
            if self.first_loss is None:
                self.first_loss = event.loss
            self.peak_bytes = max(self.peak_bytes or 0, event.peak_bytes or 0) or None
            if self._steps > _FIRST and not event.compiled:
                self._step_s.extend([] if event.step_s is None else [event.step_s])
                self._tokens_per_s.extend([] if event.tokens_per_s is None else [event.tokens_per_s])
                self._tokens.extend([] if event.tokens is None else [event.tokens])
        elif isinstance(event, MemoryMark):
            self.marks = [mark for mark in self.marks if mark.milestone != event.milestone] + [event]
        elif isinstance(event, Saved):
            self.saved = event
        elif isinstance(event, Resumed):
            self.resumed = event
        elif isinstance(event, Checkpointed):
            self.checkpoint = event
        elif isinstance(event, Pictures):
            self.pictures = event.files
        elif isinstance(event, Ended):
            self.ended = event

    @property
    def began(self) -> bool:
        return self.last is not None

    @property
    def safe_step(self) -> int | None:
        """The step from which another start would go on; None: it would begin anew, or nobody knows."""
        steps = (event.step for event in (self.checkpoint, self.resumed) if event is not None)
        return next((step for step in steps if step is not None), None)

    @property
    def timed_steps(self) -> int:
        """The steps after the first, as far as their seconds are known."""
        return len(self._step_s)

    @property
    def step_s(self) -> float | None:
        """Of the steps after the first, in the median."""
        return median(self._step_s) if self._step_s else None

    @property
    def step_tokens(self) -> float | None:
        """Likewise of a step's tokens, all ranks' together."""
        return median(self._tokens) if self._tokens else None

    @property
    def tokens_per_s(self) -> float | None:
        return median(self._tokens_per_s) if self._tokens_per_s else None
