"""The words of the page, in each language that it speaks.

They lie in `words/`, a file a language, all with the same keys. What a plan, a diagnosis or a run says is a message
(`tightfit.messages`); what a log says stays as it is, for it has to be found again there and on the web.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from starlette.requests import Request

from tightfit.messages import Language, Message, Said, from_json, say

LANGUAGES: dict[Language, str] = {"en": "English", "zh": "中文"}  # what each calls itself
COOKIE = "tightfit_language"
FOLDER = Path(__file__).with_name("words")
KEPT = 32  # messages of a run's stream; readers of one run get the same ones within moments
SECTIONS = ("head", "lights", "attempts", "checkpoints", "events", "marks", "trouble")
"""Those of `sight.py` that say something."""
_CHINESE = re.compile("[\u4e00-\u9fff]{2}")


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    is_foreign: bool  # it is English in a page of another language: an older run wrote it, or another program


class Words(dict[str, Any]):
    """All words of a language, and how it says what was made elsewhere."""

    def __init__(self, language: Language) -> None:
        super().__init__(yaml.safe_load((FOLDER / f"{language}.yaml").read_text(encoding="utf-8")))
        self.language = language

    def say(self, said: Said) -> str:
        """What is text already stays as it is."""
        return say(said, self.language)

    def said(self, said: Said) -> Sentence:
        """The same, and whether it is in another language; a name is the same everywhere."""
        text = said.text(self.language) if isinstance(said, Message) else " ".join(said.split())
        is_ours = isinstance(said, Message) or self.language == "en" or " " not in text or _CHINESE.search(text)
        return Sentence(text, is_foreign=not is_ours)


@cache
def words(language: Language) -> Words:
    return Words(language)


def language_of(request: Request) -> Language:
    """As the address says, else as was chosen before, else as the browser wishes."""
    for said in (request.query_params.get("lang"), request.cookies.get(COOKIE)):
        if said in LANGUAGES:
            return said
    # `zh-CN,zh;q=0.9,en;q=0.8` → zh.
    header = request.headers.get("accept-language", "")
    wishes = []
    for place, entry in enumerate(header[:1000].split(",")):
        tag, _, rest = entry.strip().partition(";")
        try:
            weight = float(rest.strip().removeprefix("q=")) if rest else 1.0
        except ValueError:
            weight = 0.0
        wishes.append((-weight, place, tag.partition("-")[0].lower()))
    return next((tag for weight, _, tag in sorted(wishes) if weight < 0 and tag in LANGUAGES), "en")


@lru_cache(maxsize=KEPT)
def translate(sent: bytes, language: Language) -> bytes:
    """One piece of a run's stream, with the text of its messages. One reader of a run serves all that look at it, and
    sends messages by their ids; they become text here, once for all readers of a language. What is text already stays
    as it is: logs, evidence, names, paths, and what older runs said."""
    head, found, data = sent.partition(b"\ndata: ")
    if not found or b'{"message":' not in data:
        return sent

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(each) for each in value]
        if not isinstance(value, dict):
            return value
        return say(from_json(value), language) if "message" in value else {name: put(value[name]) for name in value}

    sections = json.loads(data)
    sections |= {name: put(sections[name]) for name in SECTIONS if name in sections}
    told = json.dumps(sections, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"%s\ndata: %s\n\n" % (head, told.encode())
