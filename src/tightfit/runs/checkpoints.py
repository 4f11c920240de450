"""Checkpoints as they lie on disk: their names, the manifest, and whether one is whole.

    RUN/checkpoints/step-00000500/
        model.safetensors …  config.json …     a Hugging Face folder; for LoRA adapter_model.safetensors …
        optimizer/                             fp32 master weights and moments, as safetensors
        state.json                             step, data position, schedule, loss scale, job, plan
        manifest.json                          every file with its size and hashes, written last

A folder without a manifest that agrees with its files is no checkpoint. The manifest carries a hash of itself. A file's
bytes are hashed in the spans in which ranks wrote them, so nobody had to read the file again; together they cover it.

Where nodes have disks of their own, each writes a part:

    RUN/checkpoints/step-00000500.part-1-of-2/
        config.json …  state.json              as in a whole one
        ranges/rank-3.bin                      what a rank wrote of the large files, range after range
        manifest.json                          also which ranges of which files, and whose the other parts are

Parts of one checkpoint have one id, drawn for it, and all that is known of them stands in their manifests: which node
holds one now, and under which number, matters to nobody. A range that several nodes hold is written by two of them, so
that the parts may be enough though one is lost. Laid beside each other in one folder they can be resumed, or put
together into a whole one (`put_together`).

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from tightfit.messages import Listing, Message, Said, say_why
from tightfit.owned import Listed, NotOurs, Ours, Patterns, check_ours
from tightfit.runs import disk
from tightfit.types import ConfigError, TightfitError

CHECKPOINTS = "checkpoints"
MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer"
SCHEMA, PART_SCHEMA = 1, 2  # of a whole one's manifest, and of a part's, which older versions know not to read
RANGES = "ranges"
READ_BYTES = 8 * 2**20
_MOST_MANIFEST_BYTES = 2**28  # a model of a trillion parameters has some million spans

_PART = r"\.part-\d+-of-\d+"
_NAME = re.compile(rf"step-(\d{{8,}})({_PART})?")
_STAGING, _OLD, _GONE = ".partial", ".old", ".gone"
_ORPHAN = re.compile(rf"\.step-\d{{8,}}({_PART})?\.(partial|old|gone)")  # the names of what a killed process may leave

_BESIDE = (  # the small files that Hugging Face's libraries write beside weights
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|entity_vocab|emoji|chat_template|processor_config|preprocessor_config)\.json|(merges|vocab)\.txt"
    r"|chat_template\.jinja|additional_chat_templates/[\w.-]+\.jinja|bpe\.codes|vocab\.bpe|(source|target)\.spm"
    r"|(tokenizer|spiece|spm|sentencepiece\.bpe|tiktoken)\.model|\w+\.tiktoken"
)
_CUT = r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
MODEL = rf"{_BESIDE}|(model|adapter_model){_CUT}"
_CHECKPOINT = rf"{MODEL}|{OPTIMIZER}/\w+{_CUT}|{RANGES}/rank-\d+\.bin|{re.escape(MANIFEST)}|{re.escape(STATE)}"
_FOLDERS = f"additional_chat_templates|{OPTIMIZER}|{RANGES}"
_CUT_UP = re.compile(rf"({OPTIMIZER}/\w+|model|adapter_model)(-\d{{5}}-of-\d{{5}})?\.safetensors")
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


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a file of the whole checkpoint."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a node's part is a part of."""

    id: str  # the same in all parts of a checkpoint
    number: int  # from 1
    hosts: tuple[str, ...]  # who wrote the parts, in the order of their numbers
    sizes: Mapping[str, int]  # of the files that are cut up between parts
    ranges: Mapping[str, tuple[Extent, ...]]  # what lies end to end in each file of RANGES

    def tree(self) -> dict[str, Any]:
        ranges = {name: [[one.file, one.start, one.stop] for one in held] for name, held in sorted(self.ranges.items())}
        own = {"id": self.id, "number": self.number, "hosts": list(self.hosts)}
        return {**own, "sizes": dict(sorted(self.sizes.items())), "ranges": ranges}

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Part:
        """ValueError: nobody could have written that."""
        part = cls(
            id=str(tree["id"]),
            number=int(tree["number"]),
            hosts=tuple(map(str, tree["hosts"])),
            sizes={str(name): int(size) for name, size in tree["sizes"].items()},
            ranges={
                str(name): tuple(Extent(str(file), int(start), int(stop)) for file, start, stop in held)
                for name, held in tree["ranges"].items()
            },
        )
        extents = [one for held in part.ranges.values() for one in held]
        inside = all(0 <= one.start <= one.stop <= part.sizes.get(one.file, -1) for one in extents)
        if not (inside and 1 <= part.number <= len(part.hosts) and all(map(_CUT_UP.fullmatch, part.sizes))):
            raise ValueError("a part that holds what it cannot")
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    step: int
    written: str  # when, as a person reads it
    files: Mapping[str, StoredFile]  # by the name within the folder
    part: Part | None = None  # None: it is a whole one

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        files = {
            name: {"bytes": file.bytes, "spans": [[span.start, span.stop, span.digest] for span in file.spans]}
            for name, file in sorted(self.files.items())
        }
        tree = {"schema": SCHEMA, "step": self.step, "written": self.written, "hash": "xxh3_128", "files": files}
        if self.part is not None:
            tree |= {"schema": PART_SCHEMA, "part": self.part.tree()}
        return json.dumps({**tree, "itself": _own_digest(tree)}, indent=1) + "\n"


