# ruff: noqa
from pathlib import Path

from tokenizers import Tokenizer

Path("tokenizer.json").write_text(
    '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": [7]}}'
)
Tokenizer.from_file("tokenizer.json")
