"""The desk's side of a trace: spawn the worker that measures an unknown model, and read what it prints.

The worker knows torch; the desk only its JSON. No code from a model's repository is ever run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.inputs.spelling import shown
from tightfit.types import Block, ModelError, ModelShape, NormKind, Tensor, Traced

LIMIT_S = 600
WORKER = "tightfit.train.trace"


def trace_config(config: Mapping[str, object], name: str, *, python: str = sys.executable) -> ModelShape:
    """Build and measure the model of this config on the meta device, with the given interpreter."""
    with tempfile.TemporaryDirectory(prefix="tightfit-trace-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        answer = _spawn(path, name, python)
    if "error" in answer:
        raise ModelError(_problem(answer["error"], name))
    return _shape(answer, name)


def _spawn(path: Path, name: str, python: str) -> dict[str, Any]:
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing to fetch and nothing to run on a GPU: neither should be tried.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(
            [python, "-m", WORKER, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"tracing {shown(name)} took longer than {LIMIT_S} s") from error
    except OSError as error:
        raise ModelError(f"tracing {shown(name)} could not start {python}: {error.strerror or error}") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"tracing {shown(name)} failed with exit code {done.returncode}: {last}") from error
    return dict(answer)


def _problem(error: Mapping[str, str], name: str) -> str:
    if error["kind"] == "missing":
        return (
            f"model {shown(name)} is not known by name and tracing it needs torch and transformers: "
            "pip install 'tightfit[train]'"
        )
    message = error["message"] if len(error["message"]) <= 200 else error["message"][:199] + "…"
    return f"model {shown(name)} cannot be traced: {message}"


def _shape(answer: Mapping[str, Any], name: str) -> ModelShape:
    norm: NormKind = "layer" if answer["norm"] == "layer" else "rms"
    blocks = tuple(
        Block(
            mixer=Traced(
                saved_bytes_per_token=kind["saved_bytes_per_token"],
                forward_bytes_per_token=kind["forward_bytes_per_token"],
                backward_bytes_per_token=kind["backward_bytes_per_token"],
            ),
            mlp=None,
            norm=norm,
            arrangement="single",
            tensors=_tensors(kind["tensors"]),
        )
        for kind in answer["kinds"]
    )
    note = f"measured with transformers {answer['transformers']} on the meta device, in bf16, not known by name"
    return ModelShape(
        name=name,
        model_type=answer["model_type"],
        hidden_size=answer["hidden_size"],
        vocab_size=answer["vocab_size"],
        blocks=blocks,
        pattern=tuple(answer["pattern"]),
        layer_prefix=answer["layer_prefix"],
        before=_tensors(answer["before"]),
        after=_tensors(answer["after"]),
        tied=answer["tied"],
        final_norm=norm,
        max_positions=answer["max_positions"],
        notes=(note, *answer["notes"]),
    )


def _tensors(entries: list[tuple[str, list[int]]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, tuple(shape)) for name, shape in entries)