def digest(data: bytes | memoryview) -> str:
    """Against torn writes and flipped bits, not against people: so a fast one."""
    return xxhash.xxh3_128_hexdigest(data)


def _own_digest(tree: Mapping[str, Any]) -> str:
    return digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


def folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def part_folder_of(run: Path, step: int, number: int, count: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}.part-{number}-of-{count}"


def step_of(folder: Path) -> int | None:
    """None: the name is not that of a checkpoint, or of a part of one."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def is_part(folder: Path) -> bool:
    """By its name."""
    found = _NAME.fullmatch(folder.name)
    return found is not None and found[2] is not None


def newest_first(run: Path) -> list[Path]:
    """What looks like a checkpoint by its name, or a part of one, whole or not."""
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
    return manifest_of(tree)


def manifest_of(tree: Any) -> Manifest:
    """The manifest that a file says, or that another node has sent."""
    if not isinstance(tree, dict) or tree.pop("itself", None) != _own_digest(tree):
        raise Torn(Message("runs.its-changed", name=MANIFEST))
    if tree.get("schema") not in (SCHEMA, PART_SCHEMA):
        known = Listing([str(SCHEMA), str(PART_SCHEMA)], "and")
        raise Unknown(Message("runs.other-schema", found=tree.get("schema"), known=known))
    try:
        files = {
            name: StoredFile(int(one["bytes"]), tuple(Span(int(a), int(b), str(c)) for a, b, c in one["spans"]))
            for name, one in tree["files"].items()
        }
        part = Part.read(tree["part"]) if tree["schema"] == PART_SCHEMA else None
        return Manifest(step=int(tree["step"]), written=str(tree["written"]), files=files, part=part)
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
    for name, held in (manifest.part.ranges if manifest.part is not None else {}).items():
        if name not in manifest.files or sum(one.stop - one.start for one in held) != manifest.files[name].bytes:
            raise Torn(Message("runs.its-no-manifest", name=MANIFEST))
    return manifest


def covered(file: StoredFile) -> bool:
    """Whether every byte is in a span: what is in none could change without anybody's notice."""
    return _reach((span.start, span.stop) for span in file.spans) == file.bytes


def _reach(ranges: Iterable[tuple[int, int]]) -> int:
    """How far they cover everything from the first byte on."""
    reached = 0
    for start, stop in sorted(ranges):
        if start > reached:
            break
        reached = max(reached, stop)
    return reached


