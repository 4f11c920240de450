"""The Diagnose view: a log goes in, the verdict of `tightfit diagnose` comes out. Nothing is kept."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tightfit.diagnose.judge import judge
from tightfit.diagnose.reading import is_printed, looks_like_log
from tightfit.diagnose.verdict import Diagnosis, Evidence, LogSource
from tightfit.messages import Message
from tightfit.types import ConfigError
from tightfit.web.pages import beside, body_of, page, part
from tightfit.web.words import language_of, words

MOST_BYTES = 64 * 2**20
PATIENCE_S = 120.0
AT_ONCE = 2  # logs that are judged at the same time: each is held in memory whole
FIELD = b"log="  # how a form without a script begins what it sends
_turns = asyncio.Semaphore(AT_ONCE)


def diagnose_log(data: bytes, name: str) -> Diagnosis:
    """What the command line would say about this log."""
    source = LogSource(name=name, text=data)
    if not looks_like_log(source):
        raise ConfigError(Message("web.not-a-log"))
    if not data.strip():
        raise ConfigError(Message("web.empty-log"))
    found = judge(Evidence(logs=(source,)))
    if found.verdict is None and not found.also and not is_printed(source):
        raise ConfigError(Message("web.not-printed"))
    return found


async def show_page(request: Request) -> Response:
    """The form, and the verdict for one that was sent without a script."""
    found = await _judge(request) if request.method == "POST" else None
    return page(request, "diagnose.html", found=found, most_bytes=MOST_BYTES)


async def show_verdict(request: Request) -> Response:
    """For the page's script: the verdict alone."""
    return HTMLResponse(part(request, "verdict.html", found=await _judge(request)))


async def _judge(request: Request) -> Diagnosis:
    name = str(words(language_of(request))["diagnose"]["pasted"])
    async with _turns:
        data = (await body_of(request, MOST_BYTES, PATIENCE_S)).removeprefix(FIELD)
        return await beside(partial(diagnose_log, data, name))


ROUTES = [
    Route("/diagnose", show_page, methods=["GET", "POST"]),
    Route("/diagnose/answer", show_verdict, methods=["POST"]),
]
