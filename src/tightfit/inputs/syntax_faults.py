"""What to mend in a file that is no JSON or no YAML.

The parsers say what they expected, in the words of their grammar. A user wants to know what to write, and where. Their
messages are few and old, so each is answered here with the slip that usually leads to it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml

_COMMENT = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|,(?=\s*[}\]])")

_YAML = (
    ("mapping values are not allowed", "put text with a colon in it in quotes, or give the key above its own colon"),
    ("character '\\t'", "indent with spaces instead of a tab"),
    ("could not find expected ':'", "write a colon and a space between the key and its value"),
    ("expected <block end>", "begin the line as far in as the lines that it belongs to"),
    ("expected ',' or", "write a comma there, or close the bracket"),
    ("unexpected end of stream", "close the quote that was opened"),
    ("undefined alias", "put the value that begins with * in quotes"),
    ("cannot start any token", "put the value in quotes"),
    ("could not determine a constructor", "leave out the tag that begins with !"),
    ("expected a single document", "leave out the line `---` and what follows"),
    ("unexpected ':'", "put the text that has a colon in it in quotes"),
)
"""A part of PyYAML's complaint → what to write."""


def json_fault(text: str) -> str:
    """What to write, and in which line, so that this text becomes JSON. Comments are not held against it."""
    bare = without_comments(text)
    try:
        json.loads(bare)
    except json.JSONDecodeError as error:
        comma = error.msg.startswith("Expecting ',' delimiter")  # which belongs where the last value ended
        line = bare[: error.pos].rstrip().count("\n") + 1 if comma else error.lineno
        return f"{_json_remedy(error, bare)}, in line {line}"
    except RecursionError:
        return "nest its blocks less deeply"
    except ValueError:  # int() refuses thousands of digits
        return "write a shorter number"
    line = 1 + next((at for at, lines in enumerate(_lines(text, bare)) if lines[0] != lines[1]), 0)
    return f"take out the comments and the commas before a closing bracket, first in line {line}"


def _lines(text: str, bare: str) -> list[tuple[str, str]]:
    return list(zip(text.split("\n"), bare.split("\n"), strict=True))


def without_comments(text: str) -> str:
    """The same text with blanks for what Hjson allows beyond JSON, so that every line and column stays."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])

    return _TRAILING_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _json_remedy(error: json.JSONDecodeError, text: str) -> str:
    here, before = text[error.pos : error.pos + 8], text[: error.pos].rstrip()[-1:]
    if not here.strip():
        return "write the value that is missing" if before == ":" else "close the bracket that is open"
    if error.msg.startswith("Expecting ',' delimiter"):
        return "write the comma that is missing"
    if error.msg.startswith("Expecting ':' delimiter"):
        return "write a colon between the key and its value"
    if error.msg.startswith("Expecting property name"):
        return "take out the second comma" if here[0] in ",}" else 'put the key in double quotes ("key")'
    if error.msg.startswith("Extra data"):
        return "take out what follows the closing bracket"
    if error.msg.startswith(("Unterminated string", "Invalid control character")):
        return "close the quote before the line ends"
    if error.msg.startswith("Invalid \\"):
        return "write \\\\ for a backslash"
    words = {"True": "true", "Fals": "false", "None": "null"}
    if here[:4] in words:
        return f"write {words[here[:4]]}"
    if here[0] in ",]}":
        return "write the value that is missing"
    return "put the text in double quotes" if here[0] != "." else "write a digit before the point"


def yaml_fault(error: yaml.YAMLError) -> str:
    """What to write, and in which line, so that the text becomes YAML."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError):
        return "take out the characters that are no text"
    problem = f"{error.problem or ''} {error.context or ''}"
    remedy = next((remedy for part, remedy in _YAML if part in problem), None)
    line = f", in line {error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{remedy or 'put the value in quotes'}{line}"
