"""Weights that only transformers can read: loaded once by from_pretrained, and kept in the model's own form.

This is the one place where a whole copy of a model is made, on the host. It is made once for a folder: later
starts, and the other ranks of this one, read what lies in the cache.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import torch

from tightfit.messages import Message
from tightfit.owned import flock
from tightfit.train.saved_model import TensorPiece, write_model
from tightfit.train.sources_hub import Progress, silent
from tightfit.types import ModelError


def convert(folder: Path, model_class: type[torch.nn.Module], cache: Path, *, progress: Progress = silent) -> Path:
    """A folder in `cache` with the weights of `folder` under the names of `model_class`."""
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
            write_model(target, pieces, names, rank=0, world=1, barrier=lambda: None)
            progress(Message("train.converting", name=folder.name), 1, 1)
    finally:
        os.close(lock)
    return target
