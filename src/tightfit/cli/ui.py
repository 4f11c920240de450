"""`tightfit ui`: the page on this machine. It shows, and without --control it changes nothing.

Ctrl-C ends it, with exit code 0.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tightfit.cli.flags import Parser
from tightfit.inputs.surroundings import is_installed
from tightfit.messages import Message, text
from tightfit.types import ConfigError

PACKAGES = ("jinja2", "starlette", "uvicorn")


def ui(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    host, said, port = getattr(args, "host", "127.0.0.1"), getattr(args, "port", None), None
    if said is not None:
        if not (said.isascii() and said.isdecimal() and len(said) <= 5 and 1 <= int(said) <= 65_535):
            raise ConfigError(Message("cli.port-takes-number", said=repr(said)))
        port = int(said)
    roots: dict[Path, None] = {}
    for word in getattr(args, "root", ["."]):
        try:
            place = Path(word).expanduser().resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise ConfigError(Message("cli.root-there-such", word=word)) from None
        if not place.is_dir():
            raise ConfigError(Message("cli.root-file-name", word=word))
        roots[place] = None
    if not all(map(is_installed, PACKAGES)):
        raise ConfigError("tightfit ui needs the packages of the page: pip install 'tightfit[web]'")
    from tightfit.web.guard import Site
    from tightfit.web.plan_answer import offer_machine
    from tightfit.web.serve import listen, serve

    for word in getattr(args, "gpus", []):
        offer_machine(Path(word).expanduser())
    listening = listen(host, port)
    site = Site(
        token=secrets.token_urlsafe(32),
        host=host,
        port=listening.getsockname()[1],
        roots=tuple(roots),
        has_control=hasattr(args, "control"),
    )
    if not site.is_local:
        print(f"tightfit: {text('cli.warning-host-other', host=host)}", file=sys.stderr)

    def ready() -> None:
        for said, link in zip(("cli.page-at", "cli.page-here"), site.links, strict=False):
            print(f"tightfit: {text(said, link=link)}", flush=True)
        print(f"tightfit: {text('cli.ctrl-c-ends')}", flush=True)
        if not hasattr(args, "no_open"):
            import webbrowser

            # A browser in the terminal would not return before it is left.
            threading.Thread(target=webbrowser.open, args=(site.make_link(),), daemon=True).start()

    serve(site, listening, ready)
    return 0


def parser() -> Parser:
    made = Parser(
        "ui",
        "[--root DIR…] [--gpus FILE…] [--port N] [--host ADDRESS] [--control] [--no-open]",
        "tightfit ui --root runs",
    )
    made.add_argument("--root", metavar="DIR", nargs="+", action="extend", help=made.explain("root"))
    made.add_argument("--gpus", metavar="FILE", nargs="+", action="extend", help=made.explain("gpus"))
    made.add_argument("--port", metavar="N", help=made.explain("port"))
    made.takes("host=ADDRESS control no_open")
    return made.ends_with("0", "2")
