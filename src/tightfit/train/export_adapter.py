"""A LoRA adapter merged into its base: W + scale · B · A, some rows at a time.

The sum is taken in fp32 and rounded once. What PEFT can put into an adapter and a plain weight cannot hold (DoRA,
biases of B, other methods than LoRA) is refused by name rather than left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from tightfit.formats.worker.read import find_worker
from tightfit.inputs.records import read_json
from tightfit.messages import Message
from tightfit.train.export_model import MetaModel, Output, choose_dtype, model_on_meta, write
from tightfit.train.export_source import Exported, ExportSource, Spec, Told
from tightfit.train.safetensors_files import Files, read_header
from tightfit.train.shards import plain_name
from tightfit.train.sources import find_weights, open_weights
from tightfit.types import ModelError

HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base as it is; PiSSA and its kin change it before training starts."""

LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<which>A|B|embedding_A|embedding_B)(\.weight)?")


@dataclass(frozen=True)
class Delta:
    """What is added to one weight."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool
    """The weight is stored as (in, out): Conv1D of GPT-2, embeddings, some experts."""
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

    @property
    def base(self) -> str | None:
        name = self.config.get("base_model_name_or_path")
        return str(name) if name else None

    def scale(self, module: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        found = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = float(patterns[found] if found is not None else self.config.get("lora_alpha", 8))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank


def export_merged(found: ExportSource, spec: Spec, told: Told) -> Exported:
    """The base with the adapter in it, as a plain model."""
    adapter = read_adapter(found.folder)
    named = spec.base or adapter.base
    if named is None:
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
    quantised = adapter.metadata.get("base_quantised") or _run_method(found.run)
    if quantised:
        notes.append(Message("train.base-was-quantised"))
    output = Output(
        kind="adapter",
        folder=Path(spec.to),
        dtype=choose_dtype(spec.dtype, source),
        beside=(base, found.folder),
        notes=tuple(notes),
    )
    return write(whole, values, output, told)


def read_adapter(folder: Path) -> Adapter:
    """Check that it is one that can be merged, and read it."""
    try:
        config = read_json(folder / "adapter_config.json")
    except (OSError, ValueError) as error:
        raise ModelError(Message("train.adapter-config-unreadable", folder=folder, why=error)) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
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
        return _experts_delta(path, a, b, adapter, whole)
    transposed = embedding or (bool(adapter.config.get("fan_in_fan_out")) and shape != (b.shape[0], a.shape[1]))
    if adapter.config.get("fan_in_fan_out") and b.shape[0] == a.shape[1]:
        transposed = transposed or (type(whole.model.get_submodule(path)).__name__ == "Conv1D")
    wanted = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if shape != wanted:
        raise ModelError(Message("train.adapter-other-shape", path=path, wanted=list(wanted), shape=list(shape)))
    return name, Delta(a, b, adapter.scale(path, a.shape[0]), transposed)


def _experts_delta(
    path: str, a: torch.Tensor, b: torch.Tensor, adapter: Adapter, whole: MetaModel
) -> tuple[str, Delta]:
    """PEFT's adapters of whole parameters: one pair holds all experts, and shapes tell which parameter it is for."""
    for name, shape in whole.shapes.items():
        if name.rpartition(".")[0] != path or len(shape) != 3 or a.shape[0] % shape[0]:
            continue
        for transposed in (False, True):
            outer, inner = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
            if shape[1:] == (outer, inner):
                rank = a.shape[0] // shape[0]
                return name, Delta(a, b, adapter.scale(path, rank), transposed, shape[0])
    raise ModelError(_stranger(path, whole))


def _refuse_tied(name: str, whole: MetaModel) -> None:
    """A head that is the embedding cannot become another matrix than it."""
    if whole.first_name(name) not in (None, name):
        raise ModelError(Message("train.adapter-tied", name=name))


def _stranger(key: str, whole: MetaModel) -> Message:
    return Message("train.adapter-fits-nothing", key=key, model=type(whole.model).__name__)


def _run_method(run: Path | None) -> str | None:
    """What the run's plan says of quantisation."""
    if run is None:
        return None
    try:
        return "nf4" if find_worker(run / "plan")["levers"]["method"] == "qlora" else None
    except (KeyError, TypeError):
        return None
