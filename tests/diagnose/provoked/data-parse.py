# ruff: noqa
from pathlib import Path

from datasets import load_dataset

Path("train.jsonl").write_text('{"text": "one"}\n{"text": "two"\n{"text": 3}}\n')
load_dataset("json", data_files="train.jsonl", cache_dir="cache")
