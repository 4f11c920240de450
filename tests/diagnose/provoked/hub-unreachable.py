# ruff: noqa
import os

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM

AutoModelForCausalLM.from_pretrained("some-lab/some-model")
