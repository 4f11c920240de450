"""Checkpoints as they lie on disk: their names, the manifest, and whether one is whole.

    RUN/checkpoints/step-00000500/
        model.safetensors …  config.json …     a Hugging Face folder; for LoRA adapter_model.safetensors …
        optimizer/                             fp32 master weights and moments, as safetensors
        state.json                             step, data position, schedule, loss scale, job, plan
        manifest.json                          every file with its size and hashes, written last

A folder without a manifest that agrees with its files is no checkpoint. The manifest carries a hash of itself. A file's
bytes are hashed in the spans in which ranks wrote them, so nobody had to read the file again; together they cover it.

Those that DeepSpeed wrote for another program:

    output/                     or output/checkpoint-500, as transformers' Trainer has it
        latest                  the name of the newest below
        zero_to_fp32.py
        global_step500/
            *_model_states.pt   names and shapes, and up to stage 2 the weights
            *_optim_states.pt   one a rank: its part of the fp32 weights and of the moments
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.records import find_json, read_json
from tightfit.inputs.spelling import open_regular
from tightfit.job import Saving
from tightfit.job.known import block_in, whole
from tightfit.messages import Message, Said, say_why
from tightfit.owned import Listed, NotOurs, Ours, Patterns, check_ours
from tightfit.runs import disk
from tightfit.types import ConfigError, TightfitError

CHECKPOINTS = "checkpoints"
MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer"
SCHEMA = 1
READ_BYTES = 8 * 2**20
_MOST_MANIFEST_BYTES = 2**28  # a model of a trillion parameters has some million spans

_NAME = re.compile(r"step-(\d{8,})")
_STAGING, _OLD, _GONE = ".partial", ".old", ".gone"
_ORPHAN = re.compile(r"\.step-\d{8,}\.(partial|old|gone)")  # the names of what a killed process may leave

_BESIDE = (  # the small files that Hugging Face's libraries write beside weights
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|entity_vocab|emoji|chat_template|processor_config|preprocessor_config)\.json|(merges|vocab)\.txt"
    r"|chat_template\.jinja|additional_chat_templates/[\w.-]+\.jinja|bpe\.codes|vocab\.bpe|(source|target)\.spm"
    r"|(tokenizer|spiece|spm|sentencepiece\.bpe|tiktoken)\.model|\w+\.tiktoken"
)
_CUT = r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
MODEL = rf"{_BESIDE}|(model|adapter_model){_CUT}"
_CHECKPOINT = rf"{MODEL}|{OPTIMIZER}/\w+{_CUT}|{re.escape(MANIFEST)}|{re.escape(STATE)}"
_FOLDERS = f"additional_chat_templates|{OPTIMIZER}"
HALF_WRITTEN = rf"{_CHECKPOINT}|\.rank-\d+-(began|spans|done)(-\d+)?\.json"
MODEL_FILES: Ours = Patterns(MODEL, _FOLDERS)
STAGED: Ours = Patterns(HALF_WRITTEN, _FOLDERS)  # what lies in a folder that is being written, or is being removed


class Torn(TightfitError):
    """A folder that is no whole checkpoint; the sentence says why."""

    def __init__(self, said: Said) -> None:
        super().__init__(said)
        self.said = said


class Unknown(Torn):
    """A folder that may well be whole, but not for us and now: a newer version's, or one that may not be read."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a file, and their hash."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    step: int
    written: str  # when, as a person reads it
    files: Mapping[str, StoredFile]  # by the name within the folder

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        files = {
            name: {"bytes": file.bytes, "spans": [[span.start, span.stop, span.digest] for span in file.spans]}
            for name, file in sorted(self.files.items())
        }
        tree = {"schema": SCHEMA, "step": self.step, "written": self.written, "hash": "xxh3_128", "files": files}
        return json.dumps({**tree, "itself": _own_digest(tree)}, indent=1) + "\n"


def digest(data: bytes | memoryview) -> str:
    """Against torn writes and flipped bits, not against people: so a fast one."""
    return xxhash.xxh3_128_hexdigest(data)


def _own_digest(tree: Mapping[str, Any]) -> str:
    return digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


def folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """None: the name is not that of a checkpoint."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def newest_first(run: Path) -> list[Path]:
    """What looks like a checkpoint by its name, whole or not."""
    place = run / CHECKPOINTS
    if not place.is_dir():
        return []
    found = [(step, folder) for folder in place.iterdir() if (step := step_of(folder)) is not None and folder.is_dir()]
    return [folder for _, folder in sorted(found, reverse=True)]


def written_first(run: Path) -> Path | None:
    """The newest folder that has a manifest, whatever it says."""
    return next((folder for folder in newest_first(run) if (folder / MANIFEST).exists()), None)


def staging_of(folder: Path) -> Path:
    """Where it is written until it is whole."""
    return folder.with_name(f".{folder.name}{_STAGING}")


def replaced_of(folder: Path) -> Path:
    """Where another one of that name goes for the moment in which it is replaced."""
    return folder.with_name(f".{folder.name}{_OLD}")


# --- whole or not --------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    try:
        tree = read_json(folder / MANIFEST, most_bytes=_MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise Torn(Message("runs.not-finished", name=MANIFEST)) from None
    except OSError as error:
        raise Unknown(Message("runs.its-cannot-read-why", name=MANIFEST, why=say_why(error))) from None
    except ValueError:
        raise Torn(Message("runs.its-no-json", name=MANIFEST)) from None
    if not isinstance(tree, dict) or tree.pop("itself", None) != _own_digest(tree):
        raise Torn(Message("runs.its-changed", name=MANIFEST))
    if tree.get("schema") != SCHEMA:
        raise Unknown(Message("runs.other-schema", found=tree.get("schema"), known=SCHEMA))
    try:
        files = {
            name: StoredFile(int(one["bytes"]), tuple(Span(int(a), int(b), str(c)) for a, b, c in one["spans"]))
            for name, one in tree["files"].items()
        }
        return Manifest(step=int(tree["step"]), written=str(tree["written"]), files=files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Torn(Message("runs.its-no-manifest", name=MANIFEST)) from None


def checked(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with their sizes, or Torn. Quick: reads no file."""
    manifest = read_manifest(folder)
    if manifest.step != step_of(folder):
        raise Torn(Message("runs.other-step", step=manifest.step))
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise Torn(Message("runs.file-missing", name=name)) from None
        except OSError as error:
            raise Unknown(Message("runs.file-not-seen", name=name, why=say_why(error))) from None
        if size != file.bytes:
            raise Torn(Message("runs.other-size", name=name, size=size, all=file.bytes))
        if not covered(file):
            raise Torn(Message("runs.no-hash", name=MANIFEST, file=name))
    return manifest


def covered(file: StoredFile) -> bool:
    """Whether every byte is in a span: what is in none could change without anybody's notice."""
    reached = 0
    for start, stop in sorted((span.start, span.stop) for span in file.spans):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached == file.bytes


def spans_of(manifest: Manifest) -> list[tuple[str, Span]]:
    """Everything that there is to verify, in the order of the files."""
    return [(name, span) for name, file in sorted(manifest.files.items()) for span in file.spans]


def verify(folder: Path, spans: Iterable[tuple[str, Span]], progress: Callable[[int], None] = lambda _: None) -> None:
    """Hash those spans again; Torn at the first that differs. `progress` hears of bytes done."""
    for name, span in spans:
        path = folder / name
        state, left = xxhash.xxh3_128(), span.stop - span.start
        try:
            with open_regular(path) as file:
                file.seek(span.start)
                while left and (data := file.read(min(left, READ_BYTES))):
                    state.update(data)
                    left -= len(data)
                    progress(len(data))
        except FileNotFoundError:
            raise Torn(Message("runs.file-missing", name=path.name)) from None
        except OSError as error:
            raise Unknown(Message("runs.file-not-read", name=path.name, why=say_why(error))) from None
        if state.hexdigest() != span.digest:
            raise Torn(Message("runs.damaged-between", name=name, start=span.start, stop=span.stop))


