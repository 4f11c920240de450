"""The Plan view: what fits, before anything runs. The answers are those of `tightfit plan`.

The whole state is in the address, so a link shares it and a form without a script asks the same. What takes a moment
is done beside the loop, in turns: a slider that moves asks often, and of those that were given up in the meantime only
the one that has begun is finished.
"""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from functools import cache, partial
from pathlib import Path
from typing import get_args

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tightfit.desk.report import answer_report
from tightfit.formats.worker.write import untrained
from tightfit.hardware.catalogue import CARDS
from tightfit.hardware.machine import this_machine
from tightfit.inputs.flags import LEVERS, words_of
from tightfit.job import Allowance
from tightfit.messages import Language, Message
from tightfit.model.presets import CHECKPOINTS, PRESETS
from tightfit.planner.tiers import TIERS
from tightfit.types import Checkpointing, Trainer, UserError
from tightfit.web import plan_answer
from tightfit.web.pages import beside, body_of, page, part
from tightfit.web.plan_drawing import Drawn, draw, gib, heat_of
from tightfit.web.words import Words, language_of, words

STATIC = Path(__file__).with_name("static")
PATIENCE_S = 30.0
GONE = 499  # whoever asked has gone: nobody reads this
START: dict[Trainer, str] = {
    "tightfit": "tightfit train --plan plan --output runs/first",
    "llamafactory": "bash plan/launch.sh",
    "trainer": "bash plan/launch.sh train.py",
}
_quick, _slow = asyncio.Semaphore(1), asyncio.Semaphore(1)


async def show_plan(request: Request) -> Response:
    """The whole page: form, answer, map and files, also for who has no scripts."""
    values, status = {}, 200
    problem: Message | str = ""
    try:
        answer = await _find_answer(request, advice=True)
        values = await beside(partial(_all_of, answer, language_of(request)))
    except UserError as error:
        problem, status = error.said, 400
    pairs = request.query_params.multi_items()
    filled = plan_answer.fill_form(pairs)
    more = (*(lever.flag for lever in plan_answer.PINS), "margin", "max_steps", "samples")
    form: dict[str, object] = {
        "values": filled,
        "pins": plan_answer.PINS,
        "is_more_said": any(filled[name] for name in more),
        "allowed": {each for name, value in pairs if name == "allow" for each in value.split(",")},
        "allowances": get_args(Allowance),
        "tiers": TIERS,
        "trainers": get_args(Trainer),
        "choices": {name: words_of(lever) for name, lever in LEVERS.items() if lever.type is not Checkpointing},
        "models": [*PRESETS, *CHECKPOINTS],
        "cards": list(dict.fromkeys(f"{card.family.replace(' ', '')}-{card.size_gib}GB" for card in CARDS)),
        "machine": await beside(find_machine),
        "offered": list(plan_answer.OFFERED),
        "defaults": plan_answer.DEFAULTS,
        "most_bytes": plan_answer.MOST_CONFIG_BYTES,
    }
    return page(request, "plan.html", status, **form, **(values or _NOTHING), problem=problem)


async def show_answer(request: Request) -> Response:
    """For the page's script: the answer alone, or the sentence that says what is wrong."""
    advice = request.query_params.get("advice") == "1"
    try:
        answer = await _find_answer(request, advice=advice)
    except UserError as error:
        return HTMLResponse(part(request, "plan_problem.html", problem=error.said))
    found = await beside(partial(_draw, answer, language_of(request), advice=advice))
    return HTMLResponse(part(request, "plan_answer.html", **found))


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
        await _still_there(request)
        found = await beside(partial(heat_of, answer, others=True))
    return HTMLResponse(part(request, "plan_heat.html", heat=found, alone=False))


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
        await _still_there(request)
        values = await beside(partial(_all_of, answer, language_of(request), others=True))
    styles = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "plan.css"))
    text = part(request, "plan_saved.html", **{**values, "alone": True, "styles": Markup(styles)})  # noqa: S704 (ours)
    return _download(text.encode(), "text/html; charset=utf-8", "tightfit-plan.html")


async def find_most(request: Request) -> Response:
    """For the page's script: what to set in the form, so that it is the most that fits."""
    try:
        asked = await beside(partial(plan_answer.read_address, request.query_params.multi_items()))
        await beside(partial(plan_answer.check_model, asked))
        async with _slow:
            await _still_there(request)
            found = await beside(partial(plan_answer.most_of, asked, request.query_params.get("max", "")))
    except UserError as error:
        return JSONResponse({"problem": words(language_of(request)).said(error.said).text})
    return JSONResponse({"fields": found})


