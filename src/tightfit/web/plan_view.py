"""The Plan view: what fits, before anything runs. The answers are those of `tightfit plan`.

The whole state is in the address, so a link shares it and a form without a script asks the same. What takes a moment
is done beside the loop, in turns: a slider that moves asks often, and what was given up in the meantime is not begun,
or ends soon.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tightfit.desk.report import answer_report
from tightfit.formats.worker.write import seeded, without_data
from tightfit.messages import Language
from tightfit.planner.wanted import AbandonedError, only_while
from tightfit.types import Trainer, UserError
from tightfit.web import frontier, plan_answer
from tightfit.web.form import by_label, field_of, form_values
from tightfit.web.pages import beside, body_of, page, part
from tightfit.web.picture import draw_picture, read_accuracy
from tightfit.web.plan_drawing import draw, gib, heat_of
from tightfit.web.words import language_of, words

STATIC = Path(__file__).with_name("static")
PATIENCE_S = 30.0
REST_S = 0.2  # after an answer, before anything is done that nobody has asked for
LOOK_S = 0.02  # between two looks whether whoever asked is still there
GONE = 499  # whoever asked has gone: nobody reads this
START: dict[Trainer, str] = {
    "tightfit": "tightfit train --plan plan --output runs/first",
    "llamafactory": "bash plan/launch.sh",
    "trainer": "bash plan/launch.sh train.py",
}
T = TypeVar("T")
_quick, _slow = asyncio.Semaphore(1), asyncio.Semaphore(1)


async def show_plan(request: Request) -> Response:
    """The whole page: form, answer, map and files, also for who has no scripts."""
    values, status, problem = {}, 200, {}
    try:
        answer = await _find_answer(request, advice=True)
        values = await beside(partial(_all_of, answer, language_of(request), compare=_compared(request)))
    except UserError as error:
        problem, status = _problem(request, error), 400
    form = await beside(partial(form_values, request.query_params.multi_items()))
    return page(request, "plan.html", status, **form, **(values or _NOTHING), problem=problem)


async def show_answer(request: Request) -> Response:
    """For the page's script: the answer alone, or the sentence that says what is wrong."""
    advice = request.query_params.get("advice") == "1"
    try:
        answer = await _find_answer(request, advice=advice)
    except UserError as error:
        return HTMLResponse(part(request, "plan_problem.html", problem=_problem(request, error)))
    found = await beside(partial(_draw, answer, language_of(request), advice=advice, compare=_compared(request)))
    return HTMLResponse(part(request, "plan_found.html", **found), background=BackgroundTask(_prepare, answer))


async def _prepare(answer: plan_answer.Answered) -> None:
    """For bars that follow a slider, once nobody waits for anything else."""
    await asyncio.sleep(REST_S)
    if not _quick.locked():
        await beside(partial(plan_answer.prepare, answer))


async def show_guess(request: Request) -> Response:
    """One way, at once: see `plan_answer.guessed`. Nothing, where there is nothing to go by."""
    pairs = request.query_params.multi_items()

    def look() -> dict[str, object] | None:
        asked, last = plan_answer.read_address(pairs), plan_answer.recall(dict(pairs).get("like", ""))
        if last is None or not plan_answer.is_at_hand(asked) or asked.get("tier"):
            return None
        return _draw(plan_answer.guessed(asked, last), language_of(request), advice=False)

    try:
        found = await beside(look)
    except UserError:  # the answer itself will say so
        found = None
    return HTMLResponse("" if found is None else part(request, "plan_guess.html", **found))


async def send_json(request: Request) -> Response:
    """What the page is drawn from: the same object as `tightfit plan --json` prints."""
    answer = await _find_answer(request, advice=True)
    return JSONResponse(answer_report(answer.tiered or answer.plan, None))


async def show_heat(request: Request) -> Response:
    answer = await _find_answer(request, advice=False)
    async with _slow:
        found = await _while_asked(request, partial(heat_of, answer, others=True))
    return HTMLResponse(part(request, "plan_heat.html", heat=found, alone=False))


async def show_frontier(request: Request) -> Response:
    """As far as it is known by now: the page's script asks again."""
    asked = await beside(partial(plan_answer.read_address, request.query_params.multi_items()))
    found = await beside(partial(frontier.look, asked))
    return HTMLResponse(part(request, "plan_frontier.html", frontier=found))


async def show_files(request: Request) -> Response:
    answer = await _find_answer(request, advice=False)
    values = await beside(partial(_files_of, answer))
    return HTMLResponse(part(request, "plan_files.html", **values))


async def send_zip(request: Request) -> Response:
    answer = await _find_answer(request, advice=False)
    files = await beside(lambda: answer.files)
    if not isinstance(files, dict) or not files:
        raise HTTPException(404)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in files.items():
            entry = zipfile.ZipInfo(f"tightfit-plan/{name}", (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name.endswith(".sh") else 0o644) << 16
            packed.writestr(entry, text, zipfile.ZIP_DEFLATED)
    return _download(made.getvalue(), "application/zip", "tightfit-plan.zip")


async def send_saved(request: Request) -> Response:
    """The view as one file that needs neither server nor script."""
    answer = await _find_answer(request, advice=True)
    async with _slow:
        values = await _while_asked(request, partial(_all_of, answer, language_of(request), others=True))
    styles = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "plan.css"))
    text = part(request, "plan_saved.html", **{**values, "alone": True, "styles": Markup(styles)})  # noqa: S704 (ours)
    return _download(text.encode(), "text/html; charset=utf-8", "tightfit-plan.html")


