"""The trained model as a Hugging Face folder, every rank writing its own part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tightfit.train.assemble import Assembled
from tightfit.train.build import DTYPES
from tightfit.train.config import WorkerConfig
from tightfit.train.place import Place, meet
from tightfit.train.saved_model import ADAPTER, FileStyle, TensorPiece, TensorSet, write_model
from tightfit.train.saved_names import adapter_files, adapter_name, model_files, name_parts, names_of, rename_pieces
from tightfit.train.shards import Shard, outline, shards


def save_model(folder: Path, tensors: TensorSet, place: Place) -> int:
    """Write the model, or the adapter; its bytes."""
    return write_model(
        folder,
        tensors.pieces(),
        tensors.names,
        rank=place.rank,
        world=place.world,
        barrier=lambda: meet(place),
        style=tensors.style,
    )


def model_set(made: Assembled, config: WorkerConfig, tokenizer: Any, place: Place) -> TensorSet:
    """What `from_pretrained` reads, or PEFT where adapters train."""
    if config.levers.lora is not None:
        return _adapter_set(made, config, tokenizer, place)
    dtype = DTYPES[config.levers.precision]
    parts = name_parts(made.twin)
    kinds = {name: buffer.dtype for name, buffer in made.engine.model.named_buffers()}  # as their authors chose
    for name, param in made.twin.named_parameters(remove_duplicate=False):
        kinds[name] = dtype if param.dtype.is_floating_point else param.dtype

    def pieces() -> Iterator[TensorPiece]:
        mine = (TensorPiece(shard.name, shard.shape, shard.start, shard.tensor) for shard in _mine(made, place))
        return rename_pieces(chain(_buffers(made, place), mine), parts)

    beside = model_files(made.hf_config, type(made.twin).__name__, dtype, tokenizer=tokenizer)
    return TensorSet(names=names_of(parts, kinds.__getitem__), pieces=pieces, style=FileStyle(beside=beside))


def _adapter_set(made: Assembled, config: WorkerConfig, tokenizer: Any, place: Place) -> TensorSet:
    model = made.engine.model
    every = [shard for shard in outline(model, place.rank) if ".lora_" in shard.path]
    base = config.model.weights or config.model.name
    metadata = {"format": "pt"} | ({"base_quantised": "nf4"} if config.levers.method == "qlora" else {})
    beside = adapter_files(model.peft_config["default"], base, tokenizer=tokenizer)

    def pieces() -> Iterator[TensorPiece]:
        for shard in _mine(made, place):
            if ".lora_" in shard.path:
                yield TensorPiece(adapter_name(shard.path), shard.shape, shard.start, shard.tensor)

    return TensorSet(
        names={adapter_name(shard.path): (shard.shape, torch.float32) for shard in every},
        pieces=pieces,
        style=replace(ADAPTER, beside=beside, metadata=metadata),
    )


def _mine(made: Assembled, place: Place) -> Iterator[Shard]:
    """What this rank writes: its part of what is sharded, and its turn of what every rank holds whole."""
    for number, shard in enumerate(shards(made.engine.model, place.rank)):
        if shard.cut or number % place.world == place.rank:
            yield shard


def _buffers(made: Assembled, place: Place) -> Iterator[TensorPiece]:
    """Buffers that a checkpoint holds; the same on every rank."""
    if not place.leads:
        return
    kept = set(made.twin.state_dict())
    for name, buffer in made.engine.model.named_buffers():
        if name in kept:
            yield TensorPiece(name, tuple(buffer.shape), 0, buffer.detach().reshape(-1))
