# run: deepspeed
# ruff: noqa
import argparse
import os
import signal
import time

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
rank = parser.parse_args().local_rank
print(f"rank {rank} loads", flush=True)
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
