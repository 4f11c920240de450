"""From a word to a model: a preset, a folder or config.json, a Hugging Face id, or a block of shape fields.

Only the config is ever read, never weights, and never with torch: `families` knows the tensors that
transformers would make of it. What it does not know by name can be measured instead (`trace`), if asked.

Ids that `presets` knows are answered from there, before the cache and the network are asked: a shape does not change
once it is published, and a machine without a network, or without the licence, gets the same answer as any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tightfit.inputs.spelling import read_text, shown
from tightfit.messages import Message, Said
from tightfit.model import families
from tightfit.model.families import NotByName, did_you_mean
from tightfit.model.families.reader import MAX_SIZE
from tightfit.model.presets import CHECKPOINTS, DRAWN_STD, PRESETS, PUBLISHED, find_checkpoint
from tightfit.types import ConfigError, ModelError, ModelShape

HUB_TIMEOUT_S = 10
HONEST = 0.05  # a name that is this close to the count needs no correction


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A config by its name, with what ought to be said about it."""

    name: str
    config: Mapping[str, object]
    notes: tuple[Said, ...] = ()
    called: str | None = None  # the size that the name promises; see `presets`
    is_block: bool = False  # hand-written shape fields, in which every key must be known


def load_model(word: str, *, trust_trace: bool = False) -> ModelShape:
    """The shape of the model that `word` names.

    With `trust_trace`, a model that no family describes is built and measured by a subprocess, which
    needs the [train] extra; without, it is an error that says so.
    """
    if word.strip().lower() in PRESETS:
        return _preset_shape(word.strip().lower())
    return _shape(find_config(word), trust_trace)


@lru_cache(maxsize=64)
def _preset_shape(name: str) -> ModelShape:
    """Made once: what was computed of a shape is kept with it."""
    return _shape(find_config(name), trust_trace=False)


def _shape(found: FoundConfig, trust_trace: bool) -> ModelShape:
    try:
        shape = (shape_from_fields if found.is_block else shape_from_config)(found.config, found.name)
    except NotByName:
        if not trust_trace:
            raise
        from tightfit.model.trace import trace_config

        shape = trace_config(found.config, found.name)
    notes: tuple[Said, ...] = (*found.notes, *shape.notes)
    if found.called is not None and abs(shape.parameters / (float(found.called.removesuffix("B")) * 1e9) - 1) >= HONEST:
        notes = (Message("model.called-really", called=found.called, really=shape.parameters / 1e9), *notes)
    return replace(shape, notes=notes)


