"""Checkpoints that DeepSpeed wrote for another program, as they lie on disk:

output/                     or output/checkpoint-500, as transformers' Trainer has it
    latest                  the name of the newest below
    zero_to_fp32.py
    global_step500/
        *_model_states.pt   names and shapes, and up to stage 2 the weights
        *_optim_states.pt   one a rank: its part of the fp32 weights and of the moments
"""

from __future__ import annotations

from pathlib import Path


def deepspeed_checkpoint(folder: Path) -> Path | None:
    """The folder, where it is such a checkpoint or has one in it; else None."""
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*_model_states.pt")):
        return folder
    inside = (folder / "latest").is_file() or (folder / "zero_to_fp32.py").is_file()
    return folder if inside and any(folder.glob("*/*_states.pt")) else None


def states_folder(folder: Path) -> Path | None:
    """Where the files of the newest checkpoint in `folder` are: the one that `latest` names, else the last step's."""
    if any(folder.glob("*_states.pt")):
        return folder
    if (folder / "latest").is_file():
        with (folder / "latest").open(encoding="utf-8", errors="replace") as file:
            named = folder / Path(file.read(256).strip()).name
        if named != folder and any(named.glob("*_states.pt")):
            return named
    steps = [path for path in folder.glob("global_step*") if path.is_dir() and any(path.glob("*_states.pt"))]
    return max(steps, key=_step, default=None)


def _step(path: Path) -> int:
    digits = path.name.removeprefix("global_step")
    return int(digits) if digits.isdigit() else -1
