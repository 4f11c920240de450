"""From what the user calls a model to a folder with its weights: a folder, Hugging Face, or ModelScope.

The cache is asked before the network, so that a machine without one works with what it has. `HF_ENDPOINT`
(a mirror), `HF_HOME` and tokens are huggingface_hub's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download

from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import read_text
from tightfit.types import ModelError

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is; bytes or pieces."""

PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
"""Weights, configs, tokenizers. Not pickles, and not the copies in other formats that many repositories hold."""

MODELSCOPE = "modelscope:"
TIMEOUT_S = 10


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def find_weights(source: str, *, progress: Progress = silent) -> Path:
    """The folder with the weights of `source`: itself, or what was fetched for it."""
    if source.startswith(MODELSCOPE):
        return _from_modelscope(source.removeprefix(MODELSCOPE), None)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{source} is a file: give the folder that holds the weights and the config.json")
    if source.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {source}")
    try:
        try:
            folder = Path(snapshot_download(source, allow_patterns=PATTERNS, local_files_only=True))
            if _complete(folder):
                return folder
        except hub.LocalEntryNotFoundError:
            pass
        # Ask once before fetching: the download itself would retry for half a minute where there is no network.
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=TIMEOUT_S)
        return Path(snapshot_download(source, allow_patterns=PATTERNS, tqdm_class=_bar(source, progress)))
    except Exception as error:  # whatever the network and its libraries raise, the user reads one sentence
        if isinstance(error, hub.GatedRepoError):
            raise ModelError(
                f"{source} is gated: accept its licence on its Hugging Face page and log in with `hf auth login`"
            ) from error
        if not isinstance(error, hub.HFValidationError) and _modelscope() is not None:
            return _from_modelscope(source, error)
        raise ModelError(_problem(source, error)) from error


def _complete(folder: Path) -> bool:
    """Not only the config was fetched, as an estimate does, and no shard is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = set(parse_json(read_text(index, "JSON"))["weight_map"].values())
    return all((folder / file).is_file() for file in files)


def _bar(name: str, progress: Progress) -> type[Any]:
    """A progress bar of the kind that huggingface_hub wants, which draws nothing and tells `progress`."""
    tqdm: Any = import_module("tqdm").tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options)

        def display(self, *args: Any, **options: Any) -> None:
            if self.unit == "B" and self.total:
                progress(f"fetching {name}", int(self.n), int(self.total))

    return Bar


def _modelscope() -> Any | None:
    try:
        return import_module("modelscope")
    except ImportError:
        return None


def _from_modelscope(name: str, hub_error: Exception | None) -> Path:
    package = _modelscope()
    if package is None:
        raise ModelError(f"{name} must be fetched from ModelScope: pip install modelscope")
    try:
        return Path(package.snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:
        also = f"; Hugging Face: {_reason(hub_error)}" if hub_error is not None else ""
        raise ModelError(
            f"{name} could not be fetched from ModelScope ({_reason(error)}{also}): check the id, or give a folder"
        ) from error


def _problem(name: str, error: Exception) -> str:
    if isinstance(error, hub.HFValidationError):
        return f"{name!r} is no folder and no Hugging Face id: give a folder, or an id such as org/name"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return f"{name} is not in the Hugging Face cache, which is all there is while HF_HUB_OFFLINE is set"
    if isinstance(error, hub.LocalEntryNotFoundError):
        return f"{name} is not in the Hugging Face cache, and there is no network: give a folder"
    if isinstance(error, hub.RepositoryNotFoundError):
        return f"Hugging Face has no model {name} that you may read: check the id, or log in with `hf auth login`"
    if isinstance(error, hub.EntryNotFoundError):
        return f"{name} on Hugging Face has no config.json, so it is no transformers model"
    return f"the weights of {name} could not be fetched from Hugging Face ({_reason(error)}): give a folder"


def _reason(error: Exception | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
