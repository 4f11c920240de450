"""Requests and answers: what is sent to the page, and templates with values.

Everything that is put into a template is text there, never markup: a log or a file name may hold anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from tightfit.priced import GIB
from tightfit.runs.lines import duration, size_words
from tightfit.web.words import COOKIE, LANGUAGES, language_of, words

TEMPLATES = Path(__file__).with_name("templates")
VIEWS = {"plan": "/plan", "runs": "/runs", "diagnose": "/diagnose"}
"""The entries of the navigation: their key in `nav` of the words, and where they lead."""
TOO_LONG, TOO_SLOW, GONE, NO_LENGTH, ENDING = 413, 408, 400, 400, 503
CLOSE = {"Connection": "close"}
YEAR_S = 365 * 86_400


class _Environment(Environment):
    """In which `w.diagnose.clear` is a word, and not a method of dictionaries."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


@cache
def _load_templates() -> Environment:
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
    made.filters["moment"] = write_moment
    made.filters["count"] = lambda number: "–" if number is None else f"{number:,}"
    # 16384 → 16k: lengths of sequences at the head of a narrow column.
    made.filters["kilo"] = lambda number: f"{number // 1024}k" if number % 1024 == 0 else f"{number:,}"
    return made


def write_moment(seconds: float | None) -> str:
    """In universal time, as one zone for all who read it; where there are scripts it becomes the browser's."""
    if seconds is None:
        return "–"
    said = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return Markup('<time datetime="{}Z">{}</time>').format(said, said.replace("T", " ")[:16])


def part(request: Request, template: str, **values: object) -> str:
    """A template as text. It knows `w` (the words), `lang`, `views`, `path`, `has_control`, and what is given."""
    language = language_of(request)
    rest = [(key, value) for key, value in request.query_params.multi_items() if key not in ("lang", "token")]
    # Each language: its tag, its name, and this address in it.
    languages = [(tag, name, f"?{urlencode([*rest, ('lang', tag)])}") for tag, name in LANGUAGES.items()]
    given = {"w": words(language), "lang": language, "languages": languages, "views": VIEWS, "path": request.url.path}
    app = request.scope.get("app")  # the guard answers before there is one
    has_control = app is not None and app.state.site.has_control
    return _load_templates().get_template(template).render(**given, has_control=has_control, **values)


def page(request: Request, template: str, status: int = 200, **values: object) -> HTMLResponse:
    """A template as an answer; a language that the address names is kept."""
    answer = HTMLResponse(part(request, template, **values), status)
    if request.query_params.get("lang") in LANGUAGES:
        answer.set_cookie(COOKIE, language_of(request), max_age=YEAR_S, samesite="strict", path="/")
    return answer


def answer_failure(request: Request, template: str, said: str, status: int) -> Response:
    """A sentence: in a page for who looks at pages, alone for scripts."""
    if "text/html" in request.headers.get("accept", ""):
        return page(request, template, status, said=said)
    return PlainTextResponse(f"{said}\n", status)


async def body_of(request: Request, most_bytes: int, patience_s: float) -> bytes:
    """The body; HTTPException as soon as it is known to be too long, or when it takes too long."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal():
        raise HTTPException(NO_LENGTH, headers=CLOSE)
    if len(said) > 15 or int(said) > most_bytes:
        raise HTTPException(TOO_LONG, headers=CLOSE)

    async def read() -> bytes:
        parts, size = [], 0
        async for some in request.stream():
            size += len(some)
            if size > most_bytes:
                raise HTTPException(TOO_LONG, headers=CLOSE)
            parts.append(some)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(wait_for(asyncio.ensure_future(read())), patience_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise HTTPException(TOO_SLOW, headers=CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(GONE, headers=CLOSE) from None


# Work that takes a while. It does not keep the server from ending: who waits for it then is answered at once, and the
# threads end with the process.

T = TypeVar("T")
_awaited: set[asyncio.Future[Any]] = set()


async def wait_for(future: asyncio.Future[T]) -> T:
    """What comes of it; HTTPException: the server ends before."""
    _awaited.add(future)
    try:
        return await future
    except asyncio.CancelledError:
        if future.cancelled() and future not in _awaited:
            raise HTTPException(ENDING, headers=CLOSE) from None
        future.cancel()
        raise
    finally:
        _awaited.discard(future)


def leave() -> None:
    """The server is about to end. For the server's own thread."""
    while _awaited:
        _awaited.pop().cancel()


async def beside(work: Callable[[], T]) -> T:
    """What `work` returns or raises, while others are served. Who is no longer waited for still ends by itself."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if answer.done():  # whoever asked has gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failed = None, None
        try:
            value = work()
        except BaseException as error:
            failed = error
        try:
            loop.call_soon_threadsafe(tell, value, failed)
        except RuntimeError:  # the server has ended meanwhile
            return

    threading.Thread(target=run, name="tightfit-page", daemon=True).start()
    return await wait_for(answer)
