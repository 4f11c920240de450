# ruff: noqa
import os

local_rank = int(os.environ["LOCAL_RANK"])