def find_config(word: str) -> FoundConfig:
    """The config that `word` names: a preset wins over a path, a path over an id that is known, that over the hub."""
    name = word.strip()
    if not name:
        raise ModelError(Message("model.no-name"))
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return FoundConfig(name.lower(), preset.config, (preset.source,), preset.called)
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return _local(Path(path))
    if name.endswith(".json") or name.startswith((".", "/", "~")) or os.path.isabs(path):
        raise ModelError(Message("model.no-such-file", name=shown(name)))
    known = find_checkpoint(name)
    if known is None:
        return FoundConfig(name, _read_json(_fetch(name), name))
    if known in PUBLISHED:
        return FoundConfig(known, PUBLISHED[known], (Message("model.published"),))
    # A public model that has a preset's shape, under its own name.
    checkpoint = CHECKPOINTS[known]
    config = PRESETS[checkpoint.preset].config
    notes: list[Said] = [Message("model.known-as", preset=checkpoint.preset)]
    if config["model_type"] == "gemma3_text":
        notes.append(Message("model.language-model-only"))
    return FoundConfig(known, {**config, **checkpoint.differs}, tuple(notes))


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape that transformers would build from this Hugging Face config, its `model_type` included."""
    shape, _ = families.read(config, name)
    if isinstance(quantized := config.get("quantization_config"), Mapping):
        method = quantized.get("quant_method")
        how = shown(method) if method is not None else Message("model.unnamed-method")
        note = Message("model.quantised", method=how)
        return replace(shape, notes=(*shape.notes, note))
    return shape


def shape_from_fields(fields: Mapping[str, object], name: str) -> ModelShape:
    """The shape of a hand-written block: `family`, then sizes in mamba-ssm's names or Hugging Face's."""
    config = config_from_fields(fields, name)
    shape, reader = families.read(config, name)
    # A config.json may hold anything; a block that a person wrote holds shape fields or misspellings.
    misspelt = [key for key in reader.unasked() if key not in ("max_seq_length", _STD)]
    if misspelt:
        hint = did_you_mean(misspelt[0], reader.asked | set(_FIELD_NAMES))
        raise ModelError(
            Message(
                "model.unknown-shape-field",
                name=shown(name),
                key=shown(misspelt[0]),
                model_type=shape.model_type,
                hint=hint,
            )
        )
    length = reader.optional_count("max_seq_length", None)
    return shape if length is None else replace(shape, max_positions=length)


_STD = "initializer_range"  # no size, but a new model's weights are drawn with it
_FIELD_NAMES: Mapping[str, str] = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "d_inner": "intermediate_size",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "dt_rank": "time_step_rank",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "tied": "tie_word_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}


def config_from_fields(fields: Mapping[str, object], name: str) -> dict[str, object]:
    """The Hugging Face config of a block of shape fields, such that transformers can build it too."""
    given = {key: value for key, value in fields.items() if key not in ("family", "model_type")}
    family = fields.get("family", fields.get("model_type"))
    if family is None and "d_state" in given:
        family = "mamba"
    if family is None:
        raise ModelError(Message("model.no-family", name=shown(name)))
    config: dict[str, object] = {"model_type": family}
    names = _FIELD_NAMES if "mamba" in str(family) else {**_FIELD_NAMES, "max_seq_length": "max_position_embeddings"}
    for key, value in given.items():
        real = names.get(key, key)
        if real in config:
            raise ModelError(Message("model.key-given-twice", name=shown(name), key=shown(key)))
        config[real] = value
    if family == "mamba":
        config.setdefault(_STD, DRAWN_STD)
    std = config.get(_STD, DRAWN_STD)
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 < std <= 1:
        raise ModelError(Message("model.bad-init-std", name=shown(name), key=_STD, value=shown(std)))
    # transformers takes whole `expand`s only; a fraction is said as the width that it gives.
    expand, hidden = config.get("expand"), config.get("hidden_size")
    if family not in ("mamba", "falcon_mamba") or not isinstance(expand, float):
        return config
    if not isinstance(hidden, int) or not 0 < hidden <= MAX_SIZE or not 0 < expand <= MAX_SIZE:
        return config  # the reader will say what is wrong
    if expand.is_integer():
        return {**config, "expand": int(expand)}
    del config["expand"]
    return {"intermediate_size": int(expand * hidden), **config}


def _local(path: Path) -> FoundConfig:
    """A folder with a config.json, the file itself, or a YAML file with a block of shape fields."""
    if path.suffix in (".yaml", ".yml"):
        return FoundConfig(path.stem, _read_block(path), is_block=True)
    if not path.is_dir():
        name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
        return FoundConfig(name, _read_json(path, str(path)))
    name = path.resolve().name or str(path)
    if (path / "config.json").is_file():
        return FoundConfig(name, _read_json(path / "config.json", str(path)))
    if (path / "adapter_config.json").is_file():
        raise ModelError(Message("model.folder-is-an-adapter", path=shown(str(path))))
    raise ModelError(Message("model.folder-without-config", path=shown(str(path))))


def _read_block(path: Path) -> Mapping[str, object]:
    """Shape fields of a YAML file: the whole of it, or its `model:` with the family beside it."""
    import yaml

    try:
        block = yaml.safe_load(read_text(path, Message("model.shape-fields")))
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(Message("model.unreadable-fields", path=shown(str(path)), reason=reason)) from error
    if isinstance(block, dict) and isinstance(block.get("model"), dict):
        family = {key: block[key] for key in ("family", "model_type") if key in block}
        block = {**family, **block["model"]}
    if not isinstance(block, dict):
        raise ModelError(Message("model.no-shape-fields", path=shown(str(path))))
    return {str(key): value for key, value in block.items()}


def _read_json(path: Path, name: str) -> Mapping[str, object]:
    try:
        config = json.loads(read_text(path, "JSON"))
    except ConfigError as error:
        raise ModelError(error.said) from error
    except (ValueError, RecursionError) as error:  # not text, not JSON, or nested without end
        raise ModelError(Message("model.config-not-json", name=shown(name), error=error)) from error
    if not isinstance(config, dict):
        raise ModelError(Message("model.config-not-an-object", name=shown(name), config=shown(config)))
    return config


def _fetch(name: str) -> Path:
    """The config.json of a Hugging Face id, from the cache or fetched into it; never the weights."""
    try:
        from huggingface_hub import errors as hub
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    except ImportError as error:
        raise ModelError(Message("model.needs-huggingface-hub", name=shown(name))) from error
    said = {"name": name, "nearby": did_you_mean(name.rsplit("/", maxsplit=1)[-1].lower(), PRESETS)}
    try:
        try:
            return Path(hf_hub_download(name, "config.json", local_files_only=True))
        except hub.LocalEntryNotFoundError:
            # Ask once before fetching: the download itself would retry for half a minute where there is no network.
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
            return Path(hf_hub_download(name, "config.json"))
    except hub.HFValidationError as error:
        raise ModelError(Message("model.hub-no-id", **{**said, "name": shown(name)})) from error
    except hub.GatedRepoError as error:
        raise ModelError(Message("model.hub-gated", **said)) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(Message("model.hub-none", **said)) from error
    except hub.OfflineModeIsEnabled as error:
        raise ModelError(Message("model.hub-offline", **said)) from error
    except Exception as error:  # whatever the network and its libraries raise, the user reads one sentence
        if isinstance(error, hub.EntryNotFoundError) and not isinstance(error, hub.LocalEntryNotFoundError):
            raise ModelError(Message("model.hub-no-config", name=name)) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(Message("model.hub-unreachable", **said, reason=reason)) from error
