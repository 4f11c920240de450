"""`python -m tightfit.train export SPEC.json`: what was trained → a plain Hugging Face folder.

The spec says what and where to; the answer is a line of JSON each on stdout: `progress` while it works, then `end`
or `error`. What libraries print goes to stderr. torch is loaded only after everything that can be wrong without
it has been looked at.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TextIO

from tightfit.runs.deepspeed_folder import deepspeed_checkpoint
from tightfit.types import ConfigError, ModelError, UserError

USER_ERROR = 2
INTERRUPTED = 130

Kind = Literal["model", "adapter", "deepspeed"]
DTYPES = ("bf16", "fp16", "fp32")

Told = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to export."""

    source: str
    """A run's folder, a model, an adapter or a DeepSpeed checkpoint."""
    to: str
    dtype: str | None = None
    """None: as it is stored."""
    merge: bool = False
    """There must be an adapter to merge."""
    base: str | None = None
    """The model that the adapter is for; None: the one that it names."""
    config: str | None = None
    """Where the config of a DeepSpeed checkpoint's model is; None: beside it."""
    trust_pickle: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `source` is."""

    kind: Kind
    folder: Path
    run: Path | None = None
    """The run's folder, where it is one."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    kind: Kind
    folder: Path
    bytes: int
    dtype: str
    notes: tuple[str, ...] = ()


def main(path: str) -> int:
    """Export what the spec says; the exit code."""
    with _own_stdout() as out:

        def say(**event: object) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        try:
            spec = Spec(**json.loads(Path(path).read_text(encoding="utf-8")))
            done = export(spec, lambda what, n, total: say(event="progress", what=what, done=n, total=total))
        except UserError as error:
            say(event="error", kind="user", text=" ".join(str(error).split()))
            return USER_ERROR
        except KeyboardInterrupt:
            return INTERRUPTED
        say(
            event="end",
            kind=done.kind,
            folder=str(done.folder),
            bytes=done.bytes,
            dtype=done.dtype,
            notes=list(done.notes),
        )
        return 0


def export(spec: Spec, told: Told) -> Exported:
    """Look what it is, then write it as a Hugging Face folder."""
    found = recognise(spec)
    target = Path(spec.to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: name another folder with --to")
    if found.kind == "deepspeed" and not spec.trust_pickle:
        raise ConfigError(
            f"{found.folder} is a DeepSpeed checkpoint, whose files are pickles and can run any program when they are "
            "opened: add --trust-pickle if you trust whoever made it"
        )
    for package in ("torch", "transformers", "accelerate", *(["deepspeed"] if found.kind == "deepspeed" else [])):
        if find_spec(package) is None:
            raise ConfigError(f"an export needs {package}: pip install 'tightfit[train]'")
    if found.kind == "deepspeed":
        from tightfit.train.export_deepspeed import export_checkpoint

        return export_checkpoint(found, spec, told)
    if found.kind == "adapter":
        from tightfit.train.export_adapter import export_merged

        return export_merged(found, spec, told)
    from tightfit.train.export_model import export_copy

    return export_copy(found, spec, told)


def recognise(spec: Spec) -> Found:
    """A run's folder, a model, an adapter, or a DeepSpeed checkpoint; anything else is an error that says so."""
    source = Path(spec.source).expanduser()
    if not source.is_dir():
        raise ModelError(f"there is no folder {spec.source}: give a run, an adapter or a checkpoint")
    run = source if (source / "run.json").exists() or (source / "plan").is_dir() else None
    folder = source / "model" if run is not None and not (source / "config.json").exists() else source
    if run is not None and not folder.is_dir():
        raise ModelError(f"the run in {source} has saved no model yet: let it end first")
    if (folder / "adapter_config.json").exists():
        return Found(kind="adapter", folder=folder, run=run)
    checkpoint = deepspeed_checkpoint(folder)
    if checkpoint is not None:
        return Found(kind="deepspeed", folder=checkpoint)
    if not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} is no run, model, adapter or DeepSpeed checkpoint: it has no config.json, adapter_config.json "
            "or global_step folder"
        )
    if spec.merge:
        raise ConfigError(f"there is nothing to merge: {folder} holds a whole model and no adapter, so drop --merge")
    return Found(kind="model", folder=folder, run=run)


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """The process's stdout for our lines alone; what others print there goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
