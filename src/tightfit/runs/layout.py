"""What we write in a run's folder, name by name: the one list by which files there are moved and removed.

A checkpoint's manifest lists its files, and the worker's event of a saved model those of the model. What has no list of
its own, since its writer may be killed at any moment, is known by the names that we give: a log is `rank-N.log`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tightfit.formats.plan_folder import LIST, PLAN_FILES, STAGING
from tightfit.inputs.records import find_json
from tightfit.inputs.spelling import open_regular
from tightfit.owned import FRESH, Listed, Ours, Patterns
from tightfit.runs import checkpoints
from tightfit.runs.checkpoints import CHECKPOINTS, STAGED
from tightfit.runs.events import AttemptBegan, Saved, Started, event_of
from tightfit.runs.record import read_run

EVENTS, MODEL, EARLIER = "events.jsonl", "model", "earlier"
HALF = (".model.partial", ".model.old")
"""What a process leaves that is killed while it writes the model; the last checkpoint makes it again."""
NEIGHBOURS = frozenset({"wandb"})
"""What a library keeps in the folder at the user's wish; it stays where it is."""
_READ_BYTES = 65_536
_MOST_BYTES = 2**20
"""Of a line."""

_LOG = r"(rank-\d+|launcher)\.log"
_ERRORS = r"errors/rank-\d+\.json"
_PLAN = "|".join(map(re.escape, sorted({LIST, *PLAN_FILES})))
_STAGING = re.escape(STAGING)
_NUMBER = r"\d{3,}"
_PICTURE = r"(loss|memory)\.png"
_FIXED = Patterns(
    "|".join(
        (
            r"run\.json|run\.new",
            FRESH.format(r"run\.json"),
            re.escape(EVENTS),
            _PICTURE,
            rf"\.{_PICTURE}\.new",
            FRESH.format(_PICTURE),
            f"logs/{_LOG}",
            _ERRORS,
            r"heartbeats/rank-\d+",
            r"faults/\d+",
            f"plan/({_PLAN})",
            rf"plan/{_STAGING}/(old/)?({_PLAN})",
            rf"attempts/{_NUMBER}\.(json|new)",
            f"attempts/{FRESH.format(_NUMBER + r'[.]json')}",
            rf"attempts/{_NUMBER}/({_LOG}|command\.log|memory\.jsonl|stacks\.txt|{_ERRORS}|plan/({_PLAN}))",
            r"tensorboard/events\.out\.tfevents\.[^/]+",
        )
    ),
    "|".join(
        (
            f"logs|errors|heartbeats|faults|attempts|tensorboard|{MODEL}|{CHECKPOINTS}",
            rf"plan(/{_STAGING}(/old)?)?",
            f"attempts/{_NUMBER}(/errors|/plan)?",
        )
    ),
)

PLAN_STAGED: Ours = Patterns(f"(old/)?({_PLAN})", "old")
"""Files of a plan on their way."""

# --- the cache ----------------------------------------------------------------------------------

_KEY, _VIEW_KEY = r"[0-9a-f]{32}", r"[0-9a-f]{16}"
_SAMPLES = r"(tokens|learned|starts|lengths|losses|groups)\.bin|manifest\.json"
_VIEW = rf"(train|held)\.(documents|lengths|losses|borders)|manifest\.json|{FRESH.format('manifest[.]json')}"
_BUILDING = rf"{_SAMPLES}|{_VIEW}|codec\.json|list-\d+\.jsonl|shard-\d{{7}}\.(tokens|learned|lengths|losses|groups)"
_VIEWS = rf"views/({_VIEW_KEY}|\.building-{_VIEW_KEY}-\d+)"
DATA_SET: Ours = Patterns(f"{_SAMPLES}|{_VIEWS}/({_VIEW})", f"views|{_VIEWS}")
DATA_BUILDING: Ours = Patterns(_BUILDING)
"""A data set, or a view of one, while it is built."""
DATA_CACHE: Ours = Patterns(
    rf"hashes\.json|\.hashes-\d+|arms-{_KEY}\.json|{_KEY}\.lock|{FRESH.format(r'[-a-z0-9]+[.]json')}"
    rf"|{_KEY}/({_SAMPLES}|{_VIEWS}/({_VIEW}))|\.building-{_KEY}-\d+/({_BUILDING})",
    rf"{_KEY}(/views|/{_VIEWS})?|\.building-{_KEY}-\d+",
)
_CONVERTED = r"[^/]+-[0-9a-f]{16}"
WEIGHTS_CACHE: Ours = Patterns(
    rf"{_CONVERTED}\.lock|{_CONVERTED}/({checkpoints.MODEL})|\.{_CONVERTED}\.partial/({checkpoints.HALF_WRITTEN})",
    rf"{_CONVERTED}|\.{_CONVERTED}\.partial",
)