async def read_config(request: Request) -> Response:
    """A pasted config.json, less what does not decide the shape: that fits into an address."""
    text = (await body_of(request, plan_answer.MOST_CONFIG_BYTES, PATIENCE_S)).decode("utf-8", errors="replace")
    try:
        block = await beside(partial(plan_answer.block_of, text))
    except UserError as error:
        return JSONResponse({"problem": words(language_of(request)).said(error.said).text})
    return JSONResponse({"config": json.dumps(block, separators=(",", ":"), ensure_ascii=False)})


# --- asking ---------------------------------------------------------------------------------------


async def _find_answer(request: Request, *, advice: bool) -> plan_answer.Answered:
    asked = await beside(partial(plan_answer.read_address, request.query_params.multi_items()))
    await beside(partial(plan_answer.check_model, asked))  # the network may be slow: nobody else waits for it
    async with _quick:
        await _still_there(request)
        answer = await beside(partial(plan_answer.answer_to, asked, advice=False))
    if not advice or answer.plan.fits:
        return answer
    async with _slow:
        await _still_there(request)
        return await beside(partial(plan_answer.answer_to, asked, advice=True))


async def _still_there(request: Request) -> None:
    if await request.is_disconnected():
        raise HTTPException(GONE)


# --- what the templates get -----------------------------------------------------------------------

_NOTHING: dict[str, object] = {
    "found": None,
    "verdict": "",
    "heat": None,
    "files": {},
    "why_none": "",
    "commands": (),
    "address": "",
    "gib": gib,
    "alone": False,
}


def _draw(answer: plan_answer.Answered, language: Language, *, advice: bool) -> dict[str, object]:
    plan, found = answer.plan, draw(answer, words(language), advice=advice)
    is_ours = plan.chosen is not None and plan.job.trainer == "tightfit"
    commands = [("command_plan", answer.asked.command())]  # what to type: its key in the words, and the command
    if plan.chosen is not None:
        commands.append(("command_write", answer.asked.command("plan", "--write", "plan")))
        commands.append(("command_train", START[plan.job.trainer]))
    return _NOTHING | {
        "found": found,
        "verdict": verdict(found, words(language)),
        "commands": commands,
        # On what it would train, where that is not what a reader of the last command expects.
        "before_the_start": untrained(plan.job) if is_ours else (),
        "address": answer.asked.address(),
    }


def _files_of(answer: plan_answer.Answered) -> dict[str, object]:
    files = answer.files
    found, why = (files, "") if isinstance(files, dict) else ({}, files)
    return {"files": found, "why_none": why, "address": answer.asked.address()}


def _all_of(answer: plan_answer.Answered, language: Language, *, others: bool = False) -> dict[str, object]:
    heat = heat_of(answer, others=others)
    return {**_draw(answer, language, advice=True), **_files_of(answer), "heat": heat}


def verdict(found: Drawn, words: Words) -> str:
    """The answer in one sentence, which is read out as it changes."""
    said = words["plan"]
    if not found["ways"]:
        return str(said["verdict_none"])
    first, used = found["ways"][0], found["used"]
    kind = "changed" if found["is_changed"] else "fits" if found["plan"].fits else "not"
    template: str = said[f"verdict_{kind}"]
    tokens, pace = first["tokens_per_s"], ""
    if tokens is not None:
        step, between = first["seconds"]["step"], first["seconds"]["range"]
        between = said["range"].format(range=between) if between else ""
        pace = said["verdict_pace"].format(tokens=f"{tokens:,.0f}", step=step, range=between)
    return template.format(
        way=words.say(first["name"]),
        needs=first["needs"],
        card=first["card"],
        gpus=used,
        pace=pace,
        lacks=words.say(first["lacks"] or ""),
        where=said["on_many" if used > 1 else "on_one"].format(gpus=used),
    )


@cache
def find_machine() -> str:
    """`2 × RTX 4090`; empty: this machine has no GPU."""
    try:
        here = this_machine()
    except UserError:
        return ""
    return "" if here.gpu.vendor == "cpu" else f"{here.gpus_per_node} × {here.gpu.name}"


def _download(data: bytes, kind: str, name: str) -> Response:
    return Response(data, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


ROUTES = [
    Route("/plan", show_plan, methods=["GET"]),
    Route("/plan/answer", show_answer, methods=["GET"]),
    Route("/plan/guess", show_guess, methods=["GET"]),
    Route("/plan/answer.json", send_json, methods=["GET"]),
    Route("/plan/heat", show_heat, methods=["GET"]),
    Route("/plan/files", show_files, methods=["GET"]),
    Route("/plan/files.zip", send_zip, methods=["GET"]),
    Route("/plan/saved", send_saved, methods=["GET"]),
    Route("/plan/most", find_most, methods=["GET"]),
    Route("/plan/config", read_config, methods=["POST"]),
]
