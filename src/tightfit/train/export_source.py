"""What can be exported, and how it is recognised: all that is known of it before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.messages import Listing, Message
from tightfit.runs.checkpoints import Torn, deepspeed_checkpoint, read_manifest
from tightfit.types import ConfigError, ModelError

Kind = Literal["model", "adapter", "deepspeed"]

Told = Callable[[Message, int, int], None]  # what is being done, how much of it is done, of how much


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to export."""

    source: str  # a run's folder, a model, an adapter or a DeepSpeed checkpoint
    to: str
    dtype: str | None = None  # None: as it is stored
    merge: bool = False  # there must be an adapter to merge
    base: str | None = None  # the model that the adapter is for; None: the one that it names
    config: str | None = None  # where the config of a DeepSpeed checkpoint's model is; None: beside it
    trust_pickle: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """What `source` is."""

    kind: Kind
    folder: Path
    run: Path | None = None  # the run's folder, where it is one


@dataclass(frozen=True, kw_only=True)
class Exported:
    kind: Kind
    folder: Path
    bytes: int
    dtype: str
    notes: tuple[Message, ...] = ()


def recognise(spec: Spec) -> ExportSource:
    """A run's folder, a model, an adapter, or a DeepSpeed checkpoint; anything else is an error that says so."""
    source = Path(spec.source).expanduser()
    if not source.is_dir():
        raise ModelError(Message("train.no-export-folder", source=spec.source))
    run = source if (source / "run.json").exists() or (source / "plan").is_dir() else None
    folder = source / "model" if run is not None and not (source / "config.json").exists() else source
    if run is not None and not folder.is_dir():
        raise ModelError(Message("train.no-model-yet", source=source))
    with suppress(Torn):
        if (part := read_manifest(folder).part) is not None:
            run = folder.parent.parent
            raise ConfigError(
                Message("train.part-alone", folder=folder, hosts=Listing(dict.fromkeys(part.hosts), "and"), run=run)
            )
    if (folder / "adapter_config.json").exists():
        return ExportSource(kind="adapter", folder=folder, run=run)
    checkpoint = deepspeed_checkpoint(folder)
    if checkpoint is not None:
        return ExportSource(kind="deepspeed", folder=checkpoint)
    if not (folder / "config.json").exists():
        raise ModelError(Message("train.cannot-export", folder=folder))
    if spec.merge:
        raise ConfigError(Message("train.nothing-to-merge", folder=folder))
    return ExportSource(kind="model", folder=folder, run=run)
