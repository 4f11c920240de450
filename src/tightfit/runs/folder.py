"""The folder of one run.

    plan/           what was planned: worker.json and all other rendered files
    events.jsonl    what the worker reports, a line each; over all starts that went on from a checkpoint
    checkpoints/    from which another start goes on: see `checkpoints.py`
    logs/rank-N.log what each rank printed
    errors/         rank-N.json, where a rank left in distress
    run.json        the command, when, where, and how it ended
    lock            held while the run lives
    meeting.json    by which the nodes of a run on several machines know each other, while it lives
    model/          what came out
    earlier/N/      what runs in this folder left that did not finish

A run that goes on from its checkpoints finds them and its events in place; the rest of the earlier start makes way. A
start that fails before the first step leaves nothing behind, unless a rank crashed: then the logs are what is needed.

Only what is listed here, name by name, is moved or removed. A checkpoint's manifest lists its files, and the worker's
event of a saved model those of the model; what its writer may leave at any moment is known by the names that we give. A
user's own files beside stay where they are; one within something that has to make way, or any where a finished run is
to be replaced, is a reason to refuse.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tightfit.formats.plan_folder import LIST, PLAN_FILES, STAGING, write
from tightfit.inputs.records import find_json
from tightfit.inputs.spelling import open_regular
from tightfit.messages import Message, say_why
from tightfit.owned import FRESH, Listed, NotOurs, Ours, Patterns, find_strangers, move_file, remove_file, remove_folder
from tightfit.runs import checkpoints
from tightfit.runs.checkpoints import CHECKPOINTS, STAGED, newest_first, step_of
from tightfit.runs.events import AttemptBegan, Saved, Started, event_of
from tightfit.runs.lock import FolderLock, check_unlocked, is_lock
from tightfit.runs.records import EVENTS, RECORD, RunFolder, RunRecord, end_last_line, read_run
from tightfit.types import ConfigError

MODEL, EARLIER = "model", "earlier"
HALF = (".model.partial", ".model.old")
"""What a process leaves that is killed while it writes the model; the last checkpoint makes it again."""
NEIGHBOURS = frozenset({"wandb"})  # what a library keeps in the folder at the user's wish; it stays where it is
_MOST_BYTES = 2**20  # of a line

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
            r"(meeting|ranks)\.json",
            FRESH.format(r"(meeting|ranks)\.json"),
            re.escape(EVENTS),
            _PICTURE,
            rf"\.{_PICTURE}\.new",
            FRESH.format(_PICTURE),
            f"logs/{_LOG}",
            _ERRORS,
            r"heartbeats/(rank-\d+|node-[0-9a-f]{16})",
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

PLAN_STAGED: Ours = Patterns(f"(old/)?({_PLAN})", "old")  # files of a plan on their way

# --- the cache ----------------------------------------------------------------------------------

_KEY, _VIEW_KEY = r"[0-9a-f]{32}", r"[0-9a-f]{16}"
_SAMPLES = r"(tokens|learned|starts|lengths|losses|groups)\.bin|manifest\.json"
_VIEW = rf"(train|held)\.(documents|lengths|losses|borders)|manifest\.json|{FRESH.format('manifest[.]json')}"
_BUILDING = rf"{_SAMPLES}|{_VIEW}|codec\.json|list-\d+\.jsonl|shard-\d{{7}}\.(tokens|learned|lengths|losses|groups)"
_VIEWS = rf"views/({_VIEW_KEY}|\.building-{_VIEW_KEY}-\d+)"
DATA_SET: Ours = Patterns(f"{_SAMPLES}|{_VIEWS}/({_VIEW})", f"views|{_VIEWS}")
DATA_BUILDING: Ours = Patterns(_BUILDING)  # a data set, or a view of one, while it is built
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

COMPILED = "compiled"  # the folder of what torch.compile makes of layers
_CODE = r"torch-[^/]+"
COMPILED_CACHE: Ours = Patterns(rf"{_CODE}/.+", rf"{_CODE}(/.+)?")  # below a folder of one torch all is torch's


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
    saved: Saved | None = None
    with suppress(OSError), open_regular(run / EVENTS) as file:
        for line in file:
            if b'"saved"' in line and isinstance(event := event_of(line), Saved):
                saved = event
    return Listed(saved.files) if saved is not None and saved.files else checkpoints.MODEL_FILES


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


AUTO, NONE = "auto", "none"
"""Words for where to begin: at the newest checkpoint of the folder, where there is one; at the beginning. Anything else
is the path of a checkpoint, or of a run's folder."""


