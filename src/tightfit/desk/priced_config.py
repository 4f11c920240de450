"""Somebody's config as a question to the memory model: whose file it is, which model it trains, on how many GPUs.

The model is looked for on this machine alone (a preset, an id that we know, a folder): diagnosing sends nothing.
"""

from __future__ import annotations

import os
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
from tightfit.types import ConfigError


def price_config(path: Path, known: KnownConfig, *, model: str | None, gpus: str | None) -> Priced:
    """What the training in a config takes; an error says what is missing to know it."""
    document = read_document(path)
    kind, values = recognise(document).name, document.values
    keys = ("model", "model_name_or_path", "model_id_or_path")
    word = model or next((values[key] for key in keys if isinstance(values.get(key), str)), None)
    if word is None and not isinstance(values.get("model"), dict) and "preset" not in values:
        raise ConfigError(Message("cli.does-say-model", name=path.name))
    if word is not None:
        name = word.strip()
        here = name.lower() in PRESETS or os.path.exists(os.path.expanduser(name)) or find_checkpoint(name) is not None
        if not here:
            raise ConfigError(Message("cli.model-machine-name", word=word))
    asked: dict[str, Any] = {"model": model, "gpus": gpus}
    if kind in ("job", "llamafactory"):
        asked["file"] = str(path)
    elif kind == "deepspeed":
        asked |= {"deepspeed": str(path), "model": word}
    else:  # a trainer's own arguments in our words; what they do not say has our defaults
        asked |= {
            "model": word,
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
            "attention": known.attention if known.attention in ("sdpa", "eager", "flash") else None,
            "world": known.world,
        }
    return estimated(read_request({name: value for name, value in asked.items() if value is not None}))
