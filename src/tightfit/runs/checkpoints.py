"""Checkpoints as they lie on disk: their names, the manifest, and whether one is whole.

    RUN/checkpoints/step-00000500/
        model.safetensors …  config.json …     a Hugging Face folder; for LoRA adapter_model.safetensors …
        optimizer/                             fp32 master weights and moments, as safetensors
        state.json                             step, data position, schedule, loss scale, job, plan
        manifest.json                          every file with its size and hashes, written last

A folder without a manifest that agrees with its files is no checkpoint. The manifest carries a hash of itself. A file's
bytes are hashed in the spans in which ranks wrote them, so nobody had to read the file again; together they cover it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tightfit.inputs.records import read_json
from tightfit.inputs.spelling import open_regular
from tightfit.messages import Message, Said
from tightfit.owned import Listed, NotOurs, Ours, Patterns, check_ours
from tightfit.runs import disk
from tightfit.types import TightfitError

CHECKPOINTS = "checkpoints"
MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer"
SCHEMA = 1
READ_BYTES = 8 * 2**20
_MOST_MANIFEST_BYTES = 2**28
"""A model of a trillion parameters has some million spans."""

_NAME = re.compile(r"step-(\d{8,})")
_STAGING, _OLD, _GONE = ".partial", ".old", ".gone"
_ORPHAN = re.compile(r"\.step-\d{8,}\.(partial|old|gone)")
"""The names of what a killed process may leave."""

_BESIDE = (
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|entity_vocab|emoji|chat_template|processor_config|preprocessor_config)\.json|(merges|vocab)\.txt"
    r"|chat_template\.jinja|additional_chat_templates/[\w.-]+\.jinja|bpe\.codes|vocab\.bpe|(source|target)\.spm"
    r"|(tokenizer|spiece|spm|sentencepiece\.bpe|tiktoken)\.model|\w+\.tiktoken"
)
"""The small files that Hugging Face's libraries write beside weights."""
_CUT = r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
MODEL = rf"{_BESIDE}|(model|adapter_model){_CUT}"
_CHECKPOINT = rf"{MODEL}|{OPTIMIZER}/\w+{_CUT}|{re.escape(MANIFEST)}|{re.escape(STATE)}"
_FOLDERS = f"additional_chat_templates|{OPTIMIZER}"
HALF_WRITTEN = rf"{_CHECKPOINT}|\.rank-\d+-(began|spans|done)(-\d+)?\.json"
MODEL_FILES: Ours = Patterns(MODEL, _FOLDERS)
STAGED: Ours = Patterns(HALF_WRITTEN, _FOLDERS)
"""What lies in a folder that is being written, or is being removed."""


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
    written: str
    """When, as a person reads it."""
    files: Mapping[str, StoredFile]
    """By the name within the folder."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """The file's contents."""
        tree = self._tree()
        return json.dumps({**tree, "itself": _own_digest(tree)}, indent=1) + "\n"

    def _tree(self) -> dict[str, Any]:
        files = {
            name: {"bytes": file.bytes, "spans": [[span.start, span.stop, span.digest] for span in file.spans]}
            for name, file in sorted(self.files.items())
        }
        return {"schema": SCHEMA, "step": self.step, "written": self.written, "hash": "xxh3_128", "files": files}


def digest(data: bytes | memoryview) -> str:
    """Against torn writes and flipped bits, not against people: so a fast one."""
    return xxhash.xxh3_128_hexdigest(data)


def _own_digest(tree: Mapping[str, Any]) -> str:
    return digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


