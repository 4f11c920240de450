"""The checkpoints of a run as a person asks about them: which there are, which are whole, and which may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.records import find_json
from tightfit.job import Saving
from tightfit.messages import Message, Said
from tightfit.runs import checkpoints
from tightfit.runs.checkpoints import CHECKPOINTS, MANIFEST, Keeping, Torn, Unknown, step_of
from tightfit.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The plan that a checkpoint was written under; None: not said."""

    engine: str | None = None
    world: int | None = None
    precision: str | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """One checkpoint."""

    folder: Path
    step: int
    bytes: int
    written: str | None = None
    maker: Maker | None = None
    problem: Said | None = None
    """Why it is not whole; None: it is, as far as it was looked at."""
    certain: bool = True
    """Whether nobody can use it; False: it may be whole for a newer version, or when the disk answers again."""
    verified: bool = False
    """Whether every byte was hashed again, and is what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """What a process left half-done that was killed."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    run: Path
    checkpoints: tuple[FoundCheckpoint, ...]
    """The newest first."""
    orphans: tuple[Orphan, ...]

    @property
    def bytes(self) -> int:
        return sum(found.bytes for found in self.checkpoints) + sum(orphan.bytes for orphan in self.orphans)

    @property
    def broken(self) -> tuple[FoundCheckpoint, ...]:
        return tuple(found for found in self.checkpoints if found.problem is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goner:
    """Something that need not stay, and why."""

    path: Path
    bytes: int
    because: Message


def run_of(path: Path) -> Path:
    """The run that a path means: its folder, or the folder of its checkpoints."""
    place = path.expanduser().absolute()
    if not place.exists():
        raise ConfigError(Message("runs.nothing-there", path=path))
    if not place.is_dir():
        raise ConfigError(Message("runs.a-file-there", path=path))
    if step_of(place) is not None or (place / MANIFEST).exists():
        raise ConfigError(Message("runs.one-checkpoint", path=path, run=place.parent.parent))
    if (place / CHECKPOINTS).is_dir():
        return place
    if place.name == CHECKPOINTS:
        return place.parent
    if any((place / name).exists() for name in ("run.json", "events.jsonl", "plan")):
        return place
    raise ConfigError(Message("runs.no-checkpoints", path=path, name=CHECKPOINTS))


def inventory(run: Path) -> Inventory:
    """What there is. Quick: files are counted and not read."""
    found = filter(None, map(_look_at, checkpoints.newest_first(run)))
    orphans = [Orphan(path=path, bytes=checkpoints.size_of(path)) for path in checkpoints.orphans(run)]
    return Inventory(run=run, checkpoints=tuple(found), orphans=tuple(orphans))


def _look_at(folder: Path) -> FoundCheckpoint | None:
    """None: a run that lives has just removed it."""
    step = step_of(folder) or 0
    try:
        manifest = checkpoints.checked(folder)
        maker = _maker(checkpoints.read_state(folder))
    except Torn as error:
        return _not_whole(FoundCheckpoint(folder=folder, step=step, bytes=0), error)
    return FoundCheckpoint(folder=folder, step=step, bytes=manifest.bytes, written=manifest.written, maker=maker)


def _not_whole(found: FoundCheckpoint, error: Torn) -> FoundCheckpoint | None:
    """With as much as can still be said of it."""
    if not found.folder.exists():
        return None
    with suppress(Torn):
        found = replace(found, written=checkpoints.read_manifest(found.folder).written)
    with suppress(Torn):
        found = replace(found, maker=_maker(checkpoints.read_state(found.folder)))
    size = checkpoints.size_of(found.folder)
    return replace(found, bytes=size, problem=error.said, certain=not isinstance(error, Unknown))


def _maker(state: Mapping[str, Any]) -> Maker:
    plan = state.get("plan")
    said: Mapping[str, Any] = plan if isinstance(plan, dict) else {}

    def text(key: str) -> str | None:
        value = said.get(key)
        return value if isinstance(value, str) and value.isprintable() else None

    world = said.get("world")
    count = world if isinstance(world, int) and not isinstance(world, bool) else None
    return Maker(engine=text("engine"), world=count, precision=text("precision"), method=text("method"))


def verified(there: Inventory, progress: Callable[[FoundCheckpoint, int], None]) -> Inventory:
    """The same, with every byte of what seemed whole hashed again; `progress` hears of each and of its bytes done."""
    judged = (found if found.problem is not None else _verify_one(found, progress) for found in there.checkpoints)
    return replace(there, checkpoints=tuple(filter(None, judged)))


def _verify_one(found: FoundCheckpoint, progress: Callable[[FoundCheckpoint, int], None]) -> FoundCheckpoint | None:
    try:
        spans = checkpoints.spans_of(checkpoints.read_manifest(found.folder))
        checkpoints.verify(found.folder, spans, lambda done: progress(found, done))
    except Torn as error:
        if not found.folder.exists():
            return None
        return replace(found, problem=error.said, certain=not isinstance(error, Unknown))
    return replace(found, verified=True)


# --- which go ------------------------------------------------------------------------------------


def keeping_of(run: Path) -> Keeping:
    """What the run itself was told to keep; two, where that cannot be found out."""
    try:
        saving = find_json(run / "plan" / WORKER_FILE)["saving"]  # of any version: what it keeps is not ours to prune
        said = {"keep_last": saving.get("keep_last", saving.get("keep")), "keep_every": saving.get("keep_every")}
    except (KeyError, TypeError, AttributeError):
        said = {}
    last, every = _count(said.get("keep_last")), _count(said.get("keep_every"))
    return Keeping(last=last or Saving().keep_last, every_steps=every)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def goners(there: Inventory, keeping: Keeping) -> tuple[Goner, ...]:
    """What may go, in the order in which it does: what nobody can use first, and of the others the oldest."""
    whole = [found for found in there.checkpoints if found.problem is None]
    spare = checkpoints.surplus((found.step for found in whole), keeping)
    older = Message("runs.older-than", count=keeping.last) if keeping.last > 1 else Message("runs.older-than-one")
    return (
        *(Goner(path=each.path, bytes=each.bytes, because=Message("runs.left-by-killed")) for each in there.orphans),
        *(
            Goner(path=found.folder, bytes=found.bytes, because=Message("runs.not-whole", problem=found.problem))
            for found in there.broken
            if found.certain
        ),
        *(
            Goner(path=found.folder, bytes=found.bytes, because=older)
            for found in reversed(whole)
            if found.step in spare
        ),
    )


def check_removable(gone: Iterable[Goner]) -> None:
    """NotOurs: one of them holds what we did not write, and none of them should go before that is settled."""
    for goner in gone:
        checkpoints.check_removable(goner.path)


def remove(goner: Goner) -> None:
    """Only for whoever holds the run's lock."""
    try:
        if step_of(goner.path) is None:
            checkpoints.remove_orphan(goner.path)
        else:
            checkpoints.remove(goner.path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(Message("runs.cannot-be-removed", path=goner.path, why=why)) from None
