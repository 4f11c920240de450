"""Files onto disk: all of them or none, and never half of one.

Everything is first written and synced in a staging folder inside the target folder, hence on the same file
system, and then renamed into place. What a rename replaces is kept under a second name until all are done, so
that an error puts it back. A process that is killed leaves whole files and a staging folder, which the next
call removes. An earlier plan's `worker.json`, and whatever its list names, goes where this plan has no such file:
with it the folder would be two plans.

Only the files of a plan are replaced, and only where the folder holds one of ours: its `worker.json` says so, or, in a
plan for another trainer, a list of what was written. A script of the user's that happens to be called `launch.sh`
stays, whatever was said.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tightfit.formats.dialect import dialects
from tightfit.formats.worker.read import SCHEMA
from tightfit.inputs.records import find_json
from tightfit.messages import Message, say_why
from tightfit.owned import NotOurs, Patterns, check_ours, move_file, remove_folder
from tightfit.types import ConfigError

STAGING = ".tightfit-staging"
RECORD, LIST = "worker.json", ".tightfit-plan.json"  # only we write them, and every plan has one or the other
PLAN_FILES = frozenset(file.name for dialect in dialects() for file in dialect.files) | {"PLAN.md"}
"""What a plan may consist of."""
KEPT = frozenset({LIST, "dataset_info.json"})  # the list goes last, by itself; to the other people add data of theirs
EXECUTABLE = (".sh", ".sbatch")


def write(files: Mapping[str, str], folder: Path, force: bool, *, flag: str = "--write") -> list[Path]:
    """Write the files, by name, into the folder, which `flag` names; existing ones are replaced with `force` only."""
    made: list[Path] = []
    names = [*files] if RECORD in files else [LIST, *files]
    try:
        ours, written = _check(names, folder, force)
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            made.insert(0, place)
        stale = [name for name in sorted(written - {*names}) if (folder / name).is_file()] if force else []
        if LIST in names:  # of other files of an earlier plan it says that they are ours
            beside = [name for name in sorted(ours - {*names, *stale}) if (folder / name).is_file()]
            listed = {"schema": SCHEMA, "files": sorted(files), **({"beside": beside} if beside else {})}
            files = {LIST: json.dumps(listed) + "\n", **files}
        elif force and LIST in ours and (folder / LIST).is_file():
            stale.append(LIST)
        _write(files, stale, folder)
        return [folder / name for name in files if name != LIST]
    except OSError as error:
        _unmake(made)
        raise ConfigError(Message("planfile.cannot-write", folder=folder, error=say_why(error), flag=flag)) from None
    except ValueError as error:  # a path or a text that no file system can hold
        _unmake(made)
        raise ConfigError(Message("planfile.cannot-hold", folder=repr(str(folder)), error=error)) from None
    except BaseException:
        _unmake(made)
        raise


def _check(files: Sequence[str], folder: Path, force: bool) -> tuple[frozenset[str], frozenset[str]]:
    """What lies there of an earlier plan is ours, and what of it may be removed."""
    for name in files:
        if Path(name).name != name or name in ("", ".."):
            raise ConfigError(Message("planfile.not-a-name", name=repr(name)))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Message("planfile.folder-is-file", folder=folder))
    trees = [find_json(folder / name) for name in (RECORD, LIST)]
    record, listed = (tree if isinstance(tree, dict) and tree.get("schema") == SCHEMA else {} for tree in trees)
    told = [listed.get(key) for key in ("files", "beside")]
    written, beside = (PLAN_FILES & frozenset(map(str, names if isinstance(names, list) else ())) for names in told)
    ours = written | beside | ({LIST} if listed else set())
    if {"levers", "predicted", "saving"} <= set(record):
        ours, written = PLAN_FILES | {LIST}, written | {RECORD}
    for name in files:
        path = folder / name
        if path.is_dir():
            raise ConfigError(Message("planfile.file-is-folder", path=path))
        if not os.path.lexists(path):
            continue
        if name not in ours or path.is_symlink():
            raise NotOurs(path, Message("planfile.not-ours", path=path))
        if not force:
            raise ConfigError(Message("planfile.exists", path=path))
    return ours, frozenset(name for name in written - KEPT if not (folder / name).is_symlink())


def _unmake(made: list[Path]) -> None:
    for place in made:
        try:
            place.rmdir()
        except OSError:  # somebody else has put something there
            return


def _write(files: Mapping[str, str], stale: Sequence[str], folder: Path) -> None:
    staging, names = folder / STAGING, "|".join(map(re.escape, {LIST, *PLAN_FILES, *files, *stale}))
    staged = Patterns(f"(old/)?({names})", "old")
    if os.path.lexists(staging):  # of a process that was killed
        check_ours(staging, staged, Message("planfile.staging"))
        remove_folder(staging, staged)
    staging.mkdir()
    try:
        (staging / "old").mkdir()
        for name, text in files.items():
            path = staging / name
            with path.open("xb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            if path.suffix in EXECUTABLE:
                mode = path.stat().st_mode
                path.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it
        _move(files, stale, folder, staging)
    finally:
        remove_folder(staging, staged)


def _move(files: Mapping[str, str], stale: Sequence[str], folder: Path, staging: Path) -> None:
    moved: list[str] = []
    known = {name for name in files if (folder / name).exists()}
    try:
        # with either of those in place, the others are known as ours
        for name in sorted(files, key=lambda name: name not in (RECORD, LIST)):
            if name in known:
                _keep(folder / name, staging / "old" / name)
                os.replace(staging / name, folder / name)
            else:
                move_file(staging / name, folder / name)
            moved.append(name)
        for name in stale:
            _keep(folder / name, staging / "old" / name)
            (folder / name).unlink()
            moved.append(name)
        # a rename is on disk when its folder is
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        for name in reversed(moved):
            old = staging / "old" / name
            if old.exists():
                os.replace(old, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, old: Path) -> None:
    """Give what is about to go a second name; make a copy where the file system has no second names."""
    try:
        os.link(path, old)
    except OSError:
        shutil.copy2(path, old)
