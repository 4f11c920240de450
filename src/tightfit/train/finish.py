"""The trained model as a Hugging Face folder, every rank writing its own part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tightfit.train.assemble import Assembled
from tightfit.train.build import DTYPES
from tightfit.train.config import WorkerConfig
from tightfit.train.place import Place, meet
from tightfit.train.saved_model import ADAPTER, Piece, Style, write_model
from tightfit.train.saved_names import adapter_files, adapter_name, model_files, names_of, saved_parts, saved_pieces
from tightfit.train.shards import Shard, shards


def save_model(folder: Path, made: Assembled, config: WorkerConfig, tokenizer: Any, place: Place) -> int:
    """Write the model, or the adapter; its bytes."""
    dtype = DTYPES[config.levers.precision]
    if config.levers.lora is not None:
        return _save_adapter(folder, made, config, tokenizer, place)
    parts = saved_parts(made.twin)
    kinds = {name: buffer.dtype for name, buffer in made.engine.model.named_buffers()}  # as their authors chose
    for name, param in made.twin.named_parameters(remove_duplicate=False):
        kinds[name] = dtype if param.dtype.is_floating_point else param.dtype
    pieces = (Piece(shard.name, shard.shape, shard.start, shard.tensor) for shard in _mine(made, place))
    style = Style(beside=model_files(made.hf_config, type(made.twin).__name__, dtype, tokenizer=tokenizer))
    return write_model(
        folder,
        saved_pieces((*_buffers(made, place), *pieces), parts),
        names_of(parts, kinds.__getitem__),
        rank=place.rank,
        world=place.world,
        barrier=lambda: meet(place),
        style=style,
    )


def _save_adapter(folder: Path, made: Assembled, config: WorkerConfig, tokenizer: Any, place: Place) -> int:
    model = made.engine.model
    trained = [shard for shard in _mine(made, place) if ".lora_" in shard.path]
    every = [shard for shard in shards(model, place.rank) if ".lora_" in shard.path]
    names = {adapter_name(shard.path): (shard.shape, torch.float32) for shard in every}
    base = config.model.weights or config.model.name
    metadata = {"format": "pt"} | ({"base_quantised": "nf4"} if config.levers.method == "qlora" else {})
    beside = adapter_files(model.peft_config["default"], base, tokenizer=tokenizer)
    return write_model(
        folder,
        (Piece(adapter_name(shard.path), shard.shape, shard.start, shard.tensor) for shard in trained),
        names,
        rank=place.rank,
        world=place.world,
        barrier=lambda: meet(place),
        style=replace(ADAPTER, beside=beside, metadata=metadata),
    )


def _mine(made: Assembled, place: Place) -> Iterator[Shard]:
    """What this rank writes: its part of what is sharded, and its turn of what every rank holds whole."""
    for number, shard in enumerate(shards(made.engine.model, place.rank)):
        if shard.cut or number % place.world == place.rank:
            yield shard


def _buffers(made: Assembled, place: Place) -> Iterator[Piece]:
    """Buffers that a checkpoint holds; the same on every rank."""
    if not place.leads:
        return
    kept = set(made.twin.state_dict())
    for name, buffer in made.engine.model.named_buffers():
        if name in kept:
            yield Piece(name, tuple(buffer.shape), 0, buffer.detach().reshape(-1))
