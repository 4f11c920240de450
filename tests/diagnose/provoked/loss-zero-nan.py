# ruff: noqa
from small import model, samples
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out", use_cpu=True, report_to="none", learning_rate=1e18, max_steps=6, logging_steps=1,
    per_device_train_batch_size=2, max_grad_norm=0.0, save_strategy="no",
)  # fmt: skip
Trainer(model(), arguments, train_dataset=samples()).train()
