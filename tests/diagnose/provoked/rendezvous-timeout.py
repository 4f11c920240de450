# ruff: noqa
import os
from datetime import timedelta

import torch.distributed as dist

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29873", "RANK": "0", "WORLD_SIZE": "2"}
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
