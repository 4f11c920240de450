"""What to mend in a file that is no JSON or no YAML.

The parsers say what they expected, in the words of their grammar. A user wants to know what to write, and where. Their
messages are few and old, so each is answered here with the slip that usually leads to it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tightfit.messages import Message

if TYPE_CHECKING:
    import yaml

_COMMENT = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|,(?=\s*[}\]])")

_YAML = (
    ("mapping values are not allowed", "inputs.quote-colon-or-key"),
    ("character '\\t'", "inputs.no-tab"),
    ("could not find expected ':'", "inputs.colon-and-space"),
    ("expected <block end>", "inputs.indent-alike"),
    ("expected ',' or", "inputs.comma-or-close"),
    ("unexpected end of stream", "inputs.close-quote"),
    ("undefined alias", "inputs.quote-star"),
    ("cannot start any token", "inputs.quote-value"),
    ("could not determine a constructor", "inputs.no-tag"),
    ("expected a single document", "inputs.one-document"),
    ("unexpected ':'", "inputs.quote-colon"),
)
"""A part of PyYAML's complaint → what to write."""

_JSON = (
    ("Expecting ',' delimiter", "inputs.write-comma"),
    ("Expecting ':' delimiter", "inputs.write-colon"),
    ("Extra data", "inputs.nothing-behind"),
    ("Unterminated string", "inputs.close-quote-in-line"),
    ("Invalid control character", "inputs.close-quote-in-line"),
    ("Invalid \\", "inputs.backslash"),
)
"""How json's complaint begins → what to write."""


def json_fault(text: str) -> Message:
    """What to write, and in which line, so that this text becomes JSON. Comments are not held against it."""
    bare = without_comments(text)
    try:
        json.loads(bare)
    except json.JSONDecodeError as error:
        comma = error.msg.startswith("Expecting ',' delimiter")  # which belongs where the last value ended
        line = bare[: error.pos].rstrip().count("\n") + 1 if comma else error.lineno
        return Message("inputs.in-line", remedy=_json_remedy(error, bare), line=line)
    except RecursionError:
        return Message("inputs.less-deep")
    except ValueError:  # int() refuses thousands of digits
        return Message("inputs.shorter-number")
    lines = zip(text.split("\n"), bare.split("\n"), strict=True)
    line = 1 + next((at for at, (written, left) in enumerate(lines) if written != left), 0)
    return Message("inputs.no-comments", line=line)


def without_comments(text: str) -> str:
    """The same text with blanks for what Hjson allows beyond JSON, so that every line and column stays."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])

    return _TRAILING_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _json_remedy(error: json.JSONDecodeError, text: str) -> Message:
    here, before = text[error.pos : error.pos + 8], text[: error.pos].rstrip()[-1:]
    if not here.strip():
        return Message("inputs.write-value" if before == ":" else "inputs.close-bracket")
    if error.msg.startswith("Expecting property name"):
        return Message("inputs.second-comma" if here[0] in ",}" else "inputs.quote-key")
    for start, remedy in _JSON:
        if error.msg.startswith(start):
            return Message(remedy)
    words = {"True": "true", "Fals": "false", "None": "null"}
    if here[:4] in words:
        return Message("inputs.write-word", word=words[here[:4]])
    if here[0] in ",]}":
        return Message("inputs.write-value")
    return Message("inputs.quote-text" if here[0] != "." else "inputs.digit-first")


def yaml_fault(error: yaml.YAMLError) -> Message:
    """What to write, and in which line, so that the text becomes YAML."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError):
        return Message("inputs.no-such-letters")
    problem = f"{error.problem or ''} {error.context or ''}"
    remedy = Message(next((remedy for part, remedy in _YAML if part in problem), "inputs.quote-value"))
    mark = error.problem_mark
    return Message("inputs.in-line", remedy=remedy, line=mark.line + 1) if mark else remedy
