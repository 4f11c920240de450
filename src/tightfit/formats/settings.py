"""What a user's own config file says, as far as it decides which fixes are open: any trainer's, or a job file.

Nothing is checked here; `tightfit lint` does that. A value that cannot be read is one that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.formats.document import read_document
from tightfit.formats.recognise import recognise
from tightfit.formats.registry import kinds
from tightfit.job.known import KnownConfig, completed
from tightfit.types import UserError


def read_known_config(path: Path) -> KnownConfig:
    """The settings in a file of any dialect, and in the DeepSpeed file that it names, or holds."""
    document = read_document(path)
    dialect = recognise(document)
    known = dialect.known(document.values)
    if dialect.deepspeed_at is not None and (named := document.at(dialect.deepspeed_at)) is not None:
        known = completed(known, kinds()["deepspeed"].known(_values_of(named, path.parent)))
    return replace(known, trainer=dialect.name, file=document.shown_path)


def _values_of(named: object, folder: Path) -> Mapping[str, Any]:
    """Of the DeepSpeed file of that name, or of its block; empty: it cannot be read."""
    if isinstance(named, dict):
        return named
    if isinstance(named, str):
        for place in (Path(named), folder / named, folder / Path(named).name):
            try:
                return read_document(place).values
            except UserError:
                continue
    return {}
