# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "overlap_com": True}}
deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