# --- a run --------------------------------------------------------------------------------------


class RunFiles:
    """What of a run's folder is ours."""

    def __init__(self, run: Path, model: Ours | None = None) -> None:
        """`model`: where the model's files are listed elsewhere."""
        self._run = run
        self.model: Ours = model or model_files(run)
        self._checkpoints: dict[str, Ours | None] = {}

    def has_file(self, name: str) -> bool:
        inside = self._list_of(name)
        return _FIXED.has_file(name) if inside is None else inside[0].has_file(inside[1])

    def has_folder(self, name: str) -> bool:
        inside = self._list_of(name)
        return _FIXED.has_folder(name) if inside is None else not inside[1] or inside[0].has_folder(inside[1])

    def _list_of(self, name: str) -> tuple[Ours, str] | None:
        """The list that a name is in or not, and the name as it is there; None: the fixed one."""
        first, _, rest = name.partition("/")
        if first == MODEL and rest:
            return self.model, rest
        if first in HALF:
            return STAGED, rest
        if first == CHECKPOINTS and rest:
            folder, _, inside = rest.partition("/")
            if folder not in self._checkpoints:
                self._checkpoints[folder] = checkpoints.own_files(self._run / CHECKPOINTS / folder)
            found = self._checkpoints[folder]
            return (Listed(()), "nothing") if found is None else (found, inside)
        return None


def model_files(run: Path) -> Ours:
    """The files of the run's model, as the worker said when it had saved it; by their names where it did not."""
    for line in _lines_backwards(run / EVENTS):
        if b'"saved"' in line and isinstance(saved := event_of(line), Saved):
            return Listed(saved.files) if saved.files else checkpoints.MODEL_FILES
    return checkpoints.MODEL_FILES


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The last line first."""
    try:
        with open_regular(path) as file:
            left, rest = file.seek(0, os.SEEK_END), b""
            while left:
                size = min(left, _READ_BYTES)
                left -= size
                file.seek(left)
                lines = (file.read(size) + rest).split(b"\n")
                rest = lines[0]
                yield from reversed(lines[1:])
            yield rest
    except OSError:
        return


def is_run(path: Path) -> bool:
    """Whether a folder holds a record that only a run of ours writes: its own, its events, its checkpoints, or the
    last words of a rank, which another node may have left before the first one began."""
    if read_run(path) is not None or _has_events(path / EVENTS):
        return True
    if any(checkpoints.own_files(folder) is not None for folder in checkpoints.newest_first(path)):
        return True
    errors = [find_json(each) for each in sorted((path / "errors").glob("rank-*.json"))]
    return bool(errors) and all(isinstance(each, dict) and {"kind", "text", "rank"} <= set(each) for each in errors)


def _has_events(path: Path) -> bool:
    """Whether the first line is one that our worker, or its supervisor, begins with."""
    try:
        with open_regular(path) as file:
            first = event_of(file.readline(_MOST_BYTES))
    except OSError:
        return False
    if isinstance(first, Started):
        return None not in (first.model, first.engine, first.world, first.launcher)
    return isinstance(first, AttemptBegan)