def check_folder(path: Path, *, overwrite: bool = False, resume: str = NONE, more: bool = False) -> None:
    """Raise what would keep a run from this folder; write nothing. `more`: more is asked than a finished one made."""
    if not path.exists():
        parent = next(place for place in path.parents if place.exists())
        if not parent.is_dir():
            raise ConfigError(Message("runs.parent-is-file", parent=parent, path=path))
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(Message("runs.output-not-writable", path=parent))
        return
    if not path.is_dir():
        raise ConfigError(Message("runs.output-is-file", path=path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(Message("runs.output-not-writable", path=path))
    check_unlocked(path, here=True)
    _check_contents(path, overwrite=overwrite, goes_on=more and goes_on(path, resume, more=True) is not None)


def _check_contents(path: Path, *, overwrite: bool, goes_on: bool) -> None:
    names = {entry.name for entry in path.iterdir() if not is_lock(entry.name)}
    if EARLIER in names and _is_earlier(path / EARLIER):
        names.remove(EARLIER)
    if not names:
        return
    if not is_run(path):
        raise NotOurs(path / min(names), Message("runs.holds-other", path=path, name=repr(min(names))))
    if "model" in names and not overwrite and not goes_on:
        raise ConfigError(Message("runs.holds-finished", path=path))
    if overwrite:  # checkpoints may lie on another disk, behind a link of the user's
        known = {EARLIER, *NEIGHBOURS, *((CHECKPOINTS,) if (path / CHECKPOINTS).is_symlink() else ())}
        found = [(each, each.relative_to(path).parts[0]) for each in find_strangers(path, RunFiles(path))]
        strangers = [each for each, name in found if name not in known and not is_lock(name)]
    else:
        strangers = [path / name for name in sorted(names) if _is_stranger(path / name)]
    if strangers:
        raise _not_ours(strangers[0])


def _not_ours(path: Path) -> NotOurs:
    return NotOurs(path, Message("runs.not-ours-move", path=path))


def _is_earlier(earlier: Path) -> bool:
    """Whether this is the folder in which we keep what has made way."""
    return (
        earlier.is_dir()
        and not earlier.is_symlink()
        and all(each.name.isdigit() and each.is_dir() and not each.is_symlink() for each in earlier.iterdir())
    )


def _is_stranger(place: Path) -> bool:
    """Whether something else stands where we write: a link, a pipe, a folder in a file's place."""
    if place.name in (RECORD, EVENTS):
        return place.is_symlink() or not place.is_file()
    folders = ("logs", "errors", "plan", "heartbeats", "attempts", "model", *HALF)
    return place.name in folders and (place.is_symlink() or not place.is_dir())


def goes_on(path: Path, resume: str, *, more: bool = False) -> int | None:
    """The step from which a run would go on here; None: anew. `more`: it asks for more than a finished one made."""
    there = [step for folder in newest_first(path) if (step := step_of(folder)) is not None]
    if resume == NONE or not there:
        return None
    if resume == AUTO:
        return None if (path / "model").exists() and not more else there[0]
    asked = Path(resume).resolve()
    if asked == path.resolve():
        return there[0]
    return step_of(asked) if asked.parent == (path / CHECKPOINTS).resolve() else None


class ClaimedFolder:
    def __init__(self, path: Path, lock: FolderLock, made: list[Path], step: int | None, *, replaces: bool) -> None:
        """Move what an earlier run left into a folder of its own, but for what this one goes on with: from `step`.
        `replaces`: whether a finished run among it is not wanted any more; `made`: folders that were not there."""
        self.folder, self._lock, self._made, self._replaces = RunFolder(path), lock, made, replaces
        self._files = RunFiles(path)
        staying = {CHECKPOINTS, EVENTS}
        if step is None:  # what is there without a checkpoint's name was never finished, and the worker clears it away
            staying = set() if newest_first(path) else {CHECKPOINTS}
        others = (EARLIER, *NEIGHBOURS)
        entries = [entry for entry in path.iterdir() if entry.name not in others and not is_lock(entry.name)]
        own = [entry for entry in entries if self._files.has_folder(entry.name) or self._files.has_file(entry.name)]
        self._stayed = {entry.name for entry in entries if entry not in own or entry.name in staying}
        moving = [entry for entry in own if entry.name not in self._stayed and entry.name not in HALF]
        # Going back behind newer ones: a later start would take these, which are of another course.
        moving += [each for each in newest_first(path) if step is not None and (step_of(each) or 0) > step]
        self._aside = set_aside(path, moving, self._files)
        for entry in own:
            if entry.name in HALF:
                _remove(entry, self._files)
        self._events_bytes: int | None = None  # their length; None: these are to begin anew
        if EVENTS in self._stayed:
            with (path / EVENTS).open("rb+") as file:
                self._events_bytes = end_last_line(file)
        self._checkpoints = {each.name for each in newest_first(path)}

    @classmethod
    def claim(
        cls, path: Path, *, overwrite: bool, resume: str = NONE, take_over: bool = False, more: bool = False
    ) -> ClaimedFolder:
        """Make the folder and hold it, or say who does; what an earlier run left makes way, unless this one goes on
        with it. `take_over`: the user says that whoever held it on another machine has gone."""
        check_folder(path, overwrite=overwrite, resume=resume, more=more)
        made = [place for place in (path, *path.parents) if not place.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock.take(path, take_over=take_over)
        except OSError as error:
            _unmake(made)
            raise _unwritable(path, error) from None
        try:
            step = goes_on(path, resume, more=more and not overwrite)
            # Again, now that nobody else can change it.
            _check_contents(path, overwrite=overwrite, goes_on=more and step is not None)
            return cls(path, lock, made, step, replaces=overwrite)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise _unwritable(path, error) from None
            raise

    def begin(self, files: Mapping[str, str], record: RunRecord) -> None:
        try:
            write(files, self.folder.plan, force=True, flag="--output")
            record.write(self.folder.path)
        except OSError as error:
            raise _unwritable(self.folder.path, error) from None

    def release(self, *, done: bool = False) -> None:
        """Let it go. A finished run that this one was to replace goes when this one is `done`, and not before."""
        aside = self._aside
        if done and aside is not None and self._replaces and (aside / "model").exists():
            remove_folder(aside, RunFiles(aside, self._files.model))
            _unmake([aside.parent])
        self._lock.release()

    def discard(self) -> None:
        """Leave everything as it was before this run. One that has made a checkpoint was not in vain, and stays."""
        path = self.folder.path
        if {folder.name for folder in newest_first(path)} - self._checkpoints:
            self.release()
            return
        files = RunFiles(path)
        for entry in list(path.iterdir()):
            if entry.name not in (EARLIER, *self._stayed) and not is_lock(entry.name):
                _remove(entry, files)
        if self._events_bytes is not None:
            with suppress(OSError):  # a disk that takes nothing any more: a line too many does no harm
                os.truncate(self.folder.events, self._events_bytes)
        if self._aside is not None:
            # What has come in its place meanwhile stays there, and what it would replace stays aside.
            for entry in list(self._aside.iterdir()):
                target = path / entry.name
                with suppress(FileExistsError):
                    if entry.name == CHECKPOINTS and target.is_dir():  # the newer ones alone had made way
                        for inside in list(entry.iterdir()):
                            move_file(inside, target / inside.name)
                        entry.rmdir()
                    else:
                        move_file(entry, target)
            _unmake([self._aside, self._aside.parent])
        self._lock.release()
        _unmake(self._made)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    why = say_why(error)
    id_ = "runs.cannot-write-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "runs.cannot-write"
    return ConfigError(Message(id_, path=path, why=why))


def set_aside(path: Path, moving: Sequence[Path], files: Ours | None = None) -> Path | None:
    """Move things of a run's folder into one of their own within it; which. None: there is nothing to move.

    NotOurs: one of them is not ours, or holds something that is not, and nothing was moved.
    """
    if not moving:
        return None
    here, ours = path.stat().st_dev, files or RunFiles(path)
    for place in moving:
        if place.parent.stat().st_dev != here:
            raise ConfigError(Message("runs.newer-elsewhere", place=place, path=path))
        name = place.relative_to(path).as_posix()
        if place.is_dir() and not place.is_symlink() and ours.has_folder(name):
            if found := find_strangers(place, _Below(ours, name)):
                raise _not_ours(found[0])
        elif not place.is_file() or place.is_symlink() or not ours.has_file(name):
            raise _not_ours(place)
    earlier = path / EARLIER
    if os.path.lexists(earlier) and not _is_earlier(earlier):
        raise _not_ours(earlier)
    number = 1 + max((int(each.name) for each in earlier.glob("[0-9]*") if each.name.isdigit()), default=0)
    aside = earlier / str(number)
    aside.mkdir(parents=True)
    for place in moving:
        target = aside / place.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        move_file(place, target)
    return aside


class _Below:
    """A list as it reads from a folder in it."""

    def __init__(self, files: Ours, folder: str) -> None:
        self._files, self._folder = files, folder

    def has_file(self, name: str) -> bool:
        return self._files.has_file(f"{self._folder}/{name}")

    def has_folder(self, name: str) -> bool:
        return self._files.has_folder(f"{self._folder}/{name}")


def _remove(path: Path, files: RunFiles) -> None:
    """Of an entry of a run's folder what is ours."""
    with suppress(OSError, NotOurs):
        if path.is_dir() and not path.is_symlink() and files.has_folder(path.name):
            remove_folder(path, _Below(files, path.name))
        elif files.has_file(path.name):
            remove_file(path)


def _unmake(made: list[Path]) -> None:
    with suppress(OSError):  # somebody else has put something there
        for place in made:
            place.rmdir()
