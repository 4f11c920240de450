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
from dataclasses import fields
from pathlib import Path

from tightfit.inputs.spelling import shown
from tightfit.messages import Message, from_json
from tightfit.owned import replace_file
from tightfit.types import Block, ModelError, ModelShape, NormKind, Tensor, Traced

LIMIT_S = 600
WORKER = "tightfit.train.trace"


def trace_config(config: Mapping[str, object], name: str, *, python: str = sys.executable) -> ModelShape:
    """Build and measure the model of this config on the meta device, with the given interpreter."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing to fetch and nothing to run on a GPU: neither should be tried.
    offline = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="tightfit-trace-") as folder:
        path = Path(folder) / "config.json"
        replace_file(path, json.dumps(dict(config)).encode())
        command, environment = [python, "-m", WORKER, str(path)], {**os.environ, **offline}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(Message("model.trace-too-slow", name=shown(name), limit_s=LIMIT_S)) from error
        except OSError as error:
            reason = error.strerror or error
            problem = Message("model.trace-not-started", name=shown(name), python=python, reason=reason)
            raise ModelError(problem) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        printed = done.stderr.strip().splitlines()
        last = printed[-1] if printed else Message("model.no-message")
        code = done.returncode
        raise ModelError(Message("model.trace-failed", name=shown(name), returncode=code, last=last)) from error
    if "error" in answer:
        if answer["error"]["kind"] == "missing":
            raise ModelError(Message("model.trace-needs-torch", name=shown(name)))
        said = str(from_json(answer["error"]["message"]))
        said = said if len(said) <= 200 else said[:199] + "…"
        raise ModelError(Message("model.not-traced", name=shown(name), said=said))
    norm: NormKind = "layer" if answer["norm"] == "layer" else "rms"
    blocks = tuple(
        Block(
            mixer=Traced(**{each.name: kind[each.name] for each in fields(Traced)}),
            mlp=None,
            norm=norm,
            arrangement="single",
            tensors=_tensors(kind["tensors"]),
        )
        for kind in answer["kinds"]
    )
    note = Message("model.measured", version=answer["transformers"])
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
        notes=(note, *(str(from_json(said)) for said in answer["notes"])),
    )


def _tensors(entries: list[tuple[str, list[int]]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, tuple(shape)) for name, shape in entries)