def read_state(folder: Path) -> dict[str, Any]:
    try:
        tree = read_json(folder / STATE, finite=True)
    except FileNotFoundError:
        raise Torn(Message("runs.its-missing", name=STATE)) from None
    except OSError as error:
        raise Unknown(Message("runs.its-cannot-read-why", name=STATE, why=say_why(error))) from None
    except ValueError:
        raise Torn(Message("runs.its-cannot-read", name=STATE)) from None
    if not isinstance(tree, dict):
        raise Torn(Message("runs.its-cannot-read", name=STATE))
    # torn: a number that the folder's name does not say, that no training has, or that another one contradicts
    named = step_of(folder)
    step = tree.get("step")
    if type(step) is not int or step < 0 or (named is not None and step != named):
        if named is None:
            raise Torn(Message("runs.its-step", name=STATE, step=repr(step)))
        raise Torn(Message("runs.its-step-and-name", name=STATE, step=repr(step), named=named))
    job, optimizer = tree.get("job"), tree.get("optimizer")
    batch = job.get("effective_batch") if isinstance(job, dict) else None
    made = optimizer.get("steps") if isinstance(optimizer, dict) else None
    for key, value, most in (("samples", tree.get("samples"), None), ("optimizer.steps", made, step)):
        if value is not None and (type(value) is not int or value < 0 or (most is not None and value > most)):
            raise Torn(Message("runs.its-number", name=STATE, key=key, value=repr(value), step=step))
    if type(batch) is int and tree.get("samples") not in (None, step * batch):
        samples = tree["samples"]
        raise Torn(Message("runs.its-samples", name=STATE, samples=samples, steps=step, batch=batch, all=step * batch))
    epoch = tree.get("epoch")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float) or epoch < 0):
        raise Torn(Message("runs.its-epoch", name=STATE, epoch=repr(epoch)))
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which checkpoints stay: the newest few, and every so many steps one for ever."""

    last: int
    every_steps: int | None = None


def outdated(run: Path, keeping: Keeping, step: int) -> list[Path]:
    """Whole checkpoints that need not stay once that of `step` stands.

    Torn ones do not count among the newest, and stay until they are pruned. Nor do later ones, which the run has passed
    over: their sizes may be right and their bytes not.
    """
    complete = []
    for folder in newest_first(run):
        if (step_of(folder) or 0) <= step:
            with suppress(Torn):
                complete.append((checked(folder).step, folder))
    spare = surplus([step for step, _ in complete], keeping)
    return [folder for step, folder in complete if step in spare]


def surplus(steps: Iterable[int], keeping: Keeping) -> frozenset[int]:
    """Of the steps of whole checkpoints, those that need not stay."""
    older = sorted(steps, reverse=True)[keeping.last :]
    every = keeping.every_steps
    return frozenset(step for step in older if every is None or step % every != 0)


def size_of(folder: Path) -> int:
    """Bytes of whatever lies there; what goes away meanwhile counts for nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def own_files(folder: Path) -> Ours | None:
    """What of a checkpoint, or of what is left of one, we wrote; None: nothing shows that it is ours.

    Its manifest lists it. Without one that can be read, its `state.json` says whose it is. What was being written or
    removed when its process was killed has a name that we give, and lies in a run's folder.
    """
    try:
        if folder.is_symlink() or not folder.is_dir():
            return None
        return Listed([*read_manifest(folder).files, MANIFEST])
    except Unknown:
        return None
    except Torn:
        pass
    if _ORPHAN.fullmatch(folder.name):
        return STAGED
    with suppress(Torn):
        state = read_state(folder)
        if isinstance(state.get("plan"), dict) and type(state.get("step")) is int:
            return Patterns(_CHECKPOINT, _FOLDERS)
    return None


def check_removable(folder: Path) -> Ours:
    """What of it is ours. NotOurs: something in it is somebody else's, or all of it."""
    names = own_files(folder)
    if names is None:
        raise NotOurs(folder, Message("runs.no-checkpoint-of-ours", folder=folder))
    check_ours(folder, names, Message("runs.stays-as-is", folder=folder))
    return names


def remove(folder: Path) -> None:
    """First out of sight, then away: nobody takes a half for a whole. NotOurs: nothing was touched."""
    check_removable(folder)
    gone = folder.with_name(f".{folder.name}{_GONE}")
    if os.path.lexists(gone):
        remove_orphan(gone)
    disk.rename(folder, gone)
    remove_orphan(gone)


def remove_orphan(path: Path) -> None:
    """What a killed process left. NotOurs: it is somebody else's, or something in it is, and it was not touched."""
    disk.remove_folder(path, check_removable(path), last=MANIFEST)  # whoever is killed on the way leaves the list


def orphans(run: Path) -> list[Path]:
    """What killed processes left half-done or half-removed. Only for whoever holds the run's lock."""
    place = run / CHECKPOINTS
    return sorted(each for each in place.iterdir() if _ORPHAN.fullmatch(each.name)) if place.is_dir() else []


# --- as a person asks about them -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The plan that a checkpoint was written under; None: not said."""

    engine: str | None = None
    world: int | None = None
    precision: str | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    folder: Path
    step: int
    bytes: int
    written: str | None = None
    maker: Maker | None = None
    problem: Said | None = None  # why it is not whole; None: it is, as far as it was looked at
    certain: bool = True
    """Whether nobody can use it; False: it may be whole for a newer version, or when the disk answers again."""
    verified: bool = False  # whether every byte was hashed again, and is what was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Goner:
    """Something that need not stay, and why."""

    path: Path
    bytes: int
    because: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    run: Path
    checkpoints: tuple[FoundCheckpoint, ...]  # the newest first
    orphans: tuple[Goner, ...]  # what processes left half-done that were killed

    @property
    def bytes(self) -> int:
        return sum(found.bytes for found in self.checkpoints) + sum(orphan.bytes for orphan in self.orphans)

    @property
    def broken(self) -> tuple[FoundCheckpoint, ...]:
        return tuple(found for found in self.checkpoints if found.problem is not None)


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
    found = []
    for folder in newest_first(run):
        one = FoundCheckpoint(folder=folder, step=step_of(folder) or 0, bytes=0)
        try:
            manifest = checked(folder)
            maker = _maker(read_state(folder))
            one = replace(one, bytes=manifest.bytes, written=manifest.written, maker=maker)
        except Torn as error:
            if not folder.exists():  # a run that lives has just removed it
                continue
            # With as much as can still be said of it.
            with suppress(Torn):
                one = replace(one, written=read_manifest(folder).written)
            with suppress(Torn):
                one = replace(one, maker=_maker(read_state(folder)))
            certain = not isinstance(error, Unknown)
            one = replace(one, bytes=size_of(folder), problem=error.said, certain=certain)
        found.append(one)
    left = Message("runs.left-by-killed")
    half = tuple(Goner(path=path, bytes=size_of(path), because=left) for path in orphans(run))
    return Inventory(run=run, checkpoints=tuple(found), orphans=half)