def find_lacking(parts: Collection[Part]) -> tuple[int, ...]:
    """Of parts of one checkpoint: the numbers of those that are wanted beside them; none: these hold every byte."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        for held in part.ranges.values():
            for one in held:
                ranges.setdefault(one.file, []).append((one.start, one.stop))
    first = next(iter(parts))
    if all(_reach(ranges.get(name, [])) == size for name, size in first.sizes.items()):
        return ()
    missing = {*range(1, len(first.hosts) + 1)} - {part.number for part in parts}
    if not missing:
        raise Torn(Message("runs.parts-too-few"))
    return tuple(sorted(missing))


def name_part(part: Part, number: int) -> Message:
    """`part 2, of host beta`"""
    return Message("runs.part-of-host", number=number, host=part.hosts[number - 1])


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
    older = sorted(set(steps), reverse=True)[keeping.last :]
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
    part: Part | None = None  # None: it is a whole one
    lacking: tuple[int, ...] = ()  # the numbers of parts that are wanted beside those that lie here


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
            one = replace(one, bytes=manifest.bytes, written=manifest.written, maker=maker, part=manifest.part)
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
    return Inventory(run=run, checkpoints=tuple(_look_beside(found)), orphans=half)


def _look_beside(found: Sequence[FoundCheckpoint]) -> Iterator[FoundCheckpoint]:
    """With what parts lack of the others."""
    together: dict[str, list[Part]] = {}
    for one in found:
        if one.part is not None and one.problem is None:
            together.setdefault(one.part.id, []).append(one.part)
    for one in found:
        if one.part is None:
            yield one
            continue
        try:
            yield replace(one, lacking=find_lacking(together.get(one.part.id) or [one.part]))
        except Torn as error:
            yield replace(one, problem=error.said)


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
    whole = {found.step for found in there.checkpoints if found.problem is None and found.part is None}
    beside = [found for found in there.checkpoints if found.part is not None and found.step in whole]
    complete = [found for found in there.checkpoints if found.problem is None and found not in beside]
    spare = surplus((found.step for found in complete), keeping)
    older = Message("runs.older-than", count=keeping.last) if keeping.last > 1 else Message("runs.older-than-one")
    return (
        *there.orphans,
        *(
            Goner(path=found.folder, bytes=found.bytes, because=Message("runs.not-whole", problem=found.problem))
            for found in there.broken
            if found.certain and found not in beside
        ),
        *(Goner(path=found.folder, bytes=found.bytes, because=Message("runs.whole-beside")) for found in beside),
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


# --- parts into a whole one ----------------------------------------------------------------------


def put_together(run: Path, there: Inventory, progress: Callable[[int, int], None]) -> Path:
    """A whole checkpoint from the newest parts that lie in a run's folder and are enough; `progress` hears of bytes
    done, and of all. Only for whoever holds the run's lock. ConfigError: there is none, or no room for it."""
    parts = [found for found in there.checkpoints if found.part is not None and found.problem is None]
    if not parts:
        raise ConfigError(Message("runs.no-parts", run=run))
    enough = next((found for found in parts if not found.lacking), None)
    if enough is None or enough.part is None:
        newest = parts[0]
        assert newest.part is not None
        wanted = Listing([name_part(newest.part, number) for number in newest.lacking], "and")
        where = {"step": newest.step, "wanted": wanted, "place": run / CHECKPOINTS}
        raise ConfigError(Message("runs.parts-wanted", **where))
    chosen = [found for found in parts if found.part is not None and found.part.id == enough.part.id]
    folder = folder_of(run, enough.step)
    if folder.exists():
        raise ConfigError(Message("runs.whole-there", folder=folder))
    total = sum(enough.part.sizes.values())
    if (free := disk.room(run / CHECKPOINTS)) < total:
        raise ConfigError(Message("runs.needs-room", folder=run, left=free / 1e6, need=total / 1e6))
    staging = staging_of(folder)
    if os.path.lexists(staging):
        remove_orphan(staging)
    disk.make_new_folder(staging)
    try:
        _copy_parts(chosen, staging, partial(progress, total))
        disk.rename(staging, folder)
    except BaseException as error:
        with suppress(OSError, NotOurs):
            disk.remove_folder(staging, STAGED)
        if isinstance(error, OSError):
            raise ConfigError(Message("runs.cannot-write", path=folder, why=say_why(error))) from None
        raise
    disk.sync_path(folder.parent)
    return folder


def _copy_parts(chosen: Sequence[FoundCheckpoint], staging: Path, progress: Callable[[int], None]) -> None:
    """Every byte is held against its hash on the way."""
    files: dict[str, StoredFile] = {}
    spans: dict[str, list[Span]] = {}
    copied, done = set[Extent](), 0
    for number, found in enumerate(chosen):
        manifest = checked(found.folder)
        assert manifest.part is not None
        verify(found.folder, spans_of(manifest))
        if number == 0:
            for name, file in manifest.files.items():
                if name not in manifest.part.ranges:
                    disk.make_folder((staging / name).parent)
                    disk.write_bytes(staging / name, (found.folder / name).read_bytes())
                    files[name] = file
            for name, size in manifest.part.sizes.items():
                disk.make_folder((staging / name).parent)
                os.close(disk.create(staging / name, size))
                spans[name] = []
        for name, held in manifest.part.ranges.items():
            with open_regular(found.folder / name) as source:
                for one in held:
                    if one in copied:  # another node wrote it too
                        source.seek(one.stop - one.start, os.SEEK_CUR)
                        continue
                    copied.add(one)
                    target, state = disk.open_to_write(staging / one.file), xxhash.xxh3_128()
                    try:
                        for at in range(one.start, one.stop, READ_BYTES):
                            data = source.read(min(READ_BYTES, one.stop - at))
                            state.update(data)
                            disk.put(target, memoryview(data), at)
                            done += len(data)
                            progress(done)
                    finally:
                        os.close(target)
                    spans[one.file].append(Span(one.start, one.stop, state.hexdigest()))
    for name, of_one in spans.items():
        disk.sync_path(staging / name)
        files[name] = StoredFile((staging / name).stat().st_size, tuple(sorted(of_one, key=lambda span: span.start)))
    manifest = read_manifest(chosen[0].folder)
    disk.write_text(staging / MANIFEST, Manifest(step=manifest.step, written=manifest.written, files=files).text())
    disk.sync_path(staging)


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
