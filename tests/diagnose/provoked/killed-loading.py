# run: torchrun
# ruff: noqa
import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
for shard in range(3):
    print(
        f"\rLoading checkpoint shards:  {shard * 20}%|##  | {shard}/5 [00:10<00:30, 10.1s/it]", end="", file=sys.stderr
    )
    time.sleep(0.2)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
