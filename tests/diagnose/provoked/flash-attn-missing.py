# ruff: noqa
from small import model
from transformers import AutoModelForCausalLM

model().save_pretrained("tiny")
AutoModelForCausalLM.from_pretrained("tiny", attn_implementation="flash_attention_2")
