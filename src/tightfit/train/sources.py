"""Where weights come from: one interface, read in ranges, never a whole copy.

    source = Scratch(model, seed)                                   drawn by us
    source = open_weights(find_weights("org/name"), model, cache)   read from safetensors

`model` is on the meta device: it has names and shapes and no memory. An engine then asks for the ranges of its
own shards.

A checkpoint has the names of the program that wrote it. Four things stand between them and the model's own:

- prefixes: a base model was saved without `model.`, or a language model inside a multimodal one;
- old spellings, such as mamba-ssm's `backbone.embedding`, and those that transformers lists in its conversions;
- experts: transformers 5 keeps the experts of a layer in one tensor where checkpoints have one for each. In
  row-major order the one tensor is the others laid end to end (for each expert its gate, then its up
  projection), so it can be read from them without being put together first;
- anything else that transformers converts (transposed, interleaved) cannot be read in ranges. That is reported,
  and `convert` lets transformers load it once.

transformers' own rename function is asked first, for it is what from_pretrained does.

A Hugging Face folder of ours has the names of the checkpoints that are out there, and so the experts of a layer are
many tensors in it. A piece of the one tensor is cut where they meet, and other programs can read the folder too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from tightfit.messages import Message
from tightfit.owned import flock
from tightfit.train.safetensors_files import DTYPES, Files, Stored, overlaps, tensors_of
from tightfit.train.saved_model import Names, TensorPiece, write_model
from tightfit.train.sources_hub import Progress, silent
from tightfit.types import ModelError

PREFIXES = ("model.", "backbone.", "transformer.", "gpt_neox.", "language_model.", "model.language_model.")

SPELLINGS = (
    ("backbone.embeddings.", "backbone.embedding."),
    ("lm_head.", "embed_out."),
    (".norm.weight", ".norm.gamma"),
)
"""The model's spelling, and one that checkpoints have."""


class WeightSource(Protocol):
    """Anything that weights can be read from, a range at a time."""

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the row-major tensor `name`: flat, on the CPU, in the stored dtype."""


class Safetensors:
    """The weights of a folder. `parts`: for each name the stored tensors that lie end to end in it.

    Without `parts` the names are those of the files.
    """

    def __init__(
        self, folder: Path, parts: Mapping[str, tuple[str, ...]] | None = None, files: Files | None = None
    ) -> None:
        self.folder = folder
        self._files = files or Files()
        self.stored: Mapping[str, Stored] = tensors_of(folder, self._files)
        self._parts = {name: (name,) for name in self.stored} if parts is None else dict(parts)

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        parts = self._find_parts(name)
        sizes = [part.numel for part in parts]
        found, wanted = sum(sizes), prod(shape)
        if not 0 <= start <= stop <= found or found != wanted:
            said = {"found": found, "wanted": wanted, "shape": list(shape)}
            raise ModelError(Message("train.other-size", name=name, folder=self.folder, **said))
        places = list(overlaps(sizes, start, stop)) or [(0, 0, 0)]
        pieces = [self._files.read(parts[number], low, high) for number, low, high in places]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def dtype(self, name: str) -> torch.dtype:
        """In which dtype `name` is stored."""
        return DTYPES[self._find_parts(name)[0].dtype]

    def close(self) -> None:
        self._files.close()

    def _find_parts(self, name: str) -> list[Stored]:
        if name not in self._parts:
            raise ModelError(Message("train.no-such-tensor", folder=self.folder, name=name))
        return [self.stored[key] for key in self._parts[name]]


def open_weights(
    folder: Path,
    model: torch.nn.Module,
    cache: Path | None = None,
    *,
    progress: Progress = silent,
    files: Files | None = None,
) -> Safetensors:
    """The weights of `folder` under the names of `model`; what only transformers can convert goes through `cache`.
    `files`: where they are not plain files."""
    stored = tensors_of(folder, files)
    for name, one in stored.items():
        if one.dtype not in DTYPES:
            raise ModelError(Message("train.weights-quantised", folder=folder, name=name, dtype=one.dtype))
    named = map_names(model, stored)
    if named.needs_conversion:
        if cache is None:
            raise ModelError(Message("train.needs-conversion", name=named.needs_conversion[0], folder=folder))
        folder = convert(folder, type(model), cache, progress)
        stored = tensors_of(folder)
        named = map_names(model, stored)
    if named.missing:
        more = Message("train.and-more", count=len(named.missing) - 1) if len(named.missing) > 1 else ""
        raise ModelError(
            Message("train.weights-lack", folder=folder, name=named.missing[0], more=more, model=type(model).__name__)
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if problem := wrong_shape(name, tuple(tensor.shape), named.parts[name], stored):
            raise ModelError(Message("train.weights-of-another-model", problem=problem, folder=folder))
    return Safetensors(folder, named.parts, files)


def convert(folder: Path, model_class: type[torch.nn.Module], cache: Path, progress: Progress) -> Path:
    """A folder in `cache` with the weights of `folder` under the names of `model_class`.

    The one place where a whole copy of a model is made, on the host, by from_pretrained. It is made once for a folder:
    later starts, and the other ranks of this one, read what lies in the cache.
    """
    # Changes with the files, the class and transformers.
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))]
    told = repr((str(folder.resolve()), files, model_class.__name__, version("transformers")))
    target = cache / f"{folder.name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    lock = os.open(cache / f"{target.name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        flock(lock)  # the first rank converts, the others wait for it
        if not target.is_dir():
            progress(Message("train.converting", name=folder.name), 0, 1)
            try:
                loaded = model_class.from_pretrained(folder, dtype="auto", use_safetensors=True)  # type: ignore[attr-defined]
            except Exception as error:  # transformers has many ways to fail; the user reads one sentence
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise ModelError(Message("train.cannot-load", folder=folder, why=reason)) from error
            tensors = {name: tensor.detach() for name, tensor in loaded.named_parameters()}
            kept = set(loaded.state_dict())
            tensors |= {name: tensor for name, tensor in loaded.named_buffers() if name in kept}
            names = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            pieces = (TensorPiece(name, tuple(one.shape), 0, one.reshape(-1)) for name, one in tensors.items())
            write_model(target, pieces, names)
            progress(Message("train.converting", name=folder.name), 1, 1)
    finally:
        os.close(lock)
    return target


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """The answer: for each parameter the checkpoint's tensors that lie end to end in it."""

    parts: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()  # parameters that nothing in the checkpoint makes up
    needs_conversion: tuple[str, ...] = ()  # parameters that only transformers can make from what is there


