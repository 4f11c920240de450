"""A config as a question to the memory model: whose file it is, which model it trains, on how many GPUs.

The model is looked for on this machine alone (a preset, an id that we know, a folder): diagnosing sends nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.desk.estimate import estimated
from tightfit.desk.request import read_request
from tightfit.formats.document import read_document
from tightfit.formats.recognise import recognise
from tightfit.job.known import KnownConfig
from tightfit.messages import Message
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.priced import Priced
from tightfit.types import ConfigError, UserError


def price_config(path: Path, known: KnownConfig, *, model: str | None, gpus: str | None) -> Priced:
    """What the training in a config takes; an error says what is missing to know it."""
    document = read_document(path)
    kind = recognise(document).name
    word = model or _model_in(document.values)
    if word is None and not isinstance(document.values.get("model"), dict) and "preset" not in document.values:
        raise ConfigError(Message("cli.does-say-model", name=path.name))
    if word is not None and not _is_here(word):
        raise ConfigError(Message("cli.model-machine-name", word=word))
    asked: dict[str, Any] = {"model": model, "gpus": gpus}
    if kind in ("job", "llamafactory"):
        asked["file"] = str(path)
    elif kind == "deepspeed":
        asked |= {"deepspeed": str(path), "model": word}
    else:
        asked |= {"model": word, **_flags(known)}
    return estimated(read_request({name: value for name, value in asked.items() if value is not None}))


def price_beside(path: Path, known: KnownConfig, *, model: str | None, gpus: str | None) -> Priced | None:
    """The same for one who asks about a log, and wants no complaint about what else could be known."""
    try:
        return price_config(path, known, model=model, gpus=gpus)
    except UserError:
        return None


def _model_in(values: Mapping[str, Any]) -> str | None:
    for key in ("model", "model_name_or_path", "model_id_or_path"):
        if isinstance(values.get(key), str):
            return str(values[key])
    return None


def _is_here(word: str) -> bool:
    name = word.strip()
    return name.lower() in PRESETS or os.path.exists(os.path.expanduser(name)) or find_checkpoint(name) is not None


def _flags(known: KnownConfig) -> dict[str, Any]:
    """What a trainer's own arguments say, in our words; what they do not say has our defaults."""
    attention = known.attention if known.attention in ("sdpa", "eager", "flash") else None
    return {
        "engine": None if known.stage is None else f"zero{known.stage}",
        "offload_optimizer": known.offload_optimizer,
        "offload_param": known.offload_param,
        "micro_batch": known.micro_batch,
        "accum": known.accumulation,
        "seq": known.sequence,
        "precision": known.precision,
        "method": known.method,
        "checkpointing": None if known.checkpointing is None else "full" if known.checkpointing else "none",
        "loss": known.loss,
        "attention": attention,
        "world": known.world,
    }
