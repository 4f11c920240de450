"""Who may talk to the page: every request passes here first, those for pictures and scripts too.

Four things have to be right. *Host* must be a name of this server: a foreign page whose name was made to point at
127.0.0.1 (DNS rebinding) still says its own name. *Origin*, and where from a browser says that a request comes
(Sec-Fetch-Site), must be this page's own; a link that somebody follows may come from anywhere. The *token* must come
with every request. And the method must be one that something here answers to.

The token does not travel as a cookie. Browsers send the cookies of 127.0.0.1 to every port of it, whatever their
attributes say (SameSite looks at sites, and ports are no part of one): somebody else's server on a machine that is
shared would be handed ours as soon as our user looks at it, and could replay it here. What browsers do keep apart by
port are the credentials of HTTP authentication: their protection space is scheme, host and port (RFC 7617). So the
token is the password of Basic authentication, and a server on another port gets nothing at all. Pages, forms, streams
and downloads carry it without a script, a tunnel may end in another port, and a program says `curl -u tightfit:TOKEN`.
The alternatives: a secret in the page's storage, which scripts would send as a header, is bound as well, but no link
and no form without scripts could bring it; a host name of its own for each start (`x.localhost`) binds cookies, but
Safari does not find it, and every link and every open page would end with the server.

Browsers send these credentials along with requests that other pages make, too. Such a page cannot read the answer, and
its request is refused here for its Origin or its Sec-Fetch-Site, so that it cannot do anything either.

How a browser gets them: the printed link carries the token, and may be used as often as one likes. It is answered with
the address of `/enter` and a code that is good once, so that the token stays in no history; that page's script asks
for `/enter` with the credentials, and the browser, challenged there and nowhere else, keeps them. Without scripts a
link with the credentials in it does the same. The browser that we open ourselves is given a code at once, since others
can read the arguments of a process: whoever is not this user, as the kernel says whose connection it is, cannot use it
before that browser does. A file for the browser to read would do too, but browsers in a sandbox (snap) cannot read it.

Whatever goes out carries the headers that keep a browser from running or loading anything that is not ours.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple
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
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TOKEN, USER = "token", "tightfit"
ENTER, SCRIPT = "/enter", "/static/enter.js"
METHODS = ("GET", "HEAD", "POST")
CODE_S = 300.0  # a browser may take a while to start
CHALLENGE = {"WWW-Authenticate": f'Basic realm="{USER}", charset="UTF-8"'}


class Code(NamedTuple):
    place: str  # where it leads to
    is_for_us: bool  # whether others may have seen it
    until: float


class Codes:
    """Each stands for the token once."""

    def __init__(self) -> None:
        self._codes: dict[str, Code] = {}

    def make(self, place: str, *, is_for_us: bool) -> str:
        now, word = time.monotonic(), secrets.token_urlsafe(32)
        self._codes = {key: each for key, each in self._codes.items() if each.until > now}
        self._codes[word] = Code(place, is_for_us, now + CODE_S)
        return word

    def use(self, word: str, request: Request) -> str | None:
        """The place to which it leads; None: it does not, or not this visitor."""
        found = self._codes.get(word)
        if found is None or found.until < time.monotonic() or (found.is_for_us and not _comes_from_us(request)):
            return None
        del self._codes[word]
        return found.place


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What one start of the page is: where it listens, who may look, and at what."""

    token: str  # whoever has it may look
    host: str  # the address that is listened on
    port: int
    roots: tuple[Path, ...]  # folders below which runs are looked for; resolved
    has_control: bool = False  # whether runs can be started, stopped and resumed from the page
    codes: Codes = field(default_factory=Codes)

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    @property
    def home(self) -> str:
        """Its address for this machine's own browser; what listens everywhere can be reached here."""
        address = as_address(self.host)
        everywhere = {4: "127.0.0.1", 6: "::1"}
        unspecified = address is not None and address.is_unspecified
        return self._at(everywhere[address.version] if address is not None and unspecified else self.host)

    @property
    def links(self) -> tuple[str, ...]:
        """What the user opens, from elsewhere and from here; one where they are the same."""
        address, homes = as_address(self.host), [self.home]
        if address is not None and address.is_unspecified:
            homes.insert(0, self._at(_find_address(address.version)))
        return tuple(f"{home}/?{TOKEN}={self.token}" for home in homes)

    @property
    def credentials(self) -> str:
        return "Basic " + base64.b64encode(f"{USER}:{self.token}".encode()).decode()

    def make_link(self) -> str:
        """For the browser on this machine, once: others may read it."""
        return f"{self.home}{ENTER}?code={self.codes.make('/', is_for_us=True)}"

    def _at(self, host: str) -> str:
        address = as_address(host)
        return f"http://{f'[{host}]' if address is not None and address.version == 6 else host}:{self.port}"


