# ruff: noqa
import json
from pathlib import Path

json.loads(Path("config_realpersonachat.json").read_text())
