"""A Hugging Face folder from a source of weights, a tensor at a time.

What exports share: the model on the meta device, for its names and shapes; the files beside the weights; and a
stream of pieces that is written as it is read, so that neither side is ever whole in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from tightfit.messages import Message
from tightfit.train.build import DTYPES, quiet_transformers, skeleton
from tightfit.train.export_source import Exported, ExportSource, Kind, Spec, Told
from tightfit.train.saved_model import FileStyle, TensorPiece, write_model
from tightfit.train.saved_names import model_files, name_parts, names_of, rename_pieces
from tightfit.train.sources import Safetensors, open_weights
from tightfit.types import ModelError

WORDS = {dtype: word for word, dtype in DTYPES.items()}

CHUNK_ELEMENTS = 2**24
"""What is read, changed and written at a time."""

NOT_BESIDE = ("config.json", "adapter_config.json", "model.safetensors.index.json", "adapter_model.safetensors")
BESIDE = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")

Values = Callable[[str, tuple[int, ...], int, int], torch.Tensor]
"""Elements [start, stop) of a parameter, as they shall be saved but for the dtype."""


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, and where its config was."""

    model: Any
    folder: Path

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and persistent buffer by its first name."""
        return {name: tuple(tensor.shape) for name, tensor in _once(self.model).items()}

    def first_name(self, name: str) -> str | None:
        """The name under which a tensor is saved; None: the model has no such tensor."""
        return self._first_names.get(name)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        first = {id(tensor): name for name, tensor in _once(self.model).items()}
        return {name: first[id(tensor)] for name, tensor in self.model.state_dict(keep_vars=True).items()}


def model_on_meta(folder: Path, *, trust_remote_code: bool = False) -> MetaModel:
    """The language model of a folder's config.json."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(Message("train.no-config", folder=folder))
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(Message("train.config-unreadable", folder=folder, why=reason)) from error
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(Message("train.stored-quantised", folder=folder))
        return MetaModel(skeleton(config, torch.float32, "eager", trust_remote_code=trust_remote_code), folder)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where to write, in which dtypes, and which folders give the small files; later ones win."""

    kind: Kind
    folder: Path
    dtype: Callable[[str], torch.dtype]
    beside: tuple[Path, ...]
    notes: tuple[Message, ...] = ()


def export_copy(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """A whole model, in another dtype where one was asked for."""
    whole = model_on_meta(found.folder, trust_remote_code=spec.trust_remote_code)
    source = open_weights(found.folder, whole.model)
    output = Output(kind="model", folder=Path(spec.to), dtype=choose_dtype(spec.dtype, source), beside=(found.folder,))
    return write(whole, source.read, output, told)


def choose_dtype(word: str | None, source: Safetensors) -> Callable[[str], torch.dtype]:
    """The dtype that was asked for, or the one that each tensor is stored in; counters stay what they are."""

    def choose(name: str) -> torch.dtype:
        stored = source.dtype(name)
        return DTYPES[word] if word is not None and stored.is_floating_point else stored

    return choose


def write(whole: MetaModel, values: Values, output: Output, told: Told) -> Exported:
    """Write every tensor of the model, as `values` gives them, with its config and tokenizer."""
    shapes = whole.shapes
    parts = name_parts(whole.model)
    widest = max(shapes, key=lambda name: prod(shapes[name]))
    dtype = output.dtype(widest)
    total = sum(prod(shape) * output.dtype(name).itemsize for name, shape in shapes.items())

    def pieces() -> Iterator[TensorPiece]:
        done = 0
        for name, shape in shapes.items():
            for start, stop in _chunks(shape):
                yield TensorPiece(name, shape, start, values(name, shape, start, stop))
                done += (stop - start) * output.dtype(name).itemsize
                told(Message("train.writing", name=output.folder.name), done, total)

    config = model_files(whole.model.config, type(whole.model).__name__, dtype)

    def beside(folder: Path) -> None:
        for source in output.beside:
            copy_beside(source, folder)
        config(folder)

    written = write_model(
        output.folder,
        rename_pieces(pieces(), parts),
        names_of(parts, output.dtype),
        rank=0,
        world=1,
        barrier=lambda: None,
        style=FileStyle(beside=beside),
    )
    return Exported(
        kind=output.kind, folder=output.folder, bytes=written, dtype=WORDS.get(dtype, str(dtype)), notes=output.notes
    )


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config: whatever small files lie beside a model's weights."""
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in NOT_BESIDE:
                shutil.copyfile(file, target / file.name)


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Whole rows of the first dimension, about `CHUNK_ELEMENTS` at a time."""
    if not shape:
        yield 0, 1
        return
    row = max(1, prod(shape[1:]))
    step = max(1, CHUNK_ELEMENTS // row) * row
    for start in range(0, prod(shape), step):
        yield start, min(start + step, prod(shape))


def _once(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the state under its first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found
