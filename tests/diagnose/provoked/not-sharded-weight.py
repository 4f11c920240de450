# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29881", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=config):
    embedding = torch.nn.Embedding(100, 8)
embedding(torch.tensor([1, 2]))
