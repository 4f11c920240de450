"""The server: which address is answered by what, what is said where something goes wrong, where it listens, and how
it ends.

Ctrl-C ends it at once: whoever is being told of a run is let go first, so that nothing is waited for.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tightfit.desk.searchers import GARBAGE, Searchers
from tightfit.messages import Message, say_why
from tightfit.types import ConfigError, UserError
from tightfit.web import control_view, diagnose_view, pages, plan_view, runs_view
from tightfit.web.guard import RequestGuard, Site
from tightfit.web.hub import Hub
from tightfit.web.pages import answer_failure
from tightfit.web.places import Finder
from tightfit.web.run_list import RunList
from tightfit.web.words import language_of, words

HOME = "/plan"
STATIC = Path(__file__).with_name("static")
FIRST_PORT, PORTS = 8741, 20  # without --port the first free one of these: a tunnel can be set up before
MOST_CONNECTIONS = 256
PATIENCE_S = 2  # for answers that are half sent when the server is told to end


class _Static(StaticFiles):
    """Asked for again each time, and sent again only where it has changed."""

    def file_response(self, *given, **named) -> Response:  # type: ignore[no-untyped-def]
        answer = super().file_response(*given, **named)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


def make_app(site: Site, hub: Hub, run_list: RunList | None = None, searchers: Searchers | None = None) -> ASGIApp:
    async def go_home(request: Request) -> Response:
        query = request.url.query  # the language, say
        return RedirectResponse(f"{HOME}?{query}" if query else HOME, 303)

    async def say_error(request: Request, error: Exception) -> Response:
        """One sentence here; the traceback of a bug is printed where the server was started."""
        known = words(language_of(request))
        if isinstance(error, UserError):
            return answer_failure(request, "error.html", known.said(error.said).text, 400)
        status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
        said = known["errors"].get(str(status), known["errors"]["other"])
        answer = answer_failure(request, "error.html", said, status)
        answer.headers.update(headers or {})
        return answer

    app = Starlette(
        routes=[
            Route("/", go_home),
            *plan_view.ROUTES,
            *runs_view.ROUTES,
            *diagnose_view.ROUTES,
            *(control_view.ROUTES if site.has_control else ()),
            Mount("/static", _Static(directory=STATIC)),
        ],
        exception_handlers=dict.fromkeys((UserError, HTTPException, Exception), say_error),
    )
    app.router.redirect_slashes = False
    app.state.site, app.state.hub, app.state.control = site, hub, control_view.Control()
    app.state.searchers = searchers
    app.state.run_list = run_list or RunList(site.roots, Finder(site.roots))
    return RequestGuard(app, site)


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens; ConfigError: that cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(Message("web.no-address", host=host)) from None
    tried = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    why = ""
    for each in tried:
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address[0], each, *address[2:]))
            made.listen(128)
            return made
        except OSError as error:
            why = say_why(error)
            made.close()
    raise ConfigError(Message("web.cannot-listen", host=host, port=tried[-1], why=why))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], leaving: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._leaving = ready, leaving
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not here and now: the signal may have come while this thread held a lock.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leaving)
        super().handle_exit(sig, frame)


def serve(site: Site, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Until Ctrl-C. `ready` is called when the page can be opened."""
    hub, run_list, searchers = Hub(), RunList(site.roots, Finder(site.roots)), Searchers()
    threading.Thread(target=run_list.prepare, name="tightfit-runs", daemon=True).start()
    config = uvicorn.Config(
        make_app(site, hub, run_list, searchers),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=PATIENCE_S,
    )

    def leave() -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # whoever is cut off now is no error
        hub.close()
        pages.leave()

    gc.collect()
    gc.freeze()  # what is loaded stays to the end: a search would have it looked through again and again
    gc.set_threshold(GARBAGE)
    with listening, suppress(KeyboardInterrupt):
        try:
            _Server(config, ready, leave).run(sockets=[listening])
        finally:
            hub.close()
            searchers.end()
