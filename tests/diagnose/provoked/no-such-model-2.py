# ruff: noqa
import json
from pathlib import Path

from transformers import AutoModelForCausalLM

Path("model").mkdir(exist_ok=True)
Path("model/config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 12, "n_head": 2, "vocab_size": 64}))
AutoModelForCausalLM.from_pretrained("model")
