"""A Hugging Face folder from weights, a tensor at a time: of a model, an adapter, or a DeepSpeed checkpoint.

What exports share: the model on the meta device, for its names and shapes; the files beside the weights; and a
stream of pieces that is written as it is read, so that neither side is ever whole in memory.

A LoRA adapter is merged into its base, W + scale · B · A, some rows at a time. The sum is taken in fp32 and rounded
once. What PEFT can put into an adapter and a plain weight cannot hold (DoRA, biases of B, other methods than LoRA) is
refused by name rather than left out.

A DeepSpeed checkpoint of some other program goes through DeepSpeed's own converter, which opens pickles; the caller has
made sure that the user trusts them. It is asked to be lazy: it holds references into the files, and each tensor is put
together when it is written.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from tightfit.formats.worker.read import find_worker
from tightfit.inputs.records import read_json
from tightfit.messages import Message
from tightfit.runs.checkpoints import states_folder
from tightfit.train.build import DTYPES, quiet_transformers, skeleton
from tightfit.train.export_source import Exported, ExportSource, Kind, Spec, Told
from tightfit.train.safetensors_files import Files, Stored, read_header
from tightfit.train.saved_model import FileStyle, TensorPiece, model_files, write_model
from tightfit.train.shards import plain_name
from tightfit.train.sources import (
    Safetensors,
    map_names,
    name_parts,
    names_of,
    open_weights,
    own_tensors,
    rename_pieces,
    wrong_shape,
)
from tightfit.train.sources_hub import find_weights
from tightfit.types import ConfigError, ModelError

WORDS = {dtype: word for word, dtype in DTYPES.items()}
CHUNK_ELEMENTS = 2**24  # what is read, changed and written at a time
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
        return {name: tuple(tensor.shape) for name, tensor in own_tensors(self.model).items()}


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


def export_copy(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """A whole model, in another dtype where one was asked for."""
    whole = model_on_meta(found.folder, trust_remote_code=spec.trust_remote_code)
    source = open_weights(found.folder, whole.model)
    return write(whole, source.read, choose_dtype(spec.dtype, source), Path(spec.to), told, beside=(found.folder,))


def choose_dtype(word: str | None, source: Safetensors) -> Callable[[str], torch.dtype]:
    """The dtype that was asked for, or the one that each tensor is stored in; counters stay what they are."""

    def choose(name: str) -> torch.dtype:
        stored = source.dtype(name)
        return DTYPES[word] if word is not None and stored.is_floating_point else stored

    return choose


def write(
    whole: MetaModel,
    values: Values,
    dtype_of: Callable[[str], torch.dtype],
    target: Path,
    told: Told,
    *,
    beside: tuple[Path, ...],
    kind: Kind = "model",
) -> Exported:
    """Write every tensor of the model, as `values` gives them, with its config and the small files of the folders
    `beside`; later ones win."""
    shapes = whole.shapes
    parts = name_parts(whole.model)
    dtype = dtype_of(max(shapes, key=lambda name: prod(shapes[name])))
    total = sum(prod(shape) * dtype_of(name).itemsize for name, shape in shapes.items())

    def pieces() -> Iterator[TensorPiece]:
        done = 0
        for name, shape in shapes.items():
            # Whole rows of the first dimension, about `CHUNK_ELEMENTS` at a time.
            row, size = max(1, prod(shape[1:])), prod(shape)
            step = max(1, CHUNK_ELEMENTS // row) * row
            for start in range(0, size, step):
                stop = min(start + step, size)
                yield TensorPiece(name, shape, start, values(name, shape, start, stop))
                done += (stop - start) * dtype_of(name).itemsize
                told(Message("train.writing", name=target.name), done, total)

    config = model_files(whole.model.config, type(whole.model).__name__, dtype)

    def copy_small_files(folder: Path) -> None:
        # Tokenizer, chat template, generation config: whatever small files lie beside a model's weights.
        for file in (file for source in beside for pattern in BESIDE for file in source.glob(pattern)):
            if file.is_file() and file.name not in NOT_BESIDE:
                shutil.copyfile(file, folder / file.name)
        config(folder)

    names, style = names_of(parts, dtype_of), FileStyle(beside=copy_small_files)
    written = write_model(target, rename_pieces(pieces(), parts), names, style=style)
    return Exported(kind=kind, folder=target, bytes=written, dtype=WORDS.get(dtype, str(dtype)))


# --- adapters -------------------------------------------------------------------------------------

HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base as it is; PiSSA and its kin change it before training starts."""

LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<which>A|B|embedding_A|embedding_B)(\.weight)?")


@dataclass(frozen=True)
class Delta:
    """What is added to one weight."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool  # the weight is stored as (in, out): Conv1D of GPT-2, embeddings, some experts
    experts: int = 1

    def rows(self, low: int, high: int) -> torch.Tensor:
        """Rows [low, high) of the first dimension, in fp32; with experts, those of that number, whole."""
        if self.experts == 1:
            left, right = (self.a.t(), self.b.t()) if self.transposed else (self.b, self.a)
            return self.scale * (left[low:high] @ right)
        a = self.a.reshape(self.experts, -1, self.a.shape[-1])[low:high]
        b = self.b.reshape(self.b.shape[0], -1, self.experts)[..., low:high].permute(2, 0, 1)
        both = torch.bmm(b, a)
        return self.scale * (both.transpose(1, 2) if self.transposed else both)


@dataclass(frozen=True)
class Adapter:
    """An adapter's file, read whole: it is small."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    def scale(self, module: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        found = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = float(patterns[found] if found is not None else self.config.get("lora_alpha", 8))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank


def export_merged(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """The base with the adapter in it, as a plain model."""
    adapter = read_adapter(found.folder)
    named = spec.base or str(adapter.config.get("base_model_name_or_path") or "")
    if not named:
        raise ModelError(Message("train.adapter-names-no-base", folder=found.folder))
    # A base that is given relative to nothing: as it is, or where the adapter lies.
    here = (found.folder / named).resolve()
    base = find_weights(str(here) if not Path(named).exists() and here.is_dir() else named, progress=told)
    whole = model_on_meta(base, trust_remote_code=spec.trust_remote_code)
    source = open_weights(base, whole.model)
    deltas, replaced = place_deltas(adapter, whole)

    def values(name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        brought = replaced.get(name)
        plain = source.read(name, shape, start, stop) if brought is None else brought.reshape(-1)[start:stop]
        if name not in deltas:
            return plain
        row = prod(shape[1:])
        return plain.float() + deltas[name].rows(start // row, stop // row).reshape(-1)

    notes = [Message("train.merged", base=named)]
    quantised = bool(adapter.metadata.get("base_quantised"))
    if not quantised and found.run is not None:
        with suppress(KeyError, TypeError):
            quantised = find_worker(found.run / "plan")["levers"]["method"] == "qlora"
    if quantised:
        notes.append(Message("train.base-was-quantised"))
    dtype_of, beside = choose_dtype(spec.dtype, source), (base, found.folder)
    done = write(whole, values, dtype_of, Path(spec.to), told, beside=beside, kind="adapter")
    return replace(done, notes=tuple(notes))


def read_adapter(folder: Path) -> Adapter:
    """Check that it is one that can be merged, and read it."""
    try:
        config = read_json(folder / "adapter_config.json")
    except (OSError, ValueError) as error:
        raise ModelError(Message("train.adapter-config-unreadable", folder=folder, why=error)) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ModelError(Message("train.not-lora", folder=folder, kind=kind))
    for key, what in (
        ("use_dora", Message("train.dora")),
        ("lora_bias", Message("train.own-biases")),
        ("layer_replication", Message("train.own-layers")),
        ("trainable_token_indices", Message("train.single-tokens")),
        ("alora_invocation_tokens", Message("train.switching-tokens")),
        ("use_qalora", Message("train.qalora")),
    ):
        if config.get(key):
            raise ModelError(Message("train.cannot-merge", folder=folder, what=what, key=key))
    start = config.get("init_lora_weights", True)
    if start not in HARMLESS_STARTS:
        raise ModelError(Message("train.start-changes-base", folder=folder, start=start))
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").exists()
        why = Message("train.adapter-pickled") if pickled else Message("train.adapter-no-file")
        raise ModelError(Message("train.adapter-in", folder=folder, why=why))
    stored, metadata = read_header(path)
    files = Files()
    tensors = {name: files.read(one, 0, one.numel).reshape(one.shape) for name, one in stored.items()}
    files.close()
    return Adapter(config, tensors, metadata)


def place_deltas(adapter: Adapter, whole: MetaModel) -> tuple[dict[str, Delta], dict[str, torch.Tensor]]:
    """What is added to which weight, and which tensors the adapter brings whole."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    replaced: dict[str, torch.Tensor] = {}
    shapes = whole.shapes
    for key, tensor in adapter.tensors.items():
        match = LORA_KEY.fullmatch(key)
        if match is not None:
            pairs.setdefault(match["module"], {})[match["which"]] = tensor.float()
            continue
        name = plain_name(key)
        _refuse_tied(name, whole)
        if shapes.get(name) != tuple(tensor.shape):
            raise ModelError(_stranger(key, whole))
        replaced[name] = tensor
    deltas: dict[str, Delta] = {}
    for module, pair in pairs.items():
        name, delta = _delta(module, pair, adapter, whole)
        if name in deltas:
            raise ModelError(Message("train.changed-twice", name=name))
        deltas[name] = delta
    return deltas, replaced


def _delta(module: str, pair: Mapping[str, torch.Tensor], adapter: Adapter, whole: MetaModel) -> tuple[str, Delta]:
    embedding = "embedding_A" in pair
    a, b = (pair.get(f"embedding_{which}" if embedding else which) for which in "AB")
    if a is None or b is None or a.dim() != 2 or b.dim() != 2:
        raise ModelError(Message("train.no-pair", module=module))
    path = plain_name(f"{module}.").removesuffix(".")
    name, shape = f"{path}.weight", whole.shapes.get(f"{path}.weight")
    _refuse_tied(name, whole)
    if shape is None:
        # PEFT's adapters of whole parameters: one pair holds all experts, and shapes tell which parameter it is for.
        for name, shape in whole.shapes.items():
            if name.rpartition(".")[0] != path or len(shape) != 3 or a.shape[0] % shape[0]:
                continue
            for transposed in (False, True):
                outer, inner = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
                if shape[1:] == (outer, inner):
                    scale = adapter.scale(path, a.shape[0] // shape[0])
                    return name, Delta(a, b, scale, transposed, shape[0])
        raise ModelError(_stranger(path, whole))
    transposed = embedding or (bool(adapter.config.get("fan_in_fan_out")) and shape != (b.shape[0], a.shape[1]))
    if adapter.config.get("fan_in_fan_out") and b.shape[0] == a.shape[1]:
        transposed = transposed or (type(whole.model.get_submodule(path)).__name__ == "Conv1D")
    wanted = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if shape != wanted:
        raise ModelError(Message("train.adapter-other-shape", path=path, wanted=list(wanted), shape=list(shape)))
    return name, Delta(a, b, adapter.scale(path, a.shape[0]), transposed)


def _refuse_tied(name: str, whole: MetaModel) -> None:
    """A head that is the embedding cannot become another matrix than it."""
    if name in whole.model.state_dict(keep_vars=True) and name not in whole.shapes:
        raise ModelError(Message("train.adapter-tied", name=name))


def _stranger(key: str, whole: MetaModel) -> Message:
    return Message("train.adapter-fits-nothing", key=key, model=type(whole.model).__name__)


# --- DeepSpeed ------------------------------------------------------------------------------------


def export_checkpoint(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """Weights from the checkpoint, everything else from where the config is."""
    if spec.config is not None:
        settings = find_weights(spec.config, progress=told)
    else:
        beside = (found.folder, found.folder.parent)
        known = next((folder for folder in beside if (folder / "config.json").is_file()), None)
        if known is None:
            raise ConfigError(Message("train.checkpoint-of-what", checkpoint=found.folder))
        settings = known
    whole = model_on_meta(settings, trust_remote_code=spec.trust_remote_code)
    told(Message("train.opening-checkpoint"), 0, 1)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = states_folder(found.folder)
    if states is None:
        raise ModelError(Message("train.no-global-step", folder=found.folder))
    try:  # names → tensors, put together when `contiguous` is called
        tensors: dict[str, Any] = dict(
            get_fp32_state_dict_from_zero_checkpoint(str(states.parent), tag=states.name, lazy_mode=True)
        )
    except (FileNotFoundError, ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(Message("train.deepspeed-cannot-merge", folder=found.folder, why=reason)) from error
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
    return write(whole, values, lambda _: dtype, Path(spec.to), told, beside=(settings,), kind="deepspeed")
