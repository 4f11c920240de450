"""The application: which address is answered by what, and what is said where something goes wrong."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tightfit.types import UserError
from tightfit.web import plan_view, runs_view
from tightfit.web.diagnose_view import ROUTES as DIAGNOSE_ROUTES
from tightfit.web.guard import RequestGuard
from tightfit.web.hub import Hub
from tightfit.web.pages import page
from tightfit.web.places import Finder
from tightfit.web.site import Site
from tightfit.web.words import language_of, words

HOME = "/plan"
STATIC = Path(__file__).with_name("static")


class _Static(StaticFiles):
    """Asked for again each time, and sent again only where it has changed."""

    def file_response(self, *given, **named) -> Response:  # type: ignore[no-untyped-def]
        answer = super().file_response(*given, **named)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


def make_app(site: Site, hub: Hub) -> ASGIApp:
    """All views, behind the guard."""
    app = Starlette(
        routes=[
            Route("/", _home),
            *plan_view.ROUTES,
            *runs_view.ROUTES,
            *DIAGNOSE_ROUTES,
            Mount("/static", _Static(directory=STATIC)),
        ],
        exception_handlers={
            UserError: _user_error,
            HTTPException: _http_error,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.site, app.state.hub, app.state.finder = site, hub, Finder(site.roots)
    return RequestGuard(app, site)


async def _home(request: Request) -> Response:
    query = request.url.query  # the language, say
    return RedirectResponse(f"{HOME}?{query}" if query else HOME, 303)


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    said = words(language_of(request)).said(error.said)
    return answer_failure(request, said.text, 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = words(language_of(request))["errors"]
    said = known.get(str(error.status_code), known["other"])
    answer = answer_failure(request, said, error.status_code)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _bug(request: Request, error: Exception) -> Response:
    """One sentence here; the traceback is printed where the server was started."""
    return answer_failure(request, words(language_of(request))["errors"]["500"], 500)


def answer_failure(request: Request, said: str, status: int) -> Response:
    """A sentence: in a page for who looks at pages, alone for scripts."""
    if "text/html" in request.headers.get("accept", ""):
        return page(request, "error.html", status, said=said)
    return PlainTextResponse(f"{said}\n", status)
