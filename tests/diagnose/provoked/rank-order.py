# run: torchrun
# ruff: noqa
import os

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
else:
    dist.broadcast(torch.ones(4), src=0)
