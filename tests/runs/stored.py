"""Small checkpoints, made as the worker makes large ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tightfit.runs.checkpoints import MANIFEST, STATE, Manifest, Span, StoredFile, digest, folder_of

PLAN = {"engine": "zero2", "world": 2, "precision": "bf16", "method": "full"}
WEIGHTS, MOMENTS = "model.safetensors", "optimizer/exp_avg.safetensors"


def stored_file(data: bytes, pieces: int = 2) -> StoredFile:
    """What a manifest says of these bytes, hashed in so many pieces."""
    cuts = [len(data) * place // pieces for place in range(pieces + 1)]
    spans = [Span(start, stop, digest(data[start:stop])) for start, stop in pairwise(cuts)]
    return StoredFile(len(data), tuple(spans))


def store(run: Path, step: int, *, size: int = 4096, plan: object = PLAN) -> Path:
    """A whole checkpoint of that step."""
    folder = folder_of(run, step)
    contents = {
        WEIGHTS: bytes(number % 251 for number in range(size)),
        MOMENTS: bytes(size // 2),
        "merges.txt": b"",
        STATE: json.dumps({"step": step, "plan": plan}).encode(),
    }
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files = {name: stored_file(data, 1 if not data else 3) for name, data in contents.items()}
    manifest = Manifest(step=step, written="2026-02-03 04:05:06+00:00", files=files)
    (folder / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    return folder


def flip(path: Path, place: int = 5) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def left_behind(run: Path, name: str) -> Path:
    """What a killed process leaves."""
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(bytes(1000))
    return folder
