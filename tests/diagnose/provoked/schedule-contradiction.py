# ruff: noqa
from transformers import TrainingArguments

TrainingArguments(output_dir="out", load_best_model_at_end=True, eval_strategy="steps", eval_steps=30, save_steps=100)
