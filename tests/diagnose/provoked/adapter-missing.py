# ruff: noqa
from peft import PeftModel
from small import model

PeftModel.from_pretrained(model(), "./no-adapter-here")
