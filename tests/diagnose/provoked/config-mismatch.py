# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29879", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
from small import model, samples
from transformers import Trainer, TrainingArguments

config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, per_device_train_batch_size=1, deepspeed=config, report_to="none"
)
Trainer(model(), arguments, train_dataset=samples()).train()
