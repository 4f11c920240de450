"""What the stream of a run says, in the language of who reads it.

One reader of a run serves all that look at it, and sends messages by their ids. They become text here, once for all
readers of a language. What is text already stays as it is: logs, evidence, names, paths, and what older runs said.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tightfit.messages import Language, from_json, say

KEPT = 32
"""Messages of the stream; readers of one run get the same ones within moments."""
SECTIONS = ("head", "lights", "attempts", "checkpoints", "events", "trouble")
"""Those of `sight.py` that say something."""


@lru_cache(maxsize=KEPT)
def translate(sent: bytes, language: Language) -> bytes:
    """One piece of the stream, with the text of its messages."""
    head, found, data = sent.partition(b"\ndata: ")
    if not found or b'{"message":' not in data:
        return sent
    sections = json.loads(data)
    sections |= {name: _put_into(language, sections[name]) for name in SECTIONS if name in sections}
    told = json.dumps(sections, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"%s\ndata: %s\n\n" % (head, told.encode())


def _put_into(language: Language, value: Any) -> Any:
    if isinstance(value, list):
        return [_put_into(language, each) for each in value]
    if not isinstance(value, dict):
        return value
    if "message" in value:
        return say(from_json(value), language)
    return {name: _put_into(language, each) for name, each in value.items()}
