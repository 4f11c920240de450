"""The texts of the catalogue of symptoms, which stand beside what each looks like, in `diagnose/symptoms/*.yaml`.

    symptom.device-oom.cause         `cause` and `cause_zh` of the symptom device-oom, likewise `title`
    symptom.nccl-oom.fix-1           `text` and `text_zh` of its first fix
    symptom.fix.smaller-micro-batch  of a remedy that many symptoms share

A record names them in this way, and is read where nothing is diagnosed: so this room reads them, and the catalogue
takes the parsed files from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SYMPTOMS = Path(__file__).parents[1] / "diagnose" / "symptoms"
SHARED = "remedies.yaml"
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time


@cache
def read_files() -> Mapping[str, Any]:
    """The catalogue as it is written, by file name."""
    return {path.name: LOADER(path.read_bytes()).get_single_data() for path in sorted(SYMPTOMS.glob("*.yaml"))}


def read_texts() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[Mapping[str, Any], str]] = {}  # name → where it stands, under which key
    for file, tree in read_files().items():
        if file == SHARED:
            found |= {f"fix.{key}": (entry, "text") for key, entry in tree.items()}
            continue
        for entry in tree:
            found |= {f"{entry['id']}.{key}": (entry, key) for key in ("title", "cause")}
            fixes = enumerate(entry["fixes"], 1)
            found |= {f"{entry['id']}.fix-{number}": (fix, "text") for number, fix in fixes if isinstance(fix, dict)}
    return {name: (one_line(entry[key]), one_line(entry[f"{key}_zh"])) for name, (entry, key) in found.items()}


def one_line(text: object) -> str:
    return " ".join(str(text).split())
