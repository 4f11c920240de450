"""Which tensors of a checkpoint make up each parameter of a model.

A checkpoint has the names of the program that wrote it. Four things stand between them and the model's own:

- prefixes: a base model was saved without `model.`, or a language model inside a multimodal one;
- old spellings, such as mamba-ssm's `backbone.embedding`, and those that transformers lists in its conversions;
- experts: transformers 5 keeps the experts of a layer in one tensor where checkpoints have one for each. In
  row-major order the one tensor is the others laid end to end (for each expert its gate, then its up
  projection), so it can be read from them without being put together first;
- anything else that transformers converts (transposed, interleaved) cannot be read in ranges. That is reported,
  and `sources_convert` lets transformers load it once.

transformers' own rename function is asked first, for it is what from_pretrained does.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from tightfit.messages import Message
from tightfit.train.safetensors_files import Stored

PREFIXES = ("model.", "backbone.", "transformer.", "gpt_neox.", "language_model.", "model.language_model.")

SPELLINGS = (
    ("backbone.embeddings.", "backbone.embedding."),
    ("lm_head.", "embed_out."),
    (".norm.weight", ".norm.gamma"),
)
"""The model's spelling, and one that checkpoints have."""


@dataclass(frozen=True)
class Named:
    """The answer: for each parameter the checkpoint's tensors that lie end to end in it."""

    parts: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()
    """Parameters that nothing in the checkpoint makes up."""
    needs_conversion: tuple[str, ...] = ()
    """Parameters that only transformers can make from what is there."""


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
    owners = _owners(wanted)
    missing = []
    for name in wanted:
        if name in parts or name in converted:
            continue
        guess = next((key for key in _guesses(name) if key in stored), None)
        if guess is not None:
            parts[name] = (guess,)
        else:
            missing.append(name)
    still = []
    for name in missing:
        same = next((other for other in owners[name] if other in parts), None)
        if same is not None:
            parts[name] = parts[same]
        elif not any(other in converted for other in owners[name]):
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
    for key in sorted(stored, key=_natural):
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


def _guesses(name: str) -> Iterator[str]:
    """How else a checkpoint may call this parameter, the likeliest first."""
    spellings = [name, *(name.replace(ours, theirs) for ours, theirs in SPELLINGS if ours in name)]
    for spelling in spellings:
        yield spelling
        bare = next((spelling.removeprefix(prefix) for prefix in PREFIXES if spelling.startswith(prefix)), spelling)
        yield bare
        for prefix in PREFIXES:
            yield prefix + bare
            yield prefix + spelling


def _owners(wanted: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """For each name all names of the same tensor: a tied head is the embedding."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in wanted.items():
        names[id(tensor)].append(name)
    return {name: names[id(tensor)] for name, tensor in wanted.items()}


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Expert 10 comes after expert 9."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"\.", key)]


def wrong_shape(
    name: str, shape: tuple[int, ...], keys: tuple[str, ...], stored: Mapping[str, Stored]
) -> Message | None:
    """What does not agree, in words; None: all is well."""
    if len(keys) == 1 and stored[keys[0]].shape != shape:
        # mamba-ssm and others leave out dimensions of size one; the elements lie the same.
        squeezed = [tuple(n for n in one if n != 1) for one in (stored[keys[0]].shape, shape)]
        if squeezed[0] != squeezed[1]:
            return Message("train.shapes-differ", name=name, shape=list(stored[keys[0]].shape), wanted=list(shape))
    if len(keys) > 1 and sum(stored[key].numel for key in keys) != math.prod(shape):
        return Message("train.sizes-differ", name=name, count=len(keys), shape=list(shape))
    return None
