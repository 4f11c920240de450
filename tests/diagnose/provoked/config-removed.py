# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29878", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

config = {"train_batch_size": 1, "elasticity": {"enabled": True, "max_train_batch_size": 64}}
deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