# --- names ---------------------------------------------------------------------------------------


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
    """The manifest, or Torn."""
    try:
        tree = read_json(folder / MANIFEST, most_bytes=_MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise Torn(Message("runs.not-finished", name=MANIFEST)) from None
    except OSError as error:
        raise Unknown(Message("runs.its-cannot-read-why", name=MANIFEST, why=_why(error))) from None
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
            raise Unknown(Message("runs.file-not-seen", name=name, why=_why(error))) from None
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
        if _hash_span(folder / name, span, progress) != span.digest:
            raise Torn(Message("runs.damaged-between", name=name, start=span.start, stop=span.stop))


def _hash_span(path: Path, span: Span, progress: Callable[[int], None]) -> str:
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
        raise Unknown(Message("runs.file-not-read", name=path.name, why=_why(error))) from None
    return state.hexdigest()


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json`, or Torn."""
    try:
        tree = read_json(folder / STATE, finite=True)
    except FileNotFoundError:
        raise Torn(Message("runs.its-missing", name=STATE)) from None
    except OSError as error:
        raise Unknown(Message("runs.its-cannot-read-why", name=STATE, why=_why(error))) from None
    except ValueError:
        raise Torn(Message("runs.its-cannot-read", name=STATE)) from None
    if not isinstance(tree, dict):
        raise Torn(Message("runs.its-cannot-read", name=STATE))
    _check_numbers(tree, step_of(folder))
    return tree


def _check_numbers(state: Mapping[str, Any], named: int | None) -> None:
    """Torn: a number that the folder's name does not say, that no training has, or that another one contradicts."""
    step = state.get("step")
    if type(step) is not int or step < 0 or (named is not None and step != named):
        if named is None:
            raise Torn(Message("runs.its-step", name=STATE, step=repr(step)))
        raise Torn(Message("runs.its-step-and-name", name=STATE, step=repr(step), named=named))
    job, optimizer = state.get("job"), state.get("optimizer")
    batch = job.get("effective_batch") if isinstance(job, dict) else None
    made = optimizer.get("steps") if isinstance(optimizer, dict) else None
    for key, value, most in (("samples", state.get("samples"), None), ("optimizer.steps", made, step)):
        if value is not None and (type(value) is not int or value < 0 or (most is not None and value > most)):
            raise Torn(Message("runs.its-number", name=STATE, key=key, value=repr(value), step=step))
    if type(batch) is int and state.get("samples") not in (None, step * batch):
        samples = state["samples"]
        raise Torn(Message("runs.its-samples", name=STATE, samples=samples, steps=step, batch=batch, all=step * batch))
    epoch = state.get("epoch")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float) or epoch < 0):
        raise Torn(Message("runs.its-epoch", name=STATE, epoch=repr(epoch)))


# --- which go ------------------------------------------------------------------------------------


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
    whole = []
    for folder in newest_first(run):
        if (step_of(folder) or 0) > step:
            continue
        try:
            whole.append((checked(folder).step, folder))
        except Torn:
            continue
    spare = surplus([step for step, _ in whole], keeping)
    return [folder for step, folder in whole if step in spare]


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
    if _is_orphan(folder):
        return STAGED
    with suppress(Torn):
        state = read_state(folder)
        if isinstance(state.get("plan"), dict) and type(state.get("step")) is int:
            return Patterns(_CHECKPOINT, _FOLDERS)
    return None


def check_removable(folder: Path) -> None:
    """NotOurs: something in it is somebody else's, or all of it."""
    names = own_files(folder)
    if names is None:
        raise NotOurs(folder, Message("runs.no-checkpoint-of-ours", folder=folder))
    check_ours(folder, names, Message("runs.stays-as-is", folder=folder))


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
    check_removable(path)
    names = own_files(path)
    assert names is not None
    disk.remove_folder(path, names, last=MANIFEST)  # whoever is killed on the way leaves the list


def orphans(run: Path) -> list[Path]:
    """What killed processes left half-done or half-removed. Only for whoever holds the run's lock."""
    place = run / CHECKPOINTS
    if not place.is_dir():
        return []
    return sorted(each for each in place.iterdir() if _is_orphan(each))


def _is_orphan(path: Path) -> bool:
    return _ORPHAN.fullmatch(path.name) is not None
