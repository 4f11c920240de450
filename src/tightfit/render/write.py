"""Files onto disk: all of them or none, and never half of one.

Everything is first written and synced in a staging folder inside the target folder, hence on the same file
system, and then renamed into place. What a rename replaces is kept under a second name until all are done, so
that an error puts it back. A process that is killed leaves whole files and a staging folder, which the next
call removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tightfit.types import ConfigError

STAGING = ".tightfit-staging"
EXECUTABLE = (".sh", ".sbatch")


def write(files: Mapping[str, str], folder: Path, force: bool) -> list[Path]:
    """Write the files, by name, into the folder; existing ones are replaced with `force` only."""
    made: list[Path] = []
    try:
        _check(files, folder, force)
        made = _make(folder)
        return _write(files, folder)
    except OSError as error:
        _unmake(made)
        raise ConfigError(_sentence(error, folder)) from None
    except ValueError as error:  # a path or a text that no file system can hold
        _unmake(made)
        raise ConfigError(f"cannot write to {str(folder)!r}: {error}: name another folder") from None
    except BaseException:
        _unmake(made)
        raise


def _check(files: Mapping[str, str], folder: Path, force: bool) -> None:
    for name in files:
        if Path(name).name != name or name in ("", ".."):
            raise ConfigError(f"{name!r} is not a file name: leave out the folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, so nothing can be written into it: name a folder")
    for name in files:
        path = folder / name
        if path.is_dir():
            raise ConfigError(f"{path} is a folder where a file should be written: move it away")
        if not force and (path.exists() or path.is_symlink()):
            raise ConfigError(f"{path} exists: say --force to replace it, or name another folder")


def _make(folder: Path) -> list[Path]:
    """Create the folder; those that were missing, the innermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    made: list[Path] = []
    try:
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            made.insert(0, place)
    except OSError:
        _unmake(made)
        raise
    return made


def _unmake(made: list[Path]) -> None:
    for place in made:
        try:
            place.rmdir()
        except OSError:  # somebody else has put something there
            return


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    try:
        (staging / "old").mkdir(parents=True)
        for name, text in files.items():
            _stage(staging / name, text)
        _move(files, folder, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in files]


def _stage(path: Path, text: str) -> None:
    with path.open("xb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    if path.suffix in EXECUTABLE:
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it


def _move(files: Mapping[str, str], folder: Path, staging: Path) -> None:
    moved: list[str] = []
    try:
        for name in files:
            if (folder / name).exists():
                _keep(folder / name, staging / "old" / name)
            os.replace(staging / name, folder / name)
            moved.append(name)
        _sync(folder)
    except BaseException:
        for name in reversed(moved):
            old = staging / "old" / name
            if old.exists():
                os.replace(old, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, aside: Path) -> None:
    """A second name for what is about to be replaced; a copy where the file system has no second names."""
    try:
        os.link(path, aside)
    except OSError:
        shutil.copy2(path, aside)


def _sync(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sentence(error: OSError, folder: Path) -> str:
    what = (error.strerror or str(error)).lower()
    return f"cannot write to {folder}: {what}; nothing was left there: make room or name another folder with --write"
