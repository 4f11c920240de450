# ruff: noqa
import json
from pathlib import Path

from transformers import AutoModelForCausalLM

Path("own").mkdir(exist_ok=True)
auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
Path("own/config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
Path("own/configuration_own.py").write_text("")
AutoModelForCausalLM.from_pretrained("own")
