"""Where somebody else's training can go on: the newest whole checkpoint, and how its trainer is told.

Hugging Face's Trainer writes `checkpoint-N` folders, `trainer_state.json` near the end of each. A process that is
killed while it writes leaves half of one, so every file whose length can be known is measured.
"""

from __future__ import annotations

import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tightfit.inputs.records import parse_json, read_json
from tightfit.runs.external.config import ExternalTraining
from tightfit.runs.external.script import RESUME, Resumes

_FOLDER = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"
_PLACES = ("output_dir", "save_dir", "checkpoint_dir", "output", "save")
_LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint of the trainer's."""

    path: Path
    step: int
    max_steps: int | None
    has_optimizer: bool
    adapter: bool  # it holds adapters, and not a whole model


def kept_by(external: ExternalTraining) -> Kept | None:
    """The newest whole checkpoint; None: there is none that is known."""
    folder = output_of(external)
    if folder is None or not folder.is_dir():
        return None
    numbered = [(int(found[1]), path) for path in folder.iterdir() if (found := _FOLDER.search(path.name))]
    for step, path in sorted(numbered, reverse=True):
        kept = _whole(path, step)
        if kept is not None:
            return kept
    return None


def output_of(external: ExternalTraining) -> Path | None:
    named = next((text for name in _PLACES if (text := external.said_text(name)) is not None), None)
    return None if named is None else Path(named).expanduser()


def saves_itself(external: ExternalTraining) -> Path | None:
    """A folder of DeepSpeed's own checkpoints, which only the script knows how to read."""
    folder = output_of(external)
    return folder if folder is not None and (folder / _LATEST).is_file() else None


def means_of(external: ExternalTraining) -> Resumes:
    """How the trainer goes on from a checkpoint. A flag that its script does not hand on tells it nothing."""
    if external.is_llamafactory:
        return "told"
    found = external.script.resumes
    if found == "none" and not external.script.calls_plain_train and external.command.flag(RESUME) is not None:
        return "told"
    return "none" if found == "told" and not external.takes(RESUME) else found


def _whole(path: Path, step: int) -> Kept | None:
    try:
        state = read_json(path / _STATE)
        if state["global_step"] != step:
            return None
        names = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sharded = path / f"global_step{step}"
    models = [path / name for name in names if name.endswith(".safetensors")]
    packed = [path / name for name in names if name.endswith((".pt", ".bin", ".pth")) and name != "training_args.bin"]
    packed += list(sharded.glob("*.pt"))
    weights = bool(models) or sharded.is_dir() or any(name.endswith(".bin") for name in names - {"training_args.bin"})
    if not weights or not all(map(_is_safetensors, models)) or not all(map(zipfile.is_zipfile, packed)):
        return None
    most = state.get("max_steps")
    return Kept(
        path=path,
        step=step,
        max_steps=most if isinstance(most, int) else None,
        has_optimizer=sharded.is_dir() or "optimizer.pt" in names or "optimizer.bin" in names,
        adapter="adapter_config.json" in names,
    )


def _is_safetensors(path: Path) -> bool:
    """Whether the file is as long as its head says."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                return False
            head = parse_json(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
        return bool(path.stat().st_size == 8 + length + max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, struct.error, AttributeError, RecursionError):
        return False