def _maker(state: Mapping[str, Any]) -> Maker:
    plan = block_in(state, "plan")
    words = {name: plan.get(name) for name in ("engine", "precision", "method")}
    said = {name: word for name, word in words.items() if isinstance(word, str) and word.isprintable()}
    return Maker(world=whole(plan.get("world")), **said)


def verified(there: Inventory, progress: Callable[[FoundCheckpoint, int], None]) -> Inventory:
    """The same, with every byte of what seemed whole hashed again; `progress` hears of each and of its bytes done."""
    judged = []
    for found in there.checkpoints:
        if found.problem is not None:
            judged.append(found)
            continue
        try:
            verify(found.folder, spans_of(read_manifest(found.folder)), partial(progress, found))
            judged.append(replace(found, verified=True))
        except Torn as error:
            if found.folder.exists():
                judged.append(replace(found, problem=error.said, certain=not isinstance(error, Unknown)))
    return replace(there, checkpoints=tuple(judged))


def keeping_of(run: Path) -> Keeping:
    """What the run itself was told to keep; two, where that cannot be found out."""
    tree = find_json(run / "plan" / WORKER_FILE)  # of any version: what it keeps is not ours to prune
    saving = block_in(tree, "saving") if isinstance(tree, dict) else {}
    last, every = whole(saving.get("keep_last", saving.get("keep"))) or 0, whole(saving.get("keep_every")) or 0
    return Keeping(last=last if last >= 1 else Saving().keep_last, every_steps=every if every >= 1 else None)


def goners(there: Inventory, keeping: Keeping) -> tuple[Goner, ...]:
    """What may go, in the order in which it does: what nobody can use first, and of the others the oldest."""
    complete = [found for found in there.checkpoints if found.problem is None]
    spare = surplus((found.step for found in complete), keeping)
    older = Message("runs.older-than", count=keeping.last) if keeping.last > 1 else Message("runs.older-than-one")
    return (
        *there.orphans,
        *(
            Goner(path=found.folder, bytes=found.bytes, because=Message("runs.not-whole", problem=found.problem))
            for found in there.broken
            if found.certain
        ),
        *(
            Goner(path=found.folder, bytes=found.bytes, because=older)
            for found in reversed(complete)
            if found.step in spare
        ),
    )


def check_goners(gone: Iterable[Goner]) -> None:
    """NotOurs: one of them holds what we did not write, and none of them should go before that is settled."""
    for goner in gone:
        check_removable(goner.path)


def remove_goner(goner: Goner) -> None:
    """Only for whoever holds the run's lock."""
    try:
        (remove_orphan if step_of(goner.path) is None else remove)(goner.path)
    except OSError as error:
        raise ConfigError(Message("runs.cannot-be-removed", path=goner.path, why=say_why(error))) from None


# --- those of DeepSpeed --------------------------------------------------------------------------


def deepspeed_checkpoint(folder: Path) -> Path | None:
    """The folder, where it is such a checkpoint or has one in it; else None."""
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*_model_states.pt")):
        return folder
    inside = (folder / "latest").is_file() or (folder / "zero_to_fp32.py").is_file()
    return folder if inside and any(folder.glob("*/*_states.pt")) else None


def states_folder(folder: Path) -> Path | None:
    """Where the files of the newest checkpoint in `folder` are: the one that `latest` names, else the last step's."""
    if any(folder.glob("*_states.pt")):
        return folder
    if (folder / "latest").is_file():
        with (folder / "latest").open(encoding="utf-8", errors="replace") as file:
            named = folder / Path(file.read(256).strip()).name
        if named != folder and any(named.glob("*_states.pt")):
            return named
    steps = {}
    for path in folder.glob("global_step*"):
        if path.is_dir() and any(path.glob("*_states.pt")):
            digits = path.name.removeprefix("global_step")
            steps[path] = int(digits) if digits.isdigit() else -1
    return max(steps, key=steps.__getitem__, default=None)
