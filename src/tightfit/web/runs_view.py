"""The Runs view: the runs below the roots, and one of them as it goes. It reads, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tightfit.diagnose.masks import masked
from tightfit.web.failure import find_failure
from tightfit.web.pages import beside, page, part
from tightfit.web.places import NO_RUN, FoundRun, file_at, run_at
from tightfit.web.run_list import Asked, find_differences, read_row
from tightfit.web.words import language_of, translate

LOG_BYTES = 48 * 1024
LOG_LINES = 300
_turns = asyncio.Semaphore(2)  # failures that are judged at the same time: a log may be long
MOST_COMPARED = 8  # runs; there are no more colours that can be told apart


async def show_runs(request: Request) -> Response:
    return page(request, "runs.html", 200, **await _list_runs(request))


async def show_table(request: Request) -> Response:
    """For the page's script: the table alone."""
    return HTMLResponse(part(request, "runs_table.html", **await _list_runs(request)))


async def send_news(request: Request) -> Response:
    """For alerts: how the runs are that run, or did lately."""
    return JSONResponse(await beside(request.app.state.run_list.news))


async def _list_runs(request: Request) -> dict[str, object]:
    asked = Asked.read(request.query_params)
    listed = await beside(partial(request.app.state.run_list.look, asked))
    return {"asked": asked, "listed": listed, "roots": list(map(str, request.app.state.site.roots))}


async def show_run(request: Request) -> Response:
    run, word = _read_request(request)
    row = await beside(partial(read_row, FoundRun(word=word, path=run), request.app.state.site.roots))
    return page(request, "run.html", row=row, folder=str(run))


async def compare_runs(request: Request) -> Response:
    """Several runs over each other."""
    found, roots = _read_runs(request), request.app.state.site.roots
    rows = await beside(lambda: [read_row(FoundRun(word=word, path=run), roots) for run, word in found])
    differences = await beside(lambda: find_differences([run for run, _ in found]))
    return page(request, "compare.html", rows=rows, differences=differences)


async def show_failure(request: Request) -> Response:
    """For the page's script: why a run ended, and what helps."""
    run, _ = _read_request(request)
    async with _turns:
        found = await beside(partial(find_failure, run))
    return HTMLResponse(part(request, "run_failure.html", failure=found))


async def stream_run(request: Request) -> Response:
    runs = _read_runs(request)
    last = request.headers.get("last-event-id", "")
    language = language_of(request)

    async def translated(messages: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        async with aclosing(messages):  # whoever goes away leaves at once
            async for message in messages:
                try:
                    yield await beside(partial(translate, message, language))
                except HTTPException:  # the server ends
                    return

    messages = translated(request.app.state.hub.follow([run for run, _ in runs], last))
    return StreamingResponse(messages, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def show_log(request: Request) -> Response:
    run, _ = _read_request(request)
    name = request.query_params.get("name", "")
    path = await beside(partial(file_at, run, name)) if name.endswith(".log") else None
    if path is None:
        raise HTTPException(NO_RUN)
    return PlainTextResponse(await beside(partial(log_tail, path)))


def log_tail(path: Path) -> str:
    """The last lines of a log; what looks like a secret is struck out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    lines = lines[0 if size <= LOG_BYTES else 1 :]
    return masked("\n".join(lines[-LOG_LINES:]))


def _read_request(request: Request) -> tuple[Path, str]:
    word = request.query_params.get("run", "")
    return run_at(request.app.state.site.roots, word), word


def _read_runs(request: Request) -> list[tuple[Path, str]]:
    """Those that a page is to compare, each once."""
    words = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED] or [""]
    return [(run_at(request.app.state.site.roots, word), word) for word in words]


ROUTES = [
    Route("/runs", show_runs, methods=["GET"]),
    Route("/runs/table", show_table, methods=["GET"]),
    Route("/runs/news", send_news, methods=["GET"]),
    Route("/runs/compare", compare_runs, methods=["GET"]),
    Route("/runs/view", show_run, methods=["GET"]),
    Route("/runs/failure", show_failure, methods=["GET"]),
    Route("/runs/stream", stream_run, methods=["GET"]),
    Route("/runs/log", show_log, methods=["GET"]),
]
