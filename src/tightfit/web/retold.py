"""What the stream of a run says, in the language of who reads it.

One reader of a run serves all that look at it, and it speaks English as the run's own files do. What it sends is told
again here, once for all readers of a language. Logs, evidence, names and paths stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tightfit.messages import Language, from_json
from tightfit.web.sentences import said_in

KEPT = 32
"""Messages; readers of one run get the same ones within moments."""
Say = Callable[[object], str]


@lru_cache(maxsize=KEPT)
def retold(message: bytes, language: Language) -> bytes:
    """A message of the stream. What has no sentences in it stays as it is."""
    head, found, data = message.partition(b"\ndata: ")
    if (language == "en" and b'"message":' not in data) or not found or not message.startswith(b"id: "):
        return message

    def say(value: object) -> str:
        return said_in(language, from_json(value)).text

    sections = json.loads(data)
    for name, tell in _SECTIONS.items():
        if name in sections:
            sections[name] = tell(sections[name], say)
    told = json.dumps(sections, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"%s\ndata: %s\n\n" % (head, told.encode())


def _some(text: object, say: Say) -> str | None:
    return None if text is None else say(text)


def _head(head: dict[str, Any], say: Say) -> dict[str, Any]:
    doing = head["doing"]
    return {
        **head,
        "left": _some(head["left"], say),
        "quiet": _some(head["quiet"], say),
        "doing": None if doing is None else {**doing, "what": say(doing["what"])},
    }


def _lights(lights: dict[str, Any], say: Say) -> dict[str, Any]:
    return {
        **lights,
        "lights": [{**light, "text": say(light["text"])} for light in lights["lights"]],
        "warnings": [say(warning) for warning in lights["warnings"]],
    }


def _attempts(attempts: list[dict[str, Any]], say: Say) -> list[dict[str, Any]]:
    return [_attempt(each, say) for each in attempts]


def _attempt(attempt: dict[str, Any], say: Say) -> dict[str, Any]:
    cause, following = attempt["cause"], attempt["next"]
    return {
        **attempt,
        "plan": say(attempt["plan"]),
        "cause": None if cause is None else {**cause, "sentence": say(cause["sentence"])},
        "next": None if following is None else {name: say(text) for name, text in following.items()},
        "changed": [say(change) for change in attempt["changed"]],
    }


def _checkpoints(checkpoints: list[dict[str, Any]], say: Say) -> list[dict[str, Any]]:
    return [{**each, "torn": _some(each["torn"], say)} for each in checkpoints]


def _events(events: list[dict[str, Any]], say: Say) -> list[dict[str, Any]]:
    return [{**each, "text": say(each["text"])} for each in events]


def _trouble(trouble: dict[str, Any], say: Say) -> dict[str, Any]:
    return {**trouble, "why": _some(trouble["why"], say)}


_SECTIONS: dict[str, Callable[[Any, Say], Any]] = {
    "head": _head,
    "lights": _lights,
    "attempts": _attempts,
    "checkpoints": _checkpoints,
    "events": _events,
    "trouble": _trouble,
}
"""As `sight.py` makes them."""
