# ruff: noqa
from peft import LoraConfig, get_peft_model
from small import model

get_peft_model(model(), LoraConfig(target_modules=["query_key_value"]))