async def send_picture(request: Request) -> Response:
    """The verdict and its bars as one picture, to be sent to somebody."""
    answer = await _find_answer(request, advice=False)
    told = words(language_of(request))
    found = await beside(lambda: draw_picture(answer, told))
    if found is None:
        raise HTTPException(404)
    return _download(found.encode(), "image/svg+xml", "tightfit-plan.svg")


async def find_most(request: Request) -> Response:
    """For the page's script: what to set in the form, so that it is the most that fits."""
    try:
        asked = await beside(partial(plan_answer.read_address, request.query_params.multi_items()))
        await beside(partial(plan_answer.check_model, asked))
        async with _slow:
            most = partial(plan_answer.most_of, asked, request.query_params.get("max", ""))
            found = await _while_asked(request, most)
    except UserError as error:
        return JSONResponse({"problem": _problem(request, error)})
    return JSONResponse({"fields": found})


async def read_config(request: Request) -> Response:
    """A pasted config.json, less what does not decide the shape: that fits into an address."""
    text = (await body_of(request, plan_answer.MOST_CONFIG_BYTES, PATIENCE_S)).decode("utf-8", errors="replace")
    try:
        block = await beside(partial(plan_answer.block_of, text))
    except UserError as error:
        return JSONResponse({"problem": _problem(request, error)})
    return JSONResponse({"config": json.dumps(block, separators=(",", ":"), ensure_ascii=False)})


# --- asking ---------------------------------------------------------------------------------------


async def _find_answer(request: Request, *, advice: bool) -> plan_answer.Answered:
    asked = await beside(partial(plan_answer.read_address, request.query_params.multi_items()))
    await beside(partial(plan_answer.check_model, asked))  # the network may be slow: nobody else waits for it
    async with _quick:
        answer = await _while_asked(request, partial(plan_answer.answer_to, asked, advice=False))
    if not advice or answer.plan.fits:
        return answer
    async with _slow:
        return await _while_asked(request, partial(plan_answer.answer_to, asked, advice=True))


async def _while_asked(request: Request, work: Callable[[], T]) -> T:
    """What `work` finds, as long as whoever asked is still there."""
    if await request.is_disconnected():
        raise HTTPException(GONE)
    gone, searchers = threading.Event(), request.app.state.searchers

    def find() -> T:
        with only_while(lambda: not gone.is_set()), nullcontext() if searchers is None else searchers.help():
            return work()

    finding = asyncio.ensure_future(beside(find))
    try:
        while not (await asyncio.wait({finding}, timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                gone.set()
        return await finding
    except AbandonedError:
        raise HTTPException(GONE) from None
    finally:
        gone.set()


def _problem(request: Request, error: UserError) -> dict[str, str]:
    """What is wrong, in the words of the form, and where."""
    spoken = words(language_of(request))
    told, field = spoken.said(error.said), field_of(error, request.query_params.multi_items())
    return {"text": by_label(told.text, spoken), "lang": "en" if told.is_foreign else "", "field": field}


# --- what the templates get -----------------------------------------------------------------------

_NOTHING: dict[str, object] = {
    "found": None,
    "heat": None,
    "files": {},
    "why_none": "",
    "commands": (),
    "address": "",
    "compare": "",
    "gib": gib,
    "alone": False,
}


def _draw(answer: plan_answer.Answered, language: Language, *, advice: bool, compare: str = "") -> dict[str, object]:
    plan, found = answer.plan, draw(answer, words(language), advice=advice, compare=compare)
    is_ours = plan.chosen is not None and plan.job.trainer == "tightfit"
    commands = [("command_plan", answer.asked.command())]  # what to type: its key in the words, and the command
    if plan.chosen is not None:
        write = ("command_write", answer.asked.command("plan", "--write", "plan"))
        commands = [write, ("command_train", START[plan.job.trainer]), *commands]
    return _NOTHING | {
        "found": found,
        "commands": commands,
        # On what it would train, where that is not what a reader of the last command expects.
        "by_label": partial(by_label, words=words(language)),
        "seeded": seeded(plan.job) if is_ours else (),
        "without_data": without_data(plan.job) if is_ours else (),
        "accuracy": read_accuracy(),
        "address": answer.asked.address(),
        "portable": answer.portable,
        "compare": compare,
    }


def _files_of(answer: plan_answer.Answered) -> dict[str, object]:
    files = answer.files
    found, why = (files, "") if isinstance(files, dict) else ({}, files)
    return {"files": found, "why_none": why, "address": answer.asked.address()}


def _all_of(
    answer: plan_answer.Answered, language: Language, *, others: bool = False, compare: str = ""
) -> dict[str, object]:
    heat = heat_of(answer, others=others)
    return {**_draw(answer, language, advice=True, compare=compare), **_files_of(answer), "heat": heat}


def _compared(request: Request) -> str:
    """The way that stands beside the chosen one: how it is looked at, and no part of what is asked."""
    return request.query_params.get("compare", "")[: plan_answer.MOST_WORD]


def _download(data: bytes, kind: str, name: str) -> Response:
    return Response(data, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


ROUTES = [
    Route("/plan", show_plan, methods=["GET"]),
    Route("/plan/answer", show_answer, methods=["GET"]),
    Route("/plan/guess", show_guess, methods=["GET"]),
    Route("/plan/answer.json", send_json, methods=["GET"]),
    Route("/plan/heat", show_heat, methods=["GET"]),
    Route("/plan/frontier", show_frontier, methods=["GET"]),
    Route("/plan/files", show_files, methods=["GET"]),
    Route("/plan/files.zip", send_zip, methods=["GET"]),
    Route("/plan/saved", send_saved, methods=["GET"]),
    Route("/plan/picture.svg", send_picture, methods=["GET"]),
    Route("/plan/most", find_most, methods=["GET"]),
    Route("/plan/config", read_config, methods=["POST"]),
]
