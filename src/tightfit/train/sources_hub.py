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
from tightfit.messages import Message
from tightfit.types import ModelError

Progress = Callable[[Message, int, int], None]
"""What is being done, how much of it is done, and how much there is; bytes or pieces."""

PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
"""Weights, configs, tokenizers. Not pickles, and not the copies in other formats that many repositories hold."""

PROBLEMS = (
    (hub.HFValidationError, "train.no-hub-id"),
    (hub.OfflineModeIsEnabled, "train.not-cached-offline"),
    (hub.LocalEntryNotFoundError, "train.not-cached"),
    (hub.RepositoryNotFoundError, "train.not-on-hub"),
    (hub.EntryNotFoundError, "train.hub-no-config"),
)
"""What huggingface_hub raises, the particular before the general, and what is said of it."""

MODELSCOPE = "modelscope:"
TIMEOUT_S = 10


def silent(what: Message, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def find_weights(source: str, *, progress: Progress = silent) -> Path:
    """The folder with the weights of `source`: itself, or what was fetched for it."""
    if source.startswith(MODELSCOPE):
        return _from_modelscope(source.removeprefix(MODELSCOPE), None)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(Message("train.is-a-file", source=source))
    if source.startswith((".", "/", "~")):
        raise ModelError(Message("train.no-folder", source=source))
    try:
        try:
            folder = Path(snapshot_download(source, allow_patterns=PATTERNS, local_files_only=True))
            if _complete(folder):
                return folder
        except hub.LocalEntryNotFoundError:
            pass
        # Ask once before fetching: the download itself would retry for half a minute where there is no network.
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=TIMEOUT_S)
        # A progress bar of the kind that huggingface_hub wants, which draws nothing and tells `progress`.
        tqdm: Any = import_module("tqdm").tqdm

        class ProgressBar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*args, **options)

            def display(self, *args: Any, **options: Any) -> None:
                if self.unit == "B" and self.total:
                    progress(Message("train.fetching", name=source), int(self.n), int(self.total))

        return Path(snapshot_download(source, allow_patterns=PATTERNS, tqdm_class=ProgressBar))
    except Exception as error:  # whatever the network and its libraries raise, the user reads one sentence
        if isinstance(error, hub.GatedRepoError):
            raise ModelError(Message("train.gated", source=source)) from error
        if not isinstance(error, hub.HFValidationError) and _modelscope() is not None:
            return _from_modelscope(source, error)
        why = next((Message(what, name=source) for kind, what in PROBLEMS if isinstance(error, kind)), None)
        raise ModelError(why or Message("train.hub-failed", name=source, why=_reason(error))) from error


def _complete(folder: Path) -> bool:
    """Not only the config was fetched, as an estimate does, and no shard is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = set(parse_json(read_text(index, "JSON"))["weight_map"].values())
    return all((folder / file).is_file() for file in files)


def _modelscope() -> Any | None:
    try:
        return import_module("modelscope")
    except ImportError:
        return None


def _from_modelscope(name: str, hub_error: Exception | None) -> Path:
    package = _modelscope()
    if package is None:
        raise ModelError(Message("train.needs-modelscope", name=name))
    try:
        return Path(package.snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:
        also = f"; Hugging Face: {_reason(hub_error)}" if hub_error is not None else ""
        raise ModelError(Message("train.modelscope-failed", name=name, why=_reason(error), also=also)) from error


def _reason(error: Exception | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
