"""Start, stop and resume, for `tightfit ui --control` alone: without it these addresses do not exist.

A link leads to a page that says exactly what would be done, and the button there sends it. What it sends is signed with
the server's token over that very action, so that no other page can send it, and that nothing else is done than what was
read: where the run, its command or the plan has changed in the meantime, it is shown again. Every page works without
scripts. Whatever is done is said where `tightfit ui` was started.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tightfit.diagnose.masks import masked
from tightfit.formats.plan_folder import write
from tightfit.messages import Message, say_why, text
from tightfit.runs.orders import RunCommand, StartedRun, Stops, find_command, find_supervisor, train_plan
from tightfit.runs.records import now, read_run
from tightfit.types import ConfigError
from tightfit.web import plan_answer
from tightfit.web.pages import beside, body_of, page
from tightfit.web.places import DEEPEST, NO_RUN, is_listed, is_run, run_at

MOST_BYTES, PATIENCE_S = 2 * plan_answer.MOST_CONFIG_BYTES, 30.0
FORBIDDEN = 403


class Control:
    """What this server has started and stopped."""

    def __init__(self) -> None:
        self.stops = Stops()
        self.started: dict[str, StartedRun] = {}  # by the words of their runs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAction:
    """What a page asks to be confirmed."""

    action: str  # `stop`, `resume` or `start`
    run: Path
    word: str  # how the page names the run
    command: RunCommand
    pid: int | None = None  # of what is to be stopped
    files: dict[str, str] | None = None  # of the plan that is to be written
    plan: Path | None = None
    sent: tuple[tuple[str, str], ...] = ()  # what the form sends, besides the signature

    def sign(self, token: str) -> str:
        said = [self.action, str(self.run), self.command.words, self.command.cwd, self.pid, self.files]
        return hmac.new(token.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()


# --- the orders -----------------------------------------------------------------------------------


def _order_stop(request: Request, given: dict[str, str]) -> AskedAction:
    word = given.get("run", "")
    run = run_at(request.app.state.site.roots, word)
    pid = find_supervisor(run)
    record = read_run(run)
    command = RunCommand(words=() if record is None else record.command, cwd="")
    return AskedAction(action="stop", run=run, word=word, command=command, pid=pid, sent=(("run", word),))


def _order_resume(request: Request, given: dict[str, str]) -> AskedAction:
    word = given.get("run", "")
    run = run_at(request.app.state.site.roots, word)
    return AskedAction(action="resume", run=run, word=word, command=find_command(run), sent=(("run", word),))


def _order_start(request: Request, given: dict[str, str]) -> AskedAction:
    number, name = given.get("root", "0"), given.get("folder", "").strip()
    root, run = _new_folder(request.app.state.site.roots, number, name)
    plan = run.with_name(f"{run.name}.plan")
    if plan.exists():
        raise ConfigError(Message("orders.not-empty", folder=plan))
    question = given.get("question", "")
    asked = plan_answer.read_address(parse_qsl(question, keep_blank_values=True))
    plan_answer.check_model(asked)
    answer = plan_answer.answer_to(asked, advice=False)
    files, found = answer.files, answer.plan
    ours = found.fits and found.job.trainer == "tightfit" and found.hardware.nodes == 1
    if not (ours and isinstance(files, dict) and files):
        raise ConfigError(Message("orders.no-plan"))
    return AskedAction(
        action="start",
        run=run,
        word=f"{number}/{run.relative_to(root).as_posix()}",
        command=train_plan(plan, run, root),
        files=files,
        plan=plan,
        sent=(("root", number), ("folder", name), ("question", question)),
    )


def _new_folder(roots: tuple[Path, ...], number: str, name: str) -> tuple[Path, Path]:
    """The root and the folder, which is new or empty. ConfigError: it is not."""
    if number not in map(str, range(len(roots))):
        raise ConfigError(Message("orders.no-such-root"))
    root, parts = roots[int(number)], Path(name).parts
    wrong = ConfigError(Message("orders.bad-name", name=name[:200], root=root, most=DEEPEST))
    if not parts or len(name) > 500 or len(parts) > DEEPEST or not all(map(is_listed, parts)):
        raise wrong
    try:
        run = (root / name).resolve()
        if run == root or not run.is_relative_to(root):
            raise wrong
        for above in (run, *run.parents):
            if above.is_relative_to(root) and is_run(above):
                raise ConfigError(Message("orders.within-a-run", folder=above))
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise ConfigError(Message("orders.not-empty", folder=run))
    except (OSError, ValueError, RuntimeError):
        raise wrong from None
    return root, run


ORDERS = {"stop": _order_stop, "resume": _order_resume, "start": _order_start}
DID = {"stop": "orders.did-stop", "resume": "orders.did-resume", "start": "orders.did-start"}


# --- pages ----------------------------------------------------------------------------------------


async def show_order(request: Request) -> Response:
    """What would be done, and the button that does it."""
    action, given = _action(request), dict(request.query_params)
    if action == "start" and "folder" not in given:
        roots = list(enumerate(map(str, request.app.state.site.roots)))
        return page(request, "control_folder.html", question=request.url.query, roots=roots)
    order = await beside(partial(ORDERS[action], request, given))
    return page(request, "control.html", order=order, value=order.sign(request.app.state.site.token))


async def carry_out(request: Request) -> Response:
    action, site, control = _action(request), request.app.state.site, request.app.state.control
    if request.headers.get("origin") != f"http://{request.headers['host']}":
        raise HTTPException(FORBIDDEN)
    body = (await body_of(request, MOST_BYTES, PATIENCE_S)).decode("utf-8", errors="replace")
    given = dict(parse_qsl(body, keep_blank_values=True))
    order = await beside(partial(ORDERS[action], request, given))
    if not hmac.compare_digest(given.get("confirmed", "").encode(), order.sign(site.token).encode()):
        raise ConfigError(Message("orders.changed"))
    pid = await beside(partial(_do, control, order))
    said = text(DID[action], run=order.run, pid=pid, command=order.command.text)
    sys.stderr.write(f"tightfit: {now().isoformat(' ', 'seconds')} {said}\n")
    place = "/runs/view" if action == "stop" else "/control/started"
    return RedirectResponse(f"{place}?{urlencode({'run': order.word})}", 303)


def _do(control: Control, order: AskedAction) -> int:
    """The number of the process that was asked or started."""
    if order.action == "stop":
        return control.stops.ask(order.run)
    before = control.started.get(order.word)
    if before is not None and before.exit_code is None:
        raise ConfigError(Message("orders.runs-already"))
    try:
        order.run.parent.mkdir(parents=True, exist_ok=True)
        if order.files is not None and order.plan is not None:
            write(order.files, order.plan, force=False)
        control.started[order.word] = StartedRun(order.run, order.command)
    except OSError as error:
        raise ConfigError(Message("orders.cannot-start", why=say_why(error))) from None
    return control.started[order.word].pid


async def show_started(request: Request) -> Response:
    """From the start of a process until the run's folder is its own: then its page has more to say."""
    word = request.query_params.get("run", "")
    started = request.app.state.control.started.get(word)
    if started is None or await beside(lambda: started.has_begun):
        return RedirectResponse(f"/runs/view?{urlencode({'run': word})}", 303)
    output = masked(await beside(started.output))
    answer = page(request, "control_started.html", started=started, output=output, exit_code=started.exit_code)
    if started.exit_code is None:
        answer.headers["Refresh"] = "1"
    return answer


def _action(request: Request) -> str:
    action = str(request.path_params["action"])
    if action not in ORDERS:
        raise HTTPException(NO_RUN)
    return action


ROUTES = [
    Route("/control/started", show_started, methods=["GET"]),
    Route("/control/{action}", show_order, methods=["GET"]),
    Route("/control/{action}", carry_out, methods=["POST"]),
]
