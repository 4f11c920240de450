"""The Runs view: the runs below the roots, and one of them as it goes. It reads, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tightfit.diagnose.masks import masked
from tightfit.runs.events import Ended, Step, event_of
from tightfit.runs.records import RunFolder, read_attempts, read_run
from tightfit.web.history import last_lines
from tightfit.web.pages import beside, page, part
from tightfit.web.places import NO_RUN, FoundRun, file_at, run_at
from tightfit.web.sight import state_of
from tightfit.web.words import language_of, translate

LOG_BYTES = 48 * 1024
LOG_LINES = 300
EVENT_BYTES = 16 * 1024


def _row(run: FoundRun, roots: tuple[Path, ...]) -> dict[str, object]:
    """One run in the list. None: nobody says."""
    number, _, below = run.word.partition("/")
    root = roots[int(number)]
    name = below or root.name or str(root)
    if below and len(roots) > 1:
        name = f"{root.name}/{below}"
    events = RunFolder(run.path).events
    changed = None
    with suppress(OSError):
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(events.stat().st_mtime))
    last, ended = None, False
    for line in reversed(last_lines(events, EVENT_BYTES)):
        event = event_of(line.decode("utf-8", "replace"))
        ended = ended or (isinstance(event, Ended) and last is None)
        if isinstance(event, Step):
            last = event
            break
    of_last = ("step", "steps", "loss", "tokens_per_s")
    return {
        "word": run.word,
        "name": name,
        "state": state_of(read_run(run.path), ended, read_attempts(run.path)),
        "changed": changed,  # when the run last said something
        **{each: None if last is None else getattr(last, each) for each in of_last},
    }


async def show_runs(request: Request) -> Response:
    return page(request, "runs.html", 200, **await _list_runs(request))


async def show_table(request: Request) -> Response:
    return HTMLResponse(part(request, "runs_table.html", **await _list_runs(request)))


async def _list_runs(request: Request) -> dict[str, object]:
    roots: tuple[Path, ...] = request.app.state.site.roots

    def look() -> dict[str, object]:
        found, is_all = request.app.state.finder.find()
        return {"rows": [_row(run, roots) for run in found], "is_all": is_all, "roots": list(map(str, roots))}

    return await beside(look)


async def show_run(request: Request) -> Response:
    run, word = _read_request(request)
    row = await beside(partial(_row, FoundRun(word=word, path=run), request.app.state.site.roots))
    return page(request, "run.html", row=row, folder=str(run))


async def stream_run(request: Request) -> Response:
    run, _ = _read_request(request)
    last = request.headers.get("last-event-id", "")
    language = language_of(request)

    async def translated(messages: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        async with aclosing(messages):  # whoever goes away leaves at once
            async for message in messages:
                try:
                    yield await beside(partial(translate, message, language))
                except HTTPException:  # the server ends
                    return

    messages = translated(request.app.state.hub.follow(run, last))
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


ROUTES = [
    Route("/runs", show_runs, methods=["GET"]),
    Route("/runs/table", show_table, methods=["GET"]),
    Route("/runs/view", show_run, methods=["GET"]),
    Route("/runs/stream", stream_run, methods=["GET"]),
    Route("/runs/log", show_log, methods=["GET"]),
]
