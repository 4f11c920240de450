"""A DeepSpeed checkpoint of some other program → a Hugging Face folder, through DeepSpeed's own converter.

The converter opens pickles; the caller has made sure that the user trusts them. It is asked to be lazy: it holds
references into the files, and each tensor is put together when it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tightfit.messages import Message
from tightfit.runs.checkpoints import states_folder
from tightfit.train.build import DTYPES
from tightfit.train.export_model import Output, model_on_meta, write
from tightfit.train.export_source import Exported, ExportSource, Spec, Told
from tightfit.train.safetensors_files import Stored
from tightfit.train.sources import find_weights
from tightfit.train.sources_names import map_names, wrong_shape
from tightfit.types import ConfigError, ModelError


def export_checkpoint(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """Weights from the checkpoint, everything else from where the config is."""
    settings = _config_folder(found.folder, spec, told)
    whole = model_on_meta(settings, trust_remote_code=spec.trust_remote_code)
    told(Message("train.opening-checkpoint"), 0, 1)
    tensors = _open(found.folder)
    told(Message("train.opening-checkpoint"), 1, 1)
    if any(".lora_" in name for name in tensors):
        raise ModelError(Message("train.export-the-adapter", folder=found.folder))
    tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    stored = {name: Stored(found.folder, "F32", tuple(one.shape), 0, 0) for name, one in tensors.items()}
    named = map_names(whole.model, stored)
    lacking = (*named.missing, *named.needs_conversion)
    if lacking:
        raise ModelError(Message("train.checkpoint-lacks", name=lacking[0], config=settings))
    for name, shape in whole.shapes.items():
        if problem := wrong_shape(name, shape, named.parts[name], stored):
            raise ModelError(Message("train.name-its-config", problem=problem))
    held: dict[str, torch.Tensor] = {}

    def values(name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        if name not in held:  # one at a time: its chunks come one after another
            held.clear()
            held[name] = torch.cat([tensors[key].contiguous().reshape(-1) for key in named.parts[name]])
        return held[name][start:stop]

    # What the config says that the model is stored in; fp32, as the checkpoint is, where it says nothing.
    said = getattr(whole.model.config, "dtype", None) if spec.dtype is None else DTYPES[spec.dtype]
    if isinstance(said, str):
        said = getattr(torch, said, None)
    dtype = said if isinstance(said, torch.dtype) else torch.float32
    output = Output(kind="deepspeed", folder=Path(spec.to), dtype=lambda _: dtype, beside=(settings,))
    return write(whole, values, output, told)


def _config_folder(checkpoint: Path, spec: Spec, told: Told) -> Path:
    if spec.config is not None:
        return find_weights(spec.config, progress=told)
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(Message("train.checkpoint-of-what", checkpoint=checkpoint))


def _open(folder: Path) -> dict[str, Any]:
    """Names → tensors, put together when `contiguous` is called."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = states_folder(folder)
    if states is None:
        raise ModelError(Message("train.no-global-step", folder=folder))
    try:
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(states.parent), tag=states.name, lazy_mode=True))
    except (FileNotFoundError, ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(Message("train.deepspeed-cannot-merge", folder=folder, why=reason)) from error
