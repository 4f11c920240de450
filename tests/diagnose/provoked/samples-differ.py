# ruff: noqa
"""Two files of one data set, of which one has a field more."""

from pathlib import Path

from datasets import load_dataset

Path("a.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
Path("b.jsonl").write_text('{"instruction": "a", "output": "b", "system": "c"}\n')
load_dataset("json", data_files=["a.jsonl", "b.jsonl"], cache_dir="cache")
