# ruff: noqa
import json
from pathlib import Path

from transformers import AutoModelForCausalLM

Path("new").mkdir(exist_ok=True)
Path("new/config.json").write_text(json.dumps({"model_type": "qwen9_next"}))
AutoModelForCausalLM.from_pretrained("new")
