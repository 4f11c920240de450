"""Under which names a model is saved, and what lies beside its weights.

A Hugging Face folder has the names of the checkpoints that are out there, which for mixtures of experts are not
those of transformers 5's modules: the experts of a layer are one tensor in memory and many in the files. The many
lie end to end in the one, so a piece of it is cut where they meet, and other programs can read the folder too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch

from tightfit.runs import disk
from tightfit.train.safetensors_files import Stored, overlaps
from tightfit.train.saved_model import Names, TensorPiece
from tightfit.train.sources import map_names

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
            yield TensorPiece(key, shape, low, flat[done : done + high - low])
            done += high - low


# --- beside the weights --------------------------------------------------------------------------


def model_files(
    config: Any, model_class: str, dtype: torch.dtype, *, generation_config: Any = None, tokenizer: Any = None
) -> Callable[[Path], None]:
    """A writer of config.json and its neighbours, as save_pretrained would have written them."""

    def write(folder: Path) -> None:
        saved = copy.deepcopy(config)
        saved.architectures = [model_class]
        saved.dtype = dtype
        if getattr(saved, "use_cache", None) is False:  # off while training, and slow when it generates
            saved.use_cache = True
        if getattr(saved, "rescale_prenorm_residual", False):
            # It speaks of a new model only, but transformers 5 rescales what it has loaded as well.
            saved.rescale_prenorm_residual = False
        _save_all(folder, saved, generation_config, tokenizer)

    return write


def adapter_files(adapter_config: Any, base: str, *, tokenizer: Any = None) -> Callable[[Path], None]:
    """A writer of adapter_config.json, which names the model that the adapter is for."""

    def write(folder: Path) -> None:
        saved = copy.deepcopy(adapter_config)
        saved.base_model_name_or_path = base
        saved.inference_mode = True
        _save_all(folder, saved, tokenizer)

    return write


def _save_all(folder: Path, *things: Any) -> None:
    for each in things:
        if each is not None:
            disk.by_library(each.save_pretrained, folder)


def adapter_name(name: str, adapter: str = "default") -> str:
    """A parameter of a PeftModel as PEFT's files call it: without the adapter's own name."""
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    return re.sub(
        rf"(\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.{re.escape(adapter)}(?=\.|$)", r"\1", name
    )