@dataclass
class _Gathered:
    """What a converter of transformers wants to put into one parameter, by the pattern that matched."""

    converter: Any
    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def map_names(model: torch.nn.Module, stored: Mapping[str, Stored]) -> Named:
    """Map every parameter and persistent buffer of `model` (on the meta device) to the checkpoint's tensors."""
    wanted = dict(model.state_dict(keep_vars=True))
    plain, gathered = _as_transformers_does(model, stored, wanted)
    parts: dict[str, tuple[str, ...]] = {name: (key,) for name, key in plain.items()}
    converted = []
    for name, group in gathered.items():
        ends = _end_to_end(group)
        if ends is None or sum(stored[key].numel for key in ends) != wanted[name].numel():
            converted.append(name)
        else:
            parts[name] = ends
    for name in [name for name in wanted if name not in parts and name not in converted]:
        guess = next((key for key in _guess_spellings(name) if key in stored), None)
        if guess is not None:
            parts[name] = (guess,)
    owners: dict[int, list[str]] = defaultdict(list)  # all names of the same tensor: a tied head is the embedding
    for name, tensor in wanted.items():
        owners[id(tensor)].append(name)
    still = []
    for name in [name for name in wanted if name not in parts and name not in converted]:
        same = next((other for other in owners[id(wanted[name])] if other in parts), None)
        if same is not None:
            parts[name] = parts[same]
        elif not any(other in converted for other in owners[id(wanted[name])]):
            still.append(name)
    return Named(parts, tuple(still), tuple(converted))


def _as_transformers_does(
    model: torch.nn.Module, stored: Mapping[str, Stored], wanted: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, _Gathered]]:
    """Renamed keys, and what converters would gather; exact names where transformers has no conversions."""
    plain = {key: key for key in stored if key in wanted}
    try:
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # transformers 4: the names are the model's own
        return plain, {}
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    gathered: dict[str, _Gathered] = {}

    def number_parts(key: str) -> list[tuple[int, int, str]]:
        return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in key.split(".")]

    for key in sorted(stored, key=number_parts):  # expert 10 comes after expert 9
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted:
            continue
        same_shape = stored[key].shape == tuple(wanted[name].shape)
        # It transposes what has the wrong shape, and leaves the rest as it is.
        if pattern is None or (
            same_shape and all(getattr(step, "check_dims", False) for step in by_pattern[pattern].operations)
        ):
            plain[name] = key
        else:
            gathered.setdefault(name, _Gathered(by_pattern[pattern])).keys[pattern].append(key)
    return {name: key for name, key in plain.items() if name not in gathered}, gathered


