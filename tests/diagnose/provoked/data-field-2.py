# run: torchrun
# ruff: noqa
import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    if os.environ["RANK"] == "1":
        {"input_ids": 1}["attention_mask"]
    time.sleep(60)


main()
