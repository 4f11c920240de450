# ruff: noqa
import json
from pathlib import Path

Path("train.json").write_text('[{"text": "one",}]')
json.loads(Path("train.json").read_text())