def _end_to_end(group: _Gathered) -> tuple[str, ...] | None:
    """The keys in the order in which they lie in the fused tensor; None: they do not lie end to end."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in group.converter.operations]
    patterns = [pattern for pattern in group.converter.source_patterns if pattern in group.keys]
    lists = [group.keys[pattern] for pattern in patterns]
    if len({len(keys) for keys in lists}) != 1 or len(patterns) != len(group.converter.source_patterns):
        return None
    if steps == [("MergeModulelist", 0)] and len(lists) == 1:
        return tuple(lists[0])
    if steps == [("MergeModulelist", 0), ("Concatenate", 1)]:
        return tuple(key for of_one_expert in zip(*lists, strict=True) for key in of_one_expert)
    if steps == [("Concatenate", 0)] and all(len(keys) == 1 for keys in lists):
        return tuple(keys[0] for keys in lists)
    return None


def _guess_spellings(name: str) -> Iterator[str]:
    """How else a checkpoint may call this parameter, the likeliest first."""
    spellings = [name, *(name.replace(ours, theirs) for ours, theirs in SPELLINGS if ours in name)]
    for spelling in spellings:
        yield spelling
        bare = next((spelling.removeprefix(prefix) for prefix in PREFIXES if spelling.startswith(prefix)), spelling)
        yield bare
        for prefix in PREFIXES:
            yield prefix + bare
            yield prefix + spelling


def wrong_shape(
    name: str, shape: tuple[int, ...], keys: tuple[str, ...], stored: Mapping[str, Stored]
) -> Message | None:
    """What does not agree, in words; None: all is well."""
    if len(keys) == 1 and stored[keys[0]].shape != shape:
        # mamba-ssm and others leave out dimensions of size one; the elements lie the same.
        squeezed = [tuple(n for n in one if n != 1) for one in (stored[keys[0]].shape, shape)]
        if squeezed[0] != squeezed[1]:
            return Message("train.shapes-differ", name=name, shape=list(stored[keys[0]].shape), wanted=list(shape))
    if len(keys) > 1 and sum(stored[key].numel for key in keys) != prod(shape):
        return Message("train.sizes-differ", name=name, count=len(keys), shape=list(shape))
    return None


# --- names in files -------------------------------------------------------------------------------

Parts = Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]
"""For each parameter what it is saved as: name and shape of tensors that lie end to end in it."""


def own_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, tied ones once, by their first name."""
    state, first = model.state_dict(keep_vars=True), dict[int, str]()
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def name_parts(model: torch.nn.Module) -> Parts:
    """What each parameter and persistent buffer of `model` (on any device) is saved as; tied ones once."""
    own = own_tensors(model)
    as_is: dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
    as_is = {name: ((name, tuple(tensor.shape)),) for name, tensor in own.items()}
    try:
        revert = import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):  # transformers 4 saves its own names
        return as_is
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in own.items()}
    saved = {key: tuple(tensor.shape) for key, tensor in revert(model, empty).items()}
    if saved.keys() == own.keys():
        return as_is
    stored = {key: Stored(Path(key), "F32", shape, 0, 4 * prod(shape)) for key, shape in saved.items()}
    found = map_names(model, stored).parts
    return {
        name: tuple((key, saved[key]) for key in found[name]) if name in found else same for name, same in as_is.items()
    }


def names_of(parts: Parts, dtype: Callable[[str], torch.dtype]) -> Names:
    """What `write_model` wants to know; `dtype` says which a parameter shall have in the files."""
    return {key: (shape, dtype(name)) for name, of_one in parts.items() for key, shape in of_one}


def rename_pieces(pieces: Iterable[TensorPiece], parts: Parts) -> Iterator[TensorPiece]:
    """The same elements under the names of the files."""
    for piece in pieces:
        of_one, flat, done = parts[piece.name], piece.tensor.reshape(-1), 0
        sizes = (prod(shape) for _, shape in of_one)
        for number, low, high in overlaps(sizes, piece.start, piece.start + flat.numel()):
            key, shape = of_one[number]
            yield TensorPiece(key, shape, low, flat[done : done + high - low], piece.again)
            done += high - low


def adapter_name(name: str, adapter: str = "default") -> str:
    """A parameter of a PeftModel as PEFT's files call it: without the adapter's own name."""
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    return re.sub(
        rf"(\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.{re.escape(adapter)}(?=\.|$)", r"\1", name
    )
