"""Whose file is it? Told by its keys.

A key that only one program has weighs most. One that is merely misspelt still counts a little, so that a file with
nothing but `zero_optimisation` in it finds its way to the rule that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from tightfit.formats.accelerate.keys import KEYS as ACCELERATE_KEYS
from tightfit.formats.deepspeed.keys import KEYS as DEEPSPEED_BLOCKS
from tightfit.formats.deepspeed.keys import REMOVED
from tightfit.formats.dialects import dialect_of, is_trls
from tightfit.formats.document import Document
from tightfit.formats.finding import Kind
from tightfit.formats.llamafactory.keys import OWN_KEYS
from tightfit.inputs.spelling import listed, nearest
from tightfit.job import Job
from tightfit.job.training_arguments import OLDER_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from tightfit.types import ConfigError

_TELLS = 4
"""What a key weighs that only one program has; one that several have weighs 1."""
_MOST_FOREIGN = 4
"""So many keys may be slips or a script's own, whatever their share."""
KINDS: tuple[Kind, ...] = ("deepspeed", "accelerate", "llamafactory", "huggingface", "job")

_ARGUMENTS = TRAINING_ARGUMENTS | OLDER_TRAINING_ARGUMENTS
KNOWN: dict[Kind, frozenset[str]] = {
    "deepspeed": DEEPSPEED_BLOCKS[""] | REMOVED,
    "accelerate": ACCELERATE_KEYS,
    "llamafactory": OWN_KEYS | _ARGUMENTS,
    "huggingface": _ARGUMENTS,
    "job": frozenset(field.name for field in fields(Job)) | {"training", "model_type", "num_gpus", "preset"},
}
_TELLING: dict[Kind, tuple[str, ...]] = {
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "accelerate": ("distributed_type", "compute_environment", "deepspeed_config", "fsdp_config"),
    "llamafactory": ("finetuning_type", "template", "cutoff_len", "stage", "dataset", "model_name_or_path"),
    "huggingface": ("output_dir", "per_device_train_batch_size"),
    "job": ("hardware", "effective_batch", "levers", "limits", "training", "saving", "preset"),
}


def kind_of(document: Document) -> Kind:
    """The kind of a file, or an error that says how to name it."""
    if is_workers(document.values):
        return "job"
    if (dialect := dialect_of(document.values)) is not None:
        raise ConfigError(
            f"{document.path.name} is a config of {dialect}, which lint does not know: it checks DeepSpeed's, "
            "accelerate's, LLaMA-Factory's, TrainingArguments and job files (--kind takes it for one of these)"
        )
    if is_trls(document.values):
        return "huggingface"
    scores = {kind: _score(document.values, kind) for kind in KINDS}
    best = max(scores.values())
    likely = [kind for kind in KINDS if scores[kind] == best]
    # Every field of TrainingArguments is a key of LLaMA-Factory's too: only a key of its own makes it one.
    if likely == ["llamafactory", "huggingface"]:
        likely = ["huggingface"]
    if best < 1 or len(likely) > 1:
        raise ConfigError(
            f"the keys of {document.path.name} do not tell whose config it is: add --kind {listed(KINDS)}"
        )
    foreign = [key for key in document.values if not _weight(key, likely[0], KNOWN[likely[0]])]
    mostly = len(foreign) >= _MOST_FOREIGN and 2 * len(foreign) > len(document.values)
    barely = bool(foreign) and best < _TELLS and likely[0] in ("llamafactory", "huggingface")
    if mostly or barely:
        raise ConfigError(
            f"{document.path.name} is of no config that lint knows, by its keys {', '.join(foreign[:3])}: add --kind "
            f"{listed(KINDS)} if it is one all the same"
        )
    return likely[0]


def is_workers(values: Mapping[str, Any]) -> bool:
    """Whether this is the config that we write for our own worker."""
    return {"schema", "levers", "buckets", "predicted"} <= set(values)


def _score(values: Mapping[str, Any], kind: Kind) -> float:
    known = KNOWN[kind]
    return sum(_weight(key, kind, known) for key in values) + (kind == "job" and "model" in values)


def _weight(key: str, kind: Kind, known: Iterable[str]) -> float:
    if key in _TELLING[kind]:
        return _TELLS
    if key in known:
        return 1
    return 1 if nearest(key, _TELLING[kind], cutoff=0.85) else 0
