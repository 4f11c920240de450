# ruff: noqa
from small import model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

model().save_pretrained("tiny")
quantised = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
quantised.half()
