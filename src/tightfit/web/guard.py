"""Who may talk to the page: every request passes here first, those for pictures and scripts too.

Four things have to be right. *Host* must be a name of this server: a foreign page whose name was made to point at
127.0.0.1 (DNS rebinding) still says its own name. *Origin*, where a browser sends one, must be this page's own. The
*token* must come as a cookie, which scripts cannot read and browsers do not send along from foreign pages; the printed
link carries it once, and it is taken out of the address at once, so that it stays in no history. And the method must
be one that something here answers to.

Whatever goes out carries the headers that keep a browser from running or loading anything that is not ours.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightfit.web.pages import answer_failure, part
from tightfit.web.words import language_of, words

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TOKEN = "token"  # noqa: S105 (the name of the parameter)
METHODS = ("GET", "HEAD", "POST")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What one start of the page is: where it listens, who may look, and at what."""

    token: str  # whoever has it may look
    host: str  # the address that is listened on
    port: int
    roots: tuple[Path, ...]  # folders below which runs are looked for; resolved

    @property
    def cookie(self) -> str:
        """Browsers do not keep the cookies of two ports apart."""
        return f"tightfit_{self.port}"

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    @property
    def link(self) -> str:
        """What the user opens, as an address bar wants it; what listens everywhere can be reached here."""
        address, host = as_address(self.host), self.host
        if address is not None and address.version == 6:
            host = f"[{host}]"
        if address is not None and address.is_unspecified:
            host = "127.0.0.1"
        return f"http://{host}:{self.port}/?token={self.token}"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    address = as_address(host)
    return address is not None and address.is_loopback


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@cache
def own_names(host: str) -> frozenset[str]:
    """What this server may be called. Asking the network may take a while."""
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))


class RequestGuard:
    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app, self._site = app, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope)
        answer = self._answer(request)
        await (self._app if answer is None else answer)(scope, receive, sealed)

    def _answer(self, request: Request) -> Response | None:
        """What is said instead of the page; None: the request may pass."""
        host = request.headers.get("host", "")
        if len(request.headers.getlist("host")) != 1 or not self._is_ours(host):
            return _refuse(request, "host", 421)
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return _refuse(request, "origin", 403)
        if request.method not in METHODS:
            return PlainTextResponse("", 405, {"Allow": ", ".join(METHODS)})
        given = request.query_params.get(TOKEN)
        if given is not None and request.method != "POST":
            return self._let_in(request) if self._is_token(given) else _refuse(request, "token", 403)
        if not self._is_token(request.cookies.get(self._site.cookie, "")):
            return _refuse(request, "token", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._site.token.encode())

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server. Any port: a tunnel may end in another."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if is_loopback(name):
            return True
        if self._site.is_local:
            return False
        # An address is nobody's name, so it cannot be made to point elsewhere.
        return as_address(name) is not None or name in own_names(self._site.host)

    def _let_in(self, request: Request) -> Response:
        rest = [(key, value) for key, value in parse_qsl(request.url.query, keep_blank_values=True) if key != TOKEN]
        # One slash alone: two would name another server.
        place = "/" + quote(request.url.path.lstrip("/\\")) + (f"?{urlencode(rest)}" if rest else "")
        answer: Response
        if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            answer = RedirectResponse(place, 303)
        else:
            # From a link in another page a browser would not send the cookie along with a redirect; from ours it does.
            answer = HTMLResponse(part(request, "entered.html", place=place))
        answer.set_cookie(self._site.cookie, self._site.token, httponly=True, samesite="strict", path="/")
        return answer


def _refuse(request: Request, why: str, status: int) -> Response:
    return answer_failure(request, "refused.html", str(words(language_of(request))["refused"][why]), status)
