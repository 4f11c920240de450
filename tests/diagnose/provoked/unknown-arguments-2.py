# ruff: noqa
from transformers import TrainingArguments

TrainingArguments(output_dir="out", evaluation_strategy="steps")
