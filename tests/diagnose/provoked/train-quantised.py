# ruff: noqa
from small import model, samples
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

model().save_pretrained("tiny")
quantised = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to="none")
Trainer(quantised, arguments, train_dataset=samples()).train()
