"""The keys of a LLaMA-Factory YAML: its own, and every field of transformers' TrainingArguments."""

from __future__ import annotations

from pathlib import Path

from tightfit.inputs.spelling import read_tables
from tightfit.inputs.versions import release
from tightfit.job.training import ARGUMENT_MARKS, OLDER_ARGUMENT_MARKS

_TABLES = read_tables(Path(__file__).with_name("keys.txt"))
LLAMAFACTORY_ADDED = {name[6:]: keys for name, keys in _TABLES.items() if name.startswith("since ")}
"""LLaMA-Factory's release → the keys that it brought."""
MARKS = ARGUMENT_MARKS | OLDER_ARGUMENT_MARKS | _TABLES["own"]
MARKS |= {key: mark for keys in LLAMAFACTORY_ADDED.values() for key, mark in keys.items()}
KNOWN = frozenset(MARKS)

FIELD_OF = _TABLES["fields"]  # a key of the YAML → the field of the job that takes its value as it is
MEGATRONS, READ, CHOSEN = (frozenset(_TABLES[name]) for name in ("megatron", "read", "chosen"))

LLAMAFACTORY_GONE = {
    "image_resolution": ("0.9.2", "image_max_pixels"),
    "video_resolution": ("0.9.2", "video_max_pixels"),
    "new_special_tokens": ("0.9.3", "add_special_tokens"),
    **dict.fromkeys(
        """chunk_size cpu_infer kt_force_think kt_maxlen kt_mode kt_optimize_rule kt_use_cuda_graph mode
        placement_strategy ray_run_name ray_storage_filesystem ray_storage_path resources_per_worker""".split(),
        ("0.9.5", None),
    ),
}
"""LLaMA-Factory's key → the release that no longer takes it, and what took its place."""

TEMPLATES_READ = ("0.9.2", "0.9.5")  # the first and the last release whose templates are listed here


def templates(version: str) -> frozenset[str] | None:
    """The chat templates of a LLaMA-Factory release; None where nobody looked."""
    first, last = map(release, TEMPLATES_READ)
    if not first <= release(version) <= last:
        return None
    known: set[str] = set()
    for name, names in _TABLES.items():
        if name.startswith("templates ") and release(version) >= release(name.split()[-1]):
            known = known - set(names) if "gone" in name else known | set(names)
    return frozenset(known)
