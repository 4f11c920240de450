# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29875", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

config = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
