"""Logs whose lines are JSON, read as the text that they wrap: Docker's, and those of structured loggers.

    {"log":"Traceback (most recent call last):\\n","stream":"stderr","time":"2026-11-05T12:00:01Z"}
    {"level":"error","msg":"training failed","exc_info":"Traceback (most recent call last):\\n  File …"}

Of a structured line only what tells of a failure is unwrapped. The others stay as they are, because what they carry
beside their message (a step, a loss) shows that the training goes on. Several lines out of one stand apart by `\\r`, as
the drawings of a progress bar do, so that the numbering stays the file's.
"""

from __future__ import annotations

import json
import re
from typing import Any

_LINE = re.compile(rb'^\{[^\n]*"(?:log|msg|message|event)"\s*:\s*"[^\n]*\}[ \r]*$', re.MULTILINE)
_WORTH = re.compile(
    rb'"(?:error|critical|fatal|severe|panic|alert|emergency)"|"(?:exc_|exception|traceback|stack|error\.stack)|"log"\s*:',
    re.IGNORECASE,
)
"""What a line must have before it is worth reading as JSON, which takes a hundred times as long as looking for this."""
_MESSAGES = ("msg", "message", "event", "log")
_LEVELS = ("level", "severity", "levelname", "lvl", "log.level")
_TRACES = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stacktrace", "stack", "error.stack_trace")
_ALARMS = ("ERROR", "CRITICAL", "FATAL", "SEVERE", "PANIC", "ALERT", "EMERGENCY")
_DETAILS = ("error", "err", "error_message", "reason")
_RANKS = ("rank", "global_rank")


def unwrapped(data: bytes) -> bytes:
    """Whole lines in, as many out."""
    if (b"\n{" not in data and not data.startswith(b"{")) or not _WORTH.search(data):
        return data
    return _LINE.sub(lambda found: _text_of(found[0]), data)


def _text_of(line: bytes) -> bytes:
    if not _WORTH.search(line):
        return line
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(values, dict):
        return line
    if isinstance(values.get("log"), str) and ("stream" in values or len(values) == 1):
        return _join_pieces(values["log"])
    trace = _first(values, _TRACES)
    level = (_first(values, _LEVELS) or "").upper()
    if trace is None and level not in _ALARMS:
        return line
    rank = next((values[name] for name in _RANKS if isinstance(values.get(name), int)), None)
    mark = "" if rank is None else f"[rank{rank}]: "
    told = [text for names in (_MESSAGES, _DETAILS) if (text := _first(values, names))]
    lines = [*(f"ERROR: {text}" for text in told), *([trace] if trace else [])]
    return _join_pieces("\n".join(f"{mark}{each}" for line in lines for each in line.splitlines()))


def _first(values: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((text for name in names if isinstance(text := values.get(name), str) and text), None)


def _join_pieces(text: str) -> bytes:
    return "\r".join(text.rstrip().splitlines()).encode("utf-8", errors="replace")
