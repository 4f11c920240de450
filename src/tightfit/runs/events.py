"""What a worker reports, a JSON object a line, as typed values.

The desk may be newer or older than the worker, and a line may be torn by a full disk or a killed process. So a key
that is missing or has another type is None, an event that is not known is shown as text, and what is no event at all
is left out. Nothing here raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.inputs.records import parse_json
from tightfit.messages import Said, as_json, change_texts, from_json

_MOST_TEXT = 2000
"""Characters of a sentence that are kept: a screen is not a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The worker has read its orders. None: it does not say."""

    model: str | None = None
    engine: str | None = None
    world: int | None = None
    launcher: str | None = None
    peak_bytes: int | None = None
    """As it was predicted."""
    limit_bytes: int | None = None
    """What a card has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Long work before the first step: a download, the data's cache, weights being read."""

    what: Said
    done: float | None
    total: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Something that the plan promised, looked at in the running worker."""

    name: str
    ok: bool
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMark:
    """Memory at a milestone, beside what was predicted for it."""

    milestone: str
    predicted_bytes: int | None
    measured_bytes: int | None
    """On the GPU; None: the rank has none."""
    host_bytes: int | None = None
    """What the rank holds of RAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The largest batch has passed, before the first step."""

    seconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    step: int
    steps: int | None
    loss: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    step_s: float | None
    seconds_left: float | None
    now_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None
    """RAM of the rank that reports."""
    loss_scale: float | None
    skipped: bool
    alloc_retries: int | None = None
    """Times so far that the GPU's allocator had to free its cache and try again; None: no GPU, or nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    step: int | None
    loss: float | None
    perplexity: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    folder: str
    written_bytes: int | None
    files: tuple[str, ...] = ()
    """Within the folder; empty: an earlier release wrote it, which did not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A checkpoint stands."""

    step: int | None
    folder: str
    written_bytes: int | None
    seconds: float | None
    blocked_s: float | None
    """What the training waited of these."""
    background: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A checkpoint could not be written; the training goes on without it."""

    step: int | None
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The run goes on from a checkpoint."""

    step: int | None
    folder: str
    from_engine: str | None
    from_world: int | None
    changed: tuple[Said, ...]
    """What is not as it was when the checkpoint was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that cannot be used, and why."""

    folder: str
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Somebody has asked the run to end."""

    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBegan:
    """The ranks are started again; the first start says nothing of the kind."""

    number: int
    plan: Said
    """How it is computed now."""
    changed: tuple[Said, ...]
    """Lever by lever; empty: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An attempt ended in distress, and what follows."""

    number: int
    kind: str
    """Of the cause."""
    text: Said
    """The cause."""
    step: int | None
    """The last one that was made."""
    kept_step: int | None
    """The newest checkpoint; None: there is none."""
    action: str
    because: Said
    wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank's last words."""

    rank: int | None
    kind: str
    text: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The curves of the run as files."""

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    reason: str
    summary: Mapping[str, Any]
    """What the worker adds about the whole run: for programs, which know their version of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An event of a newer worker."""

    name: str
    text: Said


Event = (
    Started
    | Progress
    | Proof
    | MemoryMark
    | Probe
    | Step
    | Evaluation
    | Warned
    | Saved
    | Checkpointed
    | CheckpointFailed
    | Resumed
    | PassedOver
    | Stopping
    | AttemptBegan
    | AttemptFailed
    | Failed
    | Pictures
    | Ended
    | Other
)


def event_of(line: str | bytes) -> Event | None:
    """The event in a line; None: there is none."""
    return events_of([line.encode("utf-8", "replace") if isinstance(line, str) else line])[0]


def events_of(lines: Sequence[bytes]) -> list[Event | None]:
    """The event in each line. Many lines are parsed at once, for which json needs little more than half the time."""
    try:
        trees = parse_json(b"[%b]" % b",".join(lines))
    except ValueError:
        trees = None
    if trees is None or len(trees) != len(lines):  # one of them is torn, or empty
        trees = [_tree(line) for line in lines]
    return [_event(tree) for tree in trees]


def time_of(line: bytes) -> float | None:
    """When the event in a line happened, in seconds since the epoch; None: it does not say."""
    tree = _tree(line)
    return _number(tree.get("at")) if isinstance(tree, dict) else None


def _tree(line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None


def _event(values: Any) -> Event | None:
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        return None
    name = values["event"]
    reader = _READERS.get(name)
    event = reader(values) if reader is not None else None
    return event or Other(name=name[:80], text=_rest(values))


def _started(values: Mapping[str, Any]) -> Event:
    block = values.get("predicted")
    predicted: Mapping[str, Any] = block if isinstance(block, dict) else {}
    return Started(
        model=_text(values.get("model")),
        engine=_text(values.get("engine")),
        world=_count(values.get("world")),
        launcher=_text(values.get("launcher")),
        peak_bytes=_count(predicted.get("peak_bytes")),
        limit_bytes=_count(predicted.get("limit_bytes")) or None,
    )


def _progress(values: Mapping[str, Any]) -> Event:
    what = read_said(values.get("what")) or "working"
    return Progress(what=what, done=_number(values.get("done")), total=_number(values.get("total")))


def _proof(values: Mapping[str, Any]) -> Event:
    name = _text(values.get("name")) or ""
    return Proof(name=name, ok=values.get("ok") is True, text=read_said(values.get("text")) or name)


def _memory(values: Mapping[str, Any]) -> Event:
    return MemoryMark(
        milestone=_text(values.get("milestone")) or "?",
        predicted_bytes=_count(values.get("predicted_bytes")),
        measured_bytes=_count(values.get("measured_bytes")),
        host_bytes=_count(values.get("host_bytes")),
    )


def _probe(values: Mapping[str, Any]) -> Event:
    return Probe(seconds=_number(values.get("seconds")), peak_bytes=_count(values.get("peak_bytes")))


def _step(values: Mapping[str, Any]) -> Event | None:
    step = _count(values.get("step"))
    if step is None:
        return None
    memory = values.get("memory")
    held: Mapping[str, Any] = memory if isinstance(memory, dict) else {}
    return Step(
        step=step,
        steps=_count(values.get("steps")),
        loss=_number(values.get("loss"), finite=False),
        learning_rate=_number(values.get("learning_rate")),
        tokens_per_s=_number(values.get("tokens_per_s")),
        step_s=_number(values.get("step_s")),
        seconds_left=_number(values.get("seconds_left")),
        now_bytes=_count(held.get("now_bytes")),
        peak_bytes=_count(held.get("peak_bytes")),
        host_bytes=_count(held.get("host_bytes")),
        loss_scale=_number(values.get("loss_scale")),
        skipped=values.get("skipped") is True,
        alloc_retries=_count(values.get("alloc_retries")),
    )


def _evaluation(values: Mapping[str, Any]) -> Event:
    return Evaluation(
        step=_count(values.get("step")),
        loss=_number(values.get("loss"), finite=False),
        perplexity=_number(values.get("perplexity"), finite=False),
    )


def _warned(values: Mapping[str, Any]) -> Event | None:
    text = read_said(values.get("text"))
    return Warned(text=text) if text else None


def _saved(values: Mapping[str, Any]) -> Event:
    return Saved(
        folder=_text(values.get("folder")) or "?",
        written_bytes=_count(values.get("bytes")),
        files=_texts(values.get("files")),
    )


def _checkpointed(values: Mapping[str, Any]) -> Event:
    return Checkpointed(
        step=_count(values.get("step")),
        folder=_text(values.get("folder")) or "?",
        written_bytes=_count(values.get("bytes")),
        seconds=_number(values.get("seconds")),
        blocked_s=_number(values.get("blocked_s")),
        background=values.get("background") is True,
    )


def _checkpoint_failed(values: Mapping[str, Any]) -> Event:
    return CheckpointFailed(
        step=_count(values.get("step")), text=read_said(values.get("text")) or "no reason was given"
    )


def _resumed(values: Mapping[str, Any]) -> Event:
    return Resumed(
        step=_count(values.get("step")),
        folder=_text(values.get("folder")) or "?",
        from_engine=_text(values.get("from_engine")),
        from_world=_count(values.get("from_world")),
        changed=_saids(values.get("changed")),
    )


def _passed_over(values: Mapping[str, Any]) -> Event:
    return PassedOver(
        folder=_text(values.get("folder")) or "?", text=read_said(values.get("text")) or "no reason was given"
    )


def _stopping(values: Mapping[str, Any]) -> Event:
    return Stopping(text=read_said(values.get("text")) or "asked to stop")


def _attempt(values: Mapping[str, Any]) -> Event | None:
    number = _count(values.get("number"))
    if number is None:
        return None
    return AttemptBegan(number=number, plan=read_said(values.get("plan")) or "?", changed=_saids(values.get("changed")))


def _attempt_failed(values: Mapping[str, Any]) -> Event | None:
    number = _count(values.get("number"))
    if number is None:
        return None
    return AttemptFailed(
        number=number,
        kind=_text(values.get("kind")) or "unknown",
        text=read_said(values.get("text")) or "no reason was given",
        step=_count(values.get("step")),
        kept_step=_count(values.get("kept_step")),
        action=_text(values.get("action")) or "?",
        because=read_said(values.get("because")) or "",
        wait_s=_number(values.get("wait_s")),
    )


def attempt_line(event: AttemptBegan | AttemptFailed, at: float) -> str:
    """The line that says it, for whoever writes events beside the worker."""
    name = "attempt" if isinstance(event, AttemptBegan) else "attempt_failed"
    return json.dumps({"event": name, "at": round(at, 3), **asdict(event)}, allow_nan=False, default=as_json) + "\n"


def _failed(values: Mapping[str, Any]) -> Event:
    return Failed(
        rank=_count(values.get("rank")),
        kind=_text(values.get("kind")) or "crash",
        text=read_said(values.get("text")) or "no reason was given",
    )


def _pictures(values: Mapping[str, Any]) -> Event:
    return Pictures(files=_texts(values.get("files")))


def _ended(values: Mapping[str, Any]) -> Event:
    summary = values.get("summary")
    return Ended(
        reason=_text(values.get("reason")) or "done",
        summary=finite(summary) if isinstance(summary, dict) else {},
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], Event | None]] = {
    "start": _started,
    "progress": _progress,
    "proof": _proof,
    "memory": _memory,
    "probe": _probe,
    "step": _step,
    "eval": _evaluation,
    "warning": _warned,
    "overflow": _warned,
    "saved": _saved,
    "checkpoint": _checkpointed,
    "checkpoint_failed": _checkpoint_failed,
    "resumed": _resumed,
    "passed_over": _passed_over,
    "stopping": _stopping,
    "attempt": _attempt,
    "attempt_failed": _attempt_failed,
    "error": _failed,
    "pictures": _pictures,
    "end": _ended,
}


def _rest(values: Mapping[str, Any]) -> Said:
    """An event that is not known, as plain text."""
    text = read_said(values.get("text"))
    if text:
        return text
    parts = [f"{key} {value}" for key, value in values.items() if key not in ("event", "at")]
    return clean(", ".join(parts))


def _text(value: object) -> str | None:
    return clean(value) or None if isinstance(value, str) else None


def read_said(value: object) -> Said | None:
    """A message as the worker wrote it, or the text of an older one: a terminal cannot be steered by either."""
    return change_texts(from_json(value), clean) or None if isinstance(value, dict) else _text(value)


def _saids(values: object) -> tuple[Said, ...]:
    found = map(read_said, values) if isinstance(values, list) else ()
    return tuple(said for said in found if said)


def _texts(values: object) -> tuple[str, ...]:
    found = map(_text, values) if isinstance(values, list) else ()
    return tuple(text for text in found if text)


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


def _number(value: object, *, finite: bool = True) -> float | None:
    """A number; a loss may be NaN, which has to be shown, and nothing else may."""
    if type(value) is float and value - value == 0:  # most are
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if finite and (number != number or number in (float("inf"), float("-inf"))) else number


def _count(value: object) -> int | None:
    if type(value) is int and 0 <= value < 1 << 53:  # most are
        return value
    number = _number(value)
    return None if number is None or number < 0 else int(number)
