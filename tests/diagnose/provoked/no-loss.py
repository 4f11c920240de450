# ruff: noqa
import torch
from small import model
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", max_steps=2)
Trainer(model(), arguments, train_dataset=[{"input_ids": torch.arange(16)} for _ in range(4)]).train()