def _find_address(version: int) -> str:
    """Where other machines find this one; its name, where no address is known. Nothing is sent."""
    families = [(socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1")][0 if version == 6 else 1 :]
    for family, documentation in families:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((documentation, 9))
            return str(asking.getsockname()[0])
    for family, _ in families:
        with suppress(OSError):
            for *_, (found, *_) in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM):
                if not is_loopback(str(found)) and "%" not in str(found):
                    return str(found)
    return socket.gethostname()


def _comes_from_us(request: Request) -> bool:
    """Whether the other end of the connection is a process of this user; True where no kernel says."""
    tables = [table for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if table.exists()]
    ends = [f"{request.scope[end][1]:04X}" for end in ("client", "server")]
    owners = set()
    for line in "".join(table.read_text(encoding="ascii") for table in tables).splitlines():
        _, local, remote, _, _, _, _, owner, *_ = line.split()
        if [local.rpartition(":")[2], remote.rpartition(":")[2]] == ends:
            owners.add(int(owner))
    return not tables or owners == {os.getuid()}


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
        if (origin is not None and origin != f"http://{host}") or _is_sent_by_another_page(request):
            return _refuse(request, "origin", 403)
        if request.method not in METHODS:
            return PlainTextResponse("", 405, {"Allow": ", ".join(METHODS)})
        given, path = request.query_params.get(TOKEN), request.url.path
        if given is not None and request.method != "POST":
            return self._let_in(request) if _same(given, self._site.token) else _refuse(request, "token", 403)
        is_known = _same(request.headers.get("authorization", ""), self._site.credentials)
        if path == ENTER and request.method != "POST":
            return self._enter(request, is_known=is_known)
        if not is_known and path != SCRIPT:
            return _refuse(request, "token", 403)
        return None

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
        place = quote(request.url.path) + (f"?{urlencode(rest)}" if rest else "")
        return RedirectResponse(f"{ENTER}?code={self._site.codes.make(place, is_for_us=False)}", 303)

    def _enter(self, request: Request, *, is_known: bool) -> Response:
        place = self._site.codes.use(request.query_params.get("code", ""), request)
        if place is not None:
            place = _own(place)
            link = f"//{USER}:{self._site.token}@{request.headers['host']}{ENTER}?{urlencode({'to': place})}"
            return HTMLResponse(part(request, "entered.html", place=place, link=link, token=self._site.token))
        if not is_known:
            if "code" in request.query_params:
                return _refuse(request, "token", 403)
            answer = _refuse(request, "token", 401)
            answer.headers.update(CHALLENGE)
            return answer
        if request.headers.get("sec-fetch-mode") == "cors":  # the script, which goes on by itself
            return Response(status_code=204)
        # Whole, or the browser would keep the credentials in the address, and wait for another challenge.
        place = f"http://{request.headers['host']}{_own(request.query_params.get('to', ''))}"
        return RedirectResponse(place, 303)


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _own(place: str) -> str:
    """One slash alone: two would name another server."""
    return "/" + place.lstrip("/\\")


def _is_sent_by_another_page(request: Request) -> bool:
    """Anything but a link that is followed in a window of its own. Old browsers do not say."""
    told = {key: request.headers.get(f"sec-fetch-{key}") for key in ("site", "mode", "dest")}
    if told["site"] not in ("cross-site", "same-site"):
        return False
    return request.method not in ("GET", "HEAD") or (told["mode"], told["dest"]) != ("navigate", "document")


def _refuse(request: Request, why: str, status: int) -> Response:
    return answer_failure(request, "refused.html", str(words(language_of(request))["refused"][why]), status)
