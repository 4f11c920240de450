"""A run that failed, and the way out of it: its cause, and the fixes that `tightfit diagnose` would name, each with the
question for the Plan view that tries it out.

What was judged when the run ended is believed: whoever judged it then knew more than its logs. Where nobody did, the
logs are judged now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import get_args
from urllib.parse import urlencode

import yaml

from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import judge, known_symptom
from tightfit.diagnose.masks import masked
from tightfit.diagnose.predicted import predict_failure
from tightfit.diagnose.verdict import Fix, Verdict
from tightfit.formats.worker.read import find_worker
from tightfit.messages import Said, change_texts
from tightfit.priced import GIB
from tightfit.runs import records
from tightfit.runs.cause import config_of_plan, of_run, read_planned_footprint
from tightfit.types import PhaseName, UserError
from tightfit.web.plan_answer import FIELDS, read_address

MOST_LINES, MOST_LETTERS = 8, 400
_SAME = ("method", "precision", "optimizer", "seq", "lora_rank", "lora_targets")
"""Levers of a run's plan that are part of the question, and not of the answer."""
_SAID = ("--gpus", "--host-ram", "--nvme", "--link", "--network")
"""What of the machine only the run's command tells."""
_NAMES = {"sequence": "seq"}  # of a job file ↔ of the address


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    fix: Fix
    address: str | None  # the question for the Plan view; None: it is nothing that a plan decides


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """None: nobody says."""

    cause: Said
    id: str | None
    confidence: str | None
    rank: int | None
    phase: PhaseName | None
    evidence: tuple[Said, ...]
    predicted: Said | None  # what the memory model expected of the phase that failed
    remedies: tuple[WayOut, ...]
    address: str | None  # the run's own question


def find_failure(run: Path) -> FailedRun | None:
    """None: there is nothing from which it could be told."""
    plan = records.RunFolder(run).plan
    attempts = records.read_attempts(run)
    told = attempts[-1].cause if attempts else None
    verdict: Verdict | None = None
    if told is None:
        with suppress(UserError, OSError):
            verdict = judge(of_run(run).evidence).verdict
    elif told.id in catalogue().by_id:
        verdict = replace(known_symptom(told.id, config_of_plan(plan)), phase=as_phase(told.phase))
    asked = question_of(run)
    found = told or verdict
    if found is None:
        return None
    lines: tuple[Said, ...] = () if told is None else told.evidence
    if told is None and verdict is not None:
        lines = tuple(
            f"{line.source}{'' if line.number is None else f':{line.number}'}: {line.text}" for line in verdict.evidence
        )
    footprint = read_planned_footprint(plan) if verdict is not None else None
    expected = None if footprint is None or verdict is None else predict_failure(footprint, verdict)
    return FailedRun(
        cause=change_texts(told.sentence if told is not None else verdict.cause if verdict is not None else "", masked),
        id=found.id,
        confidence=found.confidence,
        rank=found.rank,
        phase=as_phase(found.phase),
        evidence=tuple(change_texts(line, lambda text: masked(text)[:MOST_LETTERS]) for line in lines[:MOST_LINES]),
        predicted=None if expected is None else expected.sentence,
        remedies=tuple(WayOut(fix=fix, address=_try_out(fix, asked)) for fix in (verdict.fixes if verdict else ())),
        address=None if asked is None else _write(asked),
    )


def as_phase(name: str | None) -> PhaseName | None:
    """None: it was in none, or a newer version knows another."""
    return next((phase for phase in get_args(PhaseName) if phase == name), None)


def question_of(run: Path) -> dict[str, str] | None:
    """What a run's plan answered, as fields of the Plan view's address; None: it has no plan that can be read."""
    try:
        tree = find_worker(records.RunFolder(run).plan)
        levers, world, model = tree["levers"], tree["world"], tree["model"]
        asked = {name: str(levers[name]) for name in _SAME if levers.get(name) is not None}
        asked |= {"effective_batch": str(tree["effective_batch"]), "gpus": str(world["gpus_per_node"])}
        asked |= {"card": f"{round(world['gpu_memory_bytes'] / GIB)}GB", "nodes": str(world["nodes"])}
        asked["model"] = str(model["name"])
        record = records.read_run(run)
        command = () if record is None else record.command
        for flag, value in pairwise(command):
            if flag in _SAID:
                asked[flag.removeprefix("--").replace("-", "_")] = value
        if "gpus" in asked and not asked["gpus"].isdecimal():  # as the flag has it: `4xRTX4090`
            del asked["card"], asked["nodes"]
        for known in (asked, {**asked, "config": json.dumps(model["config"])}):
            with suppress(UserError):
                read_address(list(known.items())).said_flags()
                return known
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _try_out(fix: Fix, asked: Mapping[str, str] | None) -> str | None:
    """A fix for a file of ours is a piece of it: what it sets, the Plan view can be asked about."""
    if asked is None or fix.command is None:
        return None
    if fix.command.split()[:2] == ["tightfit", "plan"]:
        return _write(asked)
    with suppress(yaml.YAMLError):
        piece = yaml.safe_load(fix.command)
        if isinstance(piece, dict):
            levers = piece.pop("levers", {})
            sets = {_NAMES.get(name, name): str(value) for name, value in {**piece, **levers}.items()}
            if sets.get("seq") == "N":  # shorter: as long as the user likes
                sets["seq"] = str(max(1, int(asked["seq"]) // 2))
            if sets and set(sets) <= set(FIELDS):
                return _write({**asked, **sets})
    return None


def _write(asked: Mapping[str, str]) -> str:
    return urlencode([(name.replace("_", "-"), asked[name]) for name in FIELDS if name in asked])
