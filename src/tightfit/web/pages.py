"""Templates with values, as answers to requests.

Everything that is put into a template is text there, never markup: a log or a file name may hold anything.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from tightfit.priced import GIB
from tightfit.runs.lines import duration, size_words
from tightfit.web.words import COOKIE, LANGUAGES, language_of, words

TEMPLATES = Path(__file__).with_name("templates")
VIEWS = {"plan": "/plan", "runs": "/runs", "diagnose": "/diagnose"}
"""The entries of the navigation: their key in `nav` of the words, and where they lead."""
YEAR_S = 365 * 86_400


class _Environment(Environment):
    """In which `w.diagnose.clear` is a word, and not a method of dictionaries."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


@cache
def _templates() -> Environment:
    made = _Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = lambda count: "–" if count is None else size_words(count)
    made.filters["gib"] = lambda count: "–" if count is None else f"{count / GIB:.2f}"
    made.filters["duration"] = lambda seconds: "–" if seconds is None else duration(seconds)
    made.filters["count"] = lambda number: "–" if number is None else f"{number:,}"
    return made


def part(request: Request, template: str, **values: object) -> str:
    """A template as text. It knows `w` (the words), `lang`, `views`, `path`, and what is given."""
    language = language_of(request)
    return (
        _templates()
        .get_template(template)
        .render(
            w=words(language),
            lang=language,
            languages=_choices(request),
            views=VIEWS,
            path=request.url.path,
            **values,
        )
    )


def page(request: Request, template: str, status: int = 200, **values: object) -> HTMLResponse:
    """A template as an answer; a language that the address names is kept."""
    answer = HTMLResponse(part(request, template, **values), status)
    if request.query_params.get("lang") in LANGUAGES:
        answer.set_cookie(COOKIE, language_of(request), max_age=YEAR_S, samesite="strict", path="/")
    return answer


def _choices(request: Request) -> list[tuple[str, str, str]]:
    """Each language: its tag, its name, and this address in it."""
    rest = [(key, value) for key, value in request.query_params.multi_items() if key not in ("lang", "token")]
    return [(tag, name, f"?{urlencode([*rest, ('lang', tag)])}") for tag, name in LANGUAGES.items()]
