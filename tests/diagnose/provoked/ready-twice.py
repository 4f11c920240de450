# run: torchrun
# ruff: noqa
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


dist.init_process_group("gloo")
model = DistributedDataParallel(Twice(), find_unused_parameters=True)
model(torch.ones(2, 4, requires_grad=True)).sum().backward()
