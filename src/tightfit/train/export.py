"""`python -m tightfit.train export SPEC.json`: what was trained → a plain Hugging Face folder.

The spec says what and where to; the answer is a line of JSON each on stdout: `progress` while it works, then `end`
or `error`. What libraries print goes to stderr. torch is loaded only after everything that can be wrong without
it has been looked at.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from tightfit.inputs.records import read_record
from tightfit.messages import Message
from tightfit.train.export_source import Exported, Spec, Told, recognise
from tightfit.types import ConfigError, UserError

USER_ERROR = 2
INTERRUPTED = 130


def main(path: str) -> int:
    """Export what the spec says; the exit code."""
    with _own_stdout() as out:

        def say(**event: object) -> None:
            out.write(json.dumps(event, default=str) + "\n")
            out.flush()

        try:
            spec = read_record(Path(path), Spec)
            done = export(spec, lambda what, n, total: say(event="progress", what=what, done=n, total=total))
        except UserError as error:
            say(event="error", kind="user", text=" ".join(str(error).split()))
            return USER_ERROR
        except KeyboardInterrupt:
            return INTERRUPTED
        say(event="end", **vars(done))
        return 0


def export(spec: Spec, told: Told) -> Exported:
    """Look what it is, then write it as a Hugging Face folder."""
    found = recognise(spec)
    target = Path(spec.to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(Message("train.target-not-empty", target=target))
    if found.kind == "deepspeed" and not spec.trust_pickle:
        raise ConfigError(Message("train.export-needs-trust", folder=found.folder))
    for package in ("torch", "transformers", "accelerate", *(["deepspeed"] if found.kind == "deepspeed" else [])):
        if find_spec(package) is None:
            raise ConfigError(Message("train.export-needs", package=package))
    from tightfit.train.export_model import export_checkpoint, export_copy, export_merged

    ways = {"deepspeed": export_checkpoint, "adapter": export_merged, "model": export_copy}
    return ways[found.kind](found, spec, told)


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
